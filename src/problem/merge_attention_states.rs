//! Merges attention of the same queries over two disjoint sets of keys into attention over their union
//! (`docs/semantics.md#merge_attention_states`).

use super::validate::{contiguous_rows, dense, kernel_sizes};
use super::{CallArguments, CallResult, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// Element types of `out_a`, which `out_b` and `out` share.
pub const DTYPES: &[DType] = &[DType::F16, DType::BF16, DType::F32];

/// Attention over one set of keys.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// `[n, h, d]`; the last dimension is contiguous
    pub out: Tensor<'a>,
    /// `f32[h, n]`, dense
    pub lse: *const f32,
}

/// A validated call. Dimensions: n query rows, h query heads, d elements of an output row, at least 1.
#[derive(Clone, Copy, Debug)]
pub struct MergeAttentionStates<'a> {
    /// Attention over the first set of keys.
    pub a: State<'a>,
    /// Attention over the second set of keys.
    pub b: State<'a>,
    /// `[n, h, d]`, dense, of the states' dtype
    pub out: Tensor<'a>,
    /// `f32[h, n]`, dense
    pub lse: *mut f32,
    /// n
    pub num_rows: usize,
    /// h
    pub num_heads: usize,
    /// d
    pub head_dim: usize,
}

// SAFETY: the struct consists of addresses and numbers; each access through it states why it is allowed (see `Tensor`).
unsafe impl Send for MergeAttentionStates<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for MergeAttentionStates<'_> {}

/// Validates a call and returns its problem.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<MergeAttentionStates<'a>> {
    let first = args.operand(Operand::OutA);
    first.expect_dtype("out_a", DTYPES)?;
    first.expect_shape("out_a", &[Dim::Any("n"), Dim::Any("h"), Dim::Any("d")])?;
    let [n, h, d] = [0, 1, 2].map(|axis| first.dims[axis]);
    ensure(d > 0, || format!("out_a has shape {:?}, expected d of at least 1", first.dims))?;
    kernel_sizes(&[("n", n), ("h", h), ("d", d)])?;
    if h * d >= i64::from(i32::MAX) {
        return Err(Error::invalid(format!("out_a has rows of {h} x {d} elements, expected below 2^31")));
    }
    let rows = [Dim::Is("n", n), Dim::Is("h", h), Dim::Is("d", d)];
    let outputs = |name: &str, tensor: &Tensor| {
        tensor.expect_dtype(name, &[first.dtype])?;
        tensor.expect_shape(name, &rows)
    };
    let sums = |name: &str, tensor: &Tensor| {
        tensor.expect_dtype(name, &[DType::F32])?;
        tensor.expect_shape(name, &[Dim::Is("h", h), Dim::Is("n", n)])?;
        dense(name, tensor)
    };
    let state = |out_name: Operand, lse_name: Operand| {
        let (out, lse) = (args.operand(out_name), args.operand(lse_name));
        outputs(out_name.name(), &out)?;
        contiguous_rows(out_name.name(), &out)?;
        sums(lse_name.name(), &lse)?;
        Ok::<State, Error>(State { out, lse: lse.data.cast_const().cast() })
    };
    let a = state(Operand::OutA, Operand::LseA)?;
    let b = state(Operand::OutB, Operand::LseB)?;
    let (out, lse) = (args.result(CallResult::Out), args.result(CallResult::Lse));
    outputs("out", &out)?;
    dense("out", &out)?;
    sums("lse", &lse)?;
    let lse = lse.data.cast();
    Ok(MergeAttentionStates { a, b, out, lse, num_rows: n as usize, num_heads: h as usize, head_dim: d as usize })
}

impl MergeAttentionStates<'_> {
    /// Whether the results have no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.num_rows == 0 || self.num_heads == 0
    }
}
