//! Validation of operands that several operators share.

use super::{CallArguments, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// The largest head dimension.
pub const MAX_HEAD_DIM: i64 = 512;

/// The largest row of a latent cache, which multi-head latent attention reads as a key.
pub const MAX_LATENT_DIM: i64 = 576;

/// The most columns of a latent row that are its value.
pub(super) const MAX_LATENT_VALUE_DIM: i64 = 512;

/// Refuses a head dimension that is not a multiple of 8 up to [`MAX_HEAD_DIM`].
pub(super) fn head_dim(name: &str, head_dim: i64) -> Result {
    row_dim(name, head_dim, MAX_HEAD_DIM)
}

/// Refuses a head dimension that is not a multiple of 8 up to `largest`.
pub(super) fn row_dim(name: &str, head_dim: i64, largest: i64) -> Result {
    ensure(head_dim > 0, || format!("{name} has head dimension {head_dim}, expected at least 8"))?;
    if head_dim % 8 != 0 || head_dim > largest {
        return Err(Error::unimplemented(format!(
            "{name} has head dimension {head_dim}; every multiple of 8 up to {largest} works"
        )));
    }
    Ok(())
}

/// Refuses sizes from 2^31 on, because the kernels hold them in 32 bits.
pub(super) fn kernel_sizes(sizes: &[(&str, i64)]) -> Result {
    for (name, size) in sizes {
        ensure(*size < i64::from(i32::MAX), || format!("{name} is {size}, expected below 2^31"))?;
    }
    Ok(())
}

/// Refuses a tensor that is not dense.
pub(super) fn dense(name: &str, tensor: &Tensor) -> Result {
    ensure(tensor.is_dense(), || format!("{name} has strides {:?}, expected a dense tensor", tensor.strides))
}

/// Refuses a tensor whose last dimension is not contiguous. The other strides are arbitrary.
pub(super) fn contiguous_rows(name: &str, tensor: &Tensor) -> Result {
    let last = tensor.dims.len() - 1;
    ensure(tensor.is_empty() || tensor.stride(last) == 1, || {
        format!("{name} has strides {:?}, expected 1 for the last dimension", tensor.strides)
    })
}

/// Validates a dense `i32` operand of this shape and returns its address.
pub(super) fn indices(name: &str, tensor: &Tensor, shape: &[Dim]) -> Result<*const i32> {
    tensor.expect_dtype(name, &[DType::I32])?;
    tensor.expect_shape(name, shape)?;
    dense(name, tensor)?;
    Ok(tensor.data.cast_const().cast())
}

/// Validates an optional dense operand `i32[count]` and returns its address.
pub(super) fn optional_indices(
    args: &CallArguments,
    operand: Operand,
    (of, count): (&'static str, i64),
) -> Result<Option<*const i32>> {
    let tensor = args.optional_operand(operand);
    tensor.map(|tensor| indices(operand.name(), &tensor, &[Dim::Is(of, count)])).transpose()
}

/// Validates `q_scale`, `k_scale` or `v_scale`, which is a dense `f32[1]` or `f32[Hkv]`.
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

/// Validates a scale that all rows share, a dense `f32[1]`.
pub(super) fn scale_of_all(args: &CallArguments, operand: Operand) -> Result<Option<Scale>> {
    let Some(scale) = args.optional_operand(operand) else { return Ok(None) };
    let name = operand.name();
    scale.expect_dtype(name, &[DType::F32])?;
    ensure(scale.dims == [1], || format!("{name} has shape {:?}, expected [1]", scale.dims))?;
    dense(name, &scale)?;
    Ok(Some(Scale { values: scale.data.cast_const().cast(), per_head: false }))
}

/// Dequantization scales of q, K or V.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// `f32[1]` or `f32[Hkv]`
    pub values: *const f32,
    /// Whether there is one per KV head.
    pub per_head: bool,
}

// SAFETY: the struct consists of an address and a flag; each access through it states why it is allowed (see `Tensor`).
unsafe impl Send for Scale {}
// SAFETY: as for `Send`.
unsafe impl Sync for Scale {}
