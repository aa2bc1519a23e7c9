//! What several operators ask of their operands.

use super::{CallArguments, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// The largest head dimension.
pub const MAX_HEAD_DIM: i64 = 256;

/// The head dimension of `name` is a multiple of 8 up to [`MAX_HEAD_DIM`].
pub(super) fn head_dim(name: &str, head_dim: i64) -> Result {
    ensure(head_dim > 0, || format!("{name} has head dimension {head_dim}, expected at least 8"))?;
    if head_dim % 8 != 0 || head_dim > MAX_HEAD_DIM {
        return Err(Error::unimplemented(format!(
            "{name} has head dimension {head_dim}; every multiple of 8 up to {MAX_HEAD_DIM} works"
        )));
    }
    Ok(())
}

/// Sizes that the kernels hold in 32 bits.
pub(super) fn kernel_sizes(sizes: &[(&str, i64)]) -> Result {
    for (name, size) in sizes {
        ensure(*size < i64::from(i32::MAX), || format!("{name} is {size}, expected below 2^31"))?;
    }
    Ok(())
}

pub(super) fn dense(name: &str, tensor: &Tensor) -> Result {
    ensure(tensor.is_dense(), || format!("{name} has strides {:?}, expected a dense tensor", tensor.strides))
}

/// The last dimension is contiguous, whatever the other strides.
pub(super) fn contiguous_rows(name: &str, tensor: &Tensor) -> Result {
    let last = tensor.dims.len() - 1;
    ensure(tensor.is_empty() || tensor.stride(last) == 1, || {
        format!("{name} has strides {:?}, expected 1 for the last dimension", tensor.strides)
    })
}

/// An operand of 32-bit indices with this shape, dense.
pub(super) fn indices(name: &str, tensor: &Tensor, shape: &[Dim]) -> Result<*const i32> {
    tensor.expect_dtype(name, &[DType::I32])?;
    tensor.expect_shape(name, shape)?;
    dense(name, tensor)?;
    Ok(tensor.data.cast_const().cast())
}

/// An optional operand of 32-bit indices, `i32[count]`, dense.
pub(super) fn optional_indices(
    args: &CallArguments,
    operand: Operand,
    (of, count): (&'static str, i64),
) -> Result<Option<*const i32>> {
    let tensor = args.optional_operand(operand);
    tensor.map(|tensor| indices(operand.name(), &tensor, &[Dim::Is(of, count)])).transpose()
}

/// `q_scale`, `k_scale` or `v_scale`: `f32[1]` or `f32[Hkv]`, dense.
pub(super) fn scale(args: &CallArguments, operand: Operand, heads: i64) -> Result<Option<Scale>> {
    let Some(scale) = args.optional_operand(operand) else { return Ok(None) };
    let name = operand.name();
    scale.expect_dtype(name, &[DType::F32])?;
    ensure(scale.dims == [1] || scale.dims == [heads], || {
        format!("{name} has shape {:?}, expected [1] or [Hkv={heads}]", scale.dims)
    })?;
    dense(name, &scale)?;
    Ok(Some(Scale { values: scale.data.cast_const().cast(), per_head: scale.dims != [1] }))
}

/// Factors of q, K or V: one, or one a KV head.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// `f32[1]` or `f32[Hkv]`
    pub values: *const f32,
    /// Whether there is one a KV head.
    pub per_head: bool,
}

// SAFETY: an address and a flag; see `Tensor`.
unsafe impl Send for Scale {}
// SAFETY: as above.
unsafe impl Sync for Scale {}
