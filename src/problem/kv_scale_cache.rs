//! The scales of a quantized cache, one per row: the operand and the result `kv_scale_cache`
//! (`docs/semantics.md#caches-with-a-scale-per-row`).

use super::cache_copy::CacheCopy;
use super::kv_layout::{KvLayout, KvView};
use super::{CallArguments, CallResult, Operand};
use crate::error::{Error, Result, ensure};
use crate::tensor::{DType, Dim, Tensor};

/// Element types of a cache whose rows have scales.
const SCALED_DTYPES: [DType; 2] = [DType::I8, DType::F8E4M3FN];

/// The smallest largest magnitude of a row that is stored. Smaller rows are stored as zeros with a scale of 0, so that no
/// scale, and no quotient of a scale, is subnormal or overflows.
pub const SMALLEST_ROW: f32 = 1.0 / (1u128 << 100) as f32;

/// The largest code of a row in a cache of `dtype`, which is one of `SCALED_DTYPES`: 127 of i8, 448 of f8e4m3fn.
#[must_use]
pub fn largest_code(dtype: DType) -> f32 {
    if dtype == DType::I8 { 127.0 } else { 448.0 }
}

/// A scale for each row of K and of V. The views are of f32, with strides in elements: the scale of row (page, token, head)
/// is the f32 at `data + (page * page_stride + token * token_stride + head * head_stride) * 4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvScaleCache {
    /// The scales of K.
    pub k: KvView,
    /// The scales of V.
    pub v: KvView,
}

impl KvScaleCache {
    /// Validates the optional operand `kv_scale_cache` of the cache `name`, which has `layout`.
    pub(super) fn operand(args: &CallArguments, name: &str, cache: &Tensor, layout: KvLayout) -> Result<Option<Self>> {
        let scales = args.optional_operand(Operand::KvScaleCache);
        check(args, (name, cache, layout), scales.as_ref())?;
        Ok(scales.map(|scales| Self::of(&scales, layout)))
    }

    /// Validates the optional operand and result `kv_scale_cache` of a call that updates the cache `name`. Returns the view
    /// of the result.
    pub(super) fn updated<'a>(
        args: &CallArguments<'a>,
        name: &str,
        cache: &Tensor,
        layout: KvLayout,
    ) -> Result<Option<(Self, CacheCopy<'a>)>> {
        let scales = args.optional_operand(Operand::KvScaleCache);
        check(args, (name, cache, layout), scales.as_ref())?;
        let result = args.optional_result(CallResult::KvScaleCache);
        let (from, to) = match (scales, result) {
            (None, None) => return Ok(None),
            (Some(from), Some(to)) => (from, to),
            (Some(_), None) => return Err(Error::invalid("kv_scale_cache is given without the result kv_scale_cache")),
            (None, Some(_)) => return Err(Error::invalid("the result kv_scale_cache is given without the operand")),
        };
        to.expect_dtype("result kv_scale_cache", &[DType::F32])?;
        ensure(to.dims == from.dims, || {
            format!("result kv_scale_cache has shape {:?}, expected the operand's, {:?}", to.dims, from.dims)
        })?;
        let copy = CacheCopy { from, to };
        ensure(!copy.is_needed() || (from.is_dense() && to.is_dense()), || {
            "kv_scale_cache is strided and not updated in place; alias the result to the operand".into()
        })?;
        Ok(Some((Self::of(&to, layout), copy)))
    }

    fn of(scales: &Tensor, layout: KvLayout) -> Self {
        let (k, v) = layout.views(scales);
        Self { k, v }
    }
}

/// Validates that a cache and its scales belong together.
fn check(args: &CallArguments, (name, cache, layout): (&str, &Tensor, KvLayout), scales: Option<&Tensor>) -> Result {
    let Some(scales) = scales else {
        return ensure(cache.dtype != DType::I8, || {
            format!("{name} has dtype i8, which needs its scales, kv_scale_cache")
        });
    };
    scales.expect_dtype("kv_scale_cache", &[DType::F32])?;
    let rank = layout.shape(Dim::Any("Hkv"), 0).len();
    ensure(cache.dims.len() == rank, || format!("{name} has shape {:?}, expected {rank} dimensions", cache.dims))?;
    let rows = &cache.dims[..cache.dims.len() - 1];
    ensure(scales.dims == rows, || {
        format!(
            "kv_scale_cache has shape {:?}, expected that of {name} without its last dimension, {rows:?}",
            scales.dims
        )
    })?;
    cache.expect_dtype(&format!("{name} with kv_scale_cache"), &SCALED_DTYPES)?;
    for scale in [Operand::KScale, Operand::VScale] {
        ensure(args.optional_operand(scale).is_none(), || {
            format!("{} is given, but kv_scale_cache holds the scales", scale.name())
        })?;
    }
    Ok(())
}
