//! `out = a + b`, elementwise: the smallest complete operator, an example for `docs/dev/adding_an_operator.md`.

use super::{CallArguments, CallResult, Operand};
use crate::error::{Result, ensure};
use crate::tensor::{DType, Tensor};

/// Supported element types.
pub const DTYPES: &[DType] =
    &[DType::F16, DType::BF16, DType::F32, DType::F64, DType::I8, DType::U8, DType::I32, DType::I64];

/// A validated call: `a`, `b` and `out` have the same shape (any rank, possibly empty) and the same dtype of
/// [`DTYPES`].
///
/// Floats round to nearest even, integers wrap. `out` may alias `a` or `b`.
#[derive(Clone, Copy, Debug)]
pub struct SimpleAdd<'a> {
    /// First summand.
    pub a: Tensor<'a>,
    /// Second summand.
    pub b: Tensor<'a>,
    /// The sum.
    pub out: Tensor<'a>,
}

/// Validates a call and returns its problem.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<SimpleAdd<'a>> {
    let (a, b, out) = (args.operand(Operand::A), args.operand(Operand::B), args.result(CallResult::Out));
    a.expect_dtype("a", DTYPES)?;
    for (name, other) in [("b", &b), ("out", &out)] {
        other.expect_dtype(name, &[a.dtype])?;
        ensure(other.dims == a.dims, || {
            format!("{name} has shape {:?}, expected the shape of a, {:?}", other.dims, a.dims)
        })?;
    }
    for (name, tensor) in [("a", &a), ("b", &b), ("out", &out)] {
        ensure(tensor.is_dense(), || format!("{name} has strides {:?}, expected a dense tensor", tensor.strides))?;
    }
    Ok(SimpleAdd { a, b, out })
}
