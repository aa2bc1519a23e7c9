//! The public Rust API: one safe function per operator, re-exported from the crate root.
//!
//! Every function takes operands, options with a `Default`, results, and where to run ([`On`]). Operands and options
//! are those of `docs/semantics.md`, and an error's message begins with the target's name. The types guarantee what
//! [`crate::call()`] requires of its caller: operands are borrowed and results are borrowed mutably, the memory belongs
//! to the place where the call runs, and every shape is validated against its memory. Lengths, pages and slots may be
//! any numbers, because the operators clamp or skip invalid ones.

use crate::problem::for_each_operator;

/// Declares one module per operator, with its function and the types of its arguments.
macro_rules! modules {
    ($($op:ident $name:ident,)*) => {
        $(
            mod $name;
            #[allow(unused_imports, unreachable_pub, reason = "a cache in two tensors has no separate function")]
            pub use $name::*;
        )*
    };
}
for_each_operator!(modules);

mod attention;
mod on;
mod scaled_cache;
mod views;

pub use attention::AttentionResults;
pub use on::On;
pub use scaled_cache::ScaledCache;
pub use views::{Device, Element, Host, MAX_RANK, Memory, TensorMut, TensorRef};

use crate::dispatch::{Call, call};
use crate::error::Result;
use crate::problem::Attribute;
use crate::problem::Op;
use crate::tensor::{DType, Tensor};
use views::View;

/// Keys and values in tensors of type `T`: in two tensors, or both in one.
///
/// Dimensions: `P` pages of `page_size` tokens, `Hkv` heads, `D` and `Dv` elements per head's keys and values.
#[derive(Clone, Copy, Debug)]
pub enum Kv<T> {
    /// Keys `[P, page_size, Hkv, D]` and values `[P, page_size, Hkv, Dv]`, or packed without pages `[Tk, Hkv, D]` and
    /// `[Tk, Hkv, Dv]`.
    Split {
        /// The keys.
        k: T,
        /// The values.
        v: T,
    },
    /// `[P, page_size, 2*Hkv, D]`, the keys of head h at 2h, its values at 2h+1.
    Interleaved(T),
    /// `[2, P, page_size, Hkv, D]`, keys first.
    Stacked(T),
    /// `[P, 2, page_size, Hkv, D]`, keys first in each page.
    PerPage(T),
}

impl<T> Kv<T> {
    /// The attribute `kv_layout`, and the one or two tensors.
    fn parts(self) -> (i64, T, Option<T>) {
        let (number, first, second) = match self {
            Kv::Split { k, v } => (0, k, Some(v)),
            Kv::Interleaved(both) => (1, both, None),
            Kv::Stacked(both) => (2, both, None),
            Kv::PerPage(both) => (3, both, None),
        };
        (number, first, second)
    }
}

/// Calls an operator. Operands, results and attributes are in the order of its signature; `None` means left out.
fn run<M: Memory, const N: usize, const R: usize>(
    op: Op,
    operands: [Option<TensorRef<M>>; N],
    results: [Option<TensorMut<M>>; R],
    attributes: &[Attribute],
    on: On<M>,
) -> Result {
    let signature = op.signature();
    let operands = operands.map(|operand| operand.map(TensorRef::view));
    let results = results.map(|result| result.map(TensorMut::view));
    let operands = tensors(signature.operands, &operands).map_err(|error| error.of(signature.target))?;
    let results = tensors(signature.results, &results).map_err(|error| error.of(signature.target))?;
    // SAFETY: `tensors` has validated each shape against its memory. On the host the memory is borrowed for longer than
    // this call, and mutably for results; only the cache that is updated in place is operand and result. On a device,
    // the callers of `from_device` and `On::stream` guarantee the same until the work has finished.
    unsafe { call(&Call { op, action: on.action, operands: &operands, results: &results, attributes }) }
}

/// An operand or result that was left out, represented as XLA's empty buffer.
const LEFT_OUT: Tensor<'static> = Tensor { dtype: DType::U8, data: std::ptr::null_mut(), dims: &[0], strides: None };

/// The tensors of `views`, each validated against its memory.
fn tensors<'a, const N: usize>(names: &[&str], views: &'a [Option<View>; N]) -> Result<[Tensor<'a>; N]> {
    let mut tensors = [LEFT_OUT; N];
    for ((name, view), tensor) in names.iter().zip(views).zip(&mut tensors) {
        if let Some(view) = view {
            *tensor = view.tensor(name)?;
        }
    }
    Ok(tensors)
}

/// A count as the value of an attribute.
fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
