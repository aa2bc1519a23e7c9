//! [`simple_add`]

use super::{Memory, On, TensorMut, TensorRef, run};
use crate::error::Result;
use crate::problem::Op;
use crate::problem::arguments::simple_add::{Operands, Results};

/// `out = a + b`, elementwise, for equal shapes and one dtype of f16, bf16, f32, f64, i8, u8, i32 and i64.
///
/// Floats round to nearest even, integers wrap (`docs/semantics.md#simple_add`).
///
/// ```
/// use xla_attention::{On, TensorMut, TensorRef, simple_add};
///
/// let (a, b, mut out) = ([1.0f32, 2.0, 3.0], [10.0f32, 20.0, 30.0], [0.0f32; 3]);
/// simple_add(TensorRef::new(&a, &[3]), TensorRef::new(&b, &[3]), TensorMut::new(&mut out, &[3]), On::cpu())?;
/// assert_eq!(out, [11.0, 22.0, 33.0]);
/// # Ok::<(), xla_attention::Error>(())
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::Code::InvalidArgument) where shapes or dtypes differ.
///
/// ```
/// # use xla_attention::{On, TensorMut, TensorRef, simple_add};
/// # let (a, b, mut out) = ([1.0f32, 2.0, 3.0], [10.0f32, 20.0, 30.0], [0.0f32; 3]);
/// let (a, b, out) = (TensorRef::new(&a, &[3]), TensorRef::new(&b[..2], &[3]), TensorMut::new(&mut out, &[3]));
/// let error = simple_add(a, b, out, On::cpu()).unwrap_err();
/// assert_eq!(error.to_string(), "xla_gpu_simple_add: b has shape [3] of f32, which is 12 bytes, in memory of 8");
/// ```
pub fn simple_add<M: Memory>(a: TensorRef<M>, b: TensorRef<M>, out: TensorMut<M>, on: On<M>) -> Result {
    run(Op::SimpleAdd, Operands { a, b }.in_order(), Results { out }.in_order(), &[], on)
}
