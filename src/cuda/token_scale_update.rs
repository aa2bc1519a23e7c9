//! `kv_cache_update` into a cache with a scale per token and KV head, on CUDA: a group of threads quantizes a row.

use super::cache_rows;
use super::chunk::{CHUNK, aligned_to};
use super::kernel_launch::Launch;
use super::params::cache_rows::{HeadPartition, RowPartition};
use super::params::slots::SlotMapping;
use super::params::token_scale_update::{
    QuantizedRows, SMALLEST_SCALED_ROW, TOKEN_SCALE_ELEMENTS, TokenScaleUpdateParams,
};
use crate::error::Result;
use crate::problem::kv_cache_update::{KvCacheUpdate, NewRows};
use crate::problem::{KvScaleCache, KvView, SMALLEST_ROW};
use crate::tensor::DType;

const KERNEL: &str = "kv_cache_update_token_scales";
const KERNEL_SM80: &str = "kv_cache_update_token_scales_sm80";

/// Threads of a warp, the largest group that has a row.
const WARP: u32 = 32;

const _: () = assert!(SMALLEST_SCALED_ROW.to_bits() == SMALLEST_ROW.to_bits());

impl QuantizedRows {
    fn new(new: &NewRows, scales: &KvView) -> Self {
        let (rows, cache) = (&new.rows, &new.cache);
        let size = rows.dtype.size() as i64;
        let rows_aligned = aligned_to(CHUNK, &[rows.data as i64, rows.stride(0) * size, rows.stride(1) * size]);
        let codes = [cache.data as i64, cache.page_stride, cache.token_stride, cache.head_stride];
        let aligned = rows_aligned && aligned_to(TOKEN_SCALE_ELEMENTS as usize, &codes);
        Self {
            rows: rows.data.cast(),
            row_token_stride: rows.stride(0),
            row_head_stride: rows.stride(1),
            cache: cache.data,
            page_stride: cache.page_stride,
            token_stride: cache.token_stride,
            head_stride: cache.head_stride,
            scales: scales.data.cast(),
            scale_page_stride: scales.page_stride,
            scale_token_stride: scales.token_stride,
            scale_head_stride: scales.head_stride,
            aligned: i64::from(aligned),
        }
    }
}

/// The launch; `None` if there is no row or no slot.
pub(super) fn plan(problem: &KvCacheUpdate, scales: &KvScaleCache) -> Result<Option<Launch<TokenScaleUpdateParams>>> {
    let slot_mapping = SlotMapping::new(problem);
    let num_rows = problem.slot_mapping.len();
    if num_rows == 0 || slot_mapping.is_empty() {
        return Ok(None);
    }
    let rows = &problem.key.rows;
    let variant = cache_rows::variant([KERNEL, KERNEL_SM80], rows.dtype)?;
    let (num_heads, head_dim) = (rows.dims[1] as u32, rows.dims[2] as u32);
    let group = head_dim.div_ceil(TOKEN_SCALE_ELEMENTS as u32).next_power_of_two().min(WARP);
    let heads = HeadPartition::new(group, 0, num_heads, 1);
    let (partition, config) = RowPartition::new(num_rows, &[&heads, &heads])?;
    let params = TokenScaleUpdateParams {
        key: QuantizedRows::new(&problem.key, &scales.k),
        value: QuantizedRows::new(&problem.value, &scales.v),
        slot_mapping,
        partition,
        num_heads: num_heads as i32,
        head_dim: head_dim as i32,
        group_shift: group.ilog2() as i32,
        is_i8: i32::from(problem.cache_dtype == DType::I8),
    };
    Ok(Some(Launch::new(KERNEL, variant, config, params)))
}
