//! The operators as safe functions over tensors of the host or of a device.
//!
//! Every function takes operands, options with a `Default`, results, and where to run. Names and meaning are those of the
//! operators' definitions in [`crate::problem`], and so are the errors, with the target's name in front. What
//! [`crate::call()`] asks of its caller follows from the types: operands are borrowed and results borrowed mutably, the
//! memory lies where the call runs, and shapes are held against it before anything is computed. Lengths, pages and slots
//! may hold any number: the operators clamp or skip them.

use crate::problem::for_each_operator;

/// Every operator has a module of its name, with its function and what that takes.
macro_rules! modules {
    ($($op:ident $name:ident,)*) => {
        $(
            mod $name;
            #[allow(unused_imports, unreachable_pub, reason = "a cache in two tensors has no function of its own")]
            pub use $name::*;
        )*
    };
}
for_each_operator!(modules);

mod attention;
mod on;
mod views;

pub use attention::AttentionResults;
pub use on::On;
pub use views::{Device, Element, Host, MAX_RANK, Memory, TensorMut, TensorRef};

use crate::dispatch::{Call, call};
use crate::error::Result;
use crate::problem::Attribute;
use crate::problem::Op;
use crate::tensor::{DType, Tensor};
use views::View;

/// Keys and values in tensors of type `T`: in one each, or both in one.
///
/// Letters: `P` pages of `page_size` tokens, `Hkv` heads, `D` and `Dv` elements of a head's keys and values.
#[derive(Clone, Copy, Debug)]
pub enum Kv<T> {
    /// Keys `[P, page_size, Hkv, D]` and values `[P, page_size, Hkv, Dv]`; packed, without pages, `[Tk, Hkv, D]` and
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

/// Call an operator with operands, results and attributes in the order of its signature; `None` is left out.
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
    let call_ = Call { op, action: on.action, operands: &operands, results: &results, attributes };
    // SAFETY: `tensors` has held the shapes against the memory. On the host that is slices, borrowed for longer than this
    // function runs, mutably for the results; an operand is a result's memory only as the cache that is updated in place.
    // On a device, those who made the tensors and `on` have promised the same until the work is done.
    unsafe { call(&call_) }
}

/// Stands for an operand or a result that was left out, as an empty buffer of XLA's does.
const LEFT_OUT: Tensor<'static> = Tensor { dtype: DType::U8, data: std::ptr::null_mut(), dims: &[0], strides: None };

/// The tensors of `views`, each of which lies in its memory.
fn tensors<'a, const N: usize>(names: &[&str], views: &'a [Option<View>; N]) -> Result<[Tensor<'a>; N]> {
    let mut tensors = [LEFT_OUT; N];
    for ((name, view), tensor) in names.iter().zip(views).zip(&mut tensors) {
        if let Some(view) = view {
            *tensor = view.tensor(name)?;
        }
    }
    Ok(tensors)
}

/// A count as an attribute.
fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
