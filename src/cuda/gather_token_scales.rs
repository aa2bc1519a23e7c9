//! `gather_kv_cache` of a cache with a scale per token and KV head, on CUDA: a warp dequantizes a row.

use super::chunk::{CHUNK, aligned_to};
use super::enqueue::LaunchConfig;
use super::kernel_launch::Launch;
use super::params::gather_kv_cache::{GATHER_THREADS, GatherParams};
use super::params::gather_token_scales::{GatherTokenScaleParams, ScaledSource};
use super::variants;
use crate::error::Result;
use crate::problem::gather_kv_cache::{GatherKvCache, GatheredRows};
use crate::problem::{KvScaleCache, KvView};
use crate::tensor::DType;

const KERNEL: &str = "gather_kv_cache_token_scales";

/// Codes that a thread loads at a time.
const VECTOR: usize = 8;

/// Rows of a CTA, one per warp.
const CTA_ROWS: usize = GATHER_THREADS as usize / 32;

impl ScaledSource {
    fn new(of: &GatheredRows, scales: &KvView) -> Self {
        Self {
            cache: of.cache.data,
            page_stride: of.cache.page_stride,
            token_stride: of.cache.token_stride,
            head_stride: of.cache.head_stride,
            scales: scales.data.cast(),
            scale_page_stride: scales.page_stride,
            scale_token_stride: scales.token_stride,
            scale_head_stride: scales.head_stride,
            rows: of.rows.data.cast(),
        }
    }

    fn is_aligned(&self) -> bool {
        aligned_to(VECTOR, &[self.cache as i64, self.page_stride, self.token_stride, self.head_stride])
            && aligned_to(CHUNK, &[self.rows as i64])
    }
}

impl GatherTokenScaleParams {
    /// The parameter that begins with `gather`.
    pub(super) fn new(problem: &GatherKvCache, scales: &KvScaleCache, gather: &GatherParams) -> Self {
        let keys = ScaledSource::new(&problem.keys, &scales.k);
        let values = ScaledSource::new(&problem.values, &scales.v);
        Self {
            gather: *gather,
            keys,
            values,
            num_heads: problem.num_heads as i32,
            head_dim: problem.keys.rows.dims[2] as i32,
            aligned: i32::from(keys.is_aligned() && values.is_aligned()),
            is_i8: i32::from(problem.cache_dtype == DType::I8),
        }
    }
}

/// The launch that copies the rows, after the one that writes `cu_seqlens`; `None` if there is no row.
pub(super) fn launch(
    problem: &GatherKvCache,
    params: &GatherTokenScaleParams,
) -> Result<Option<Launch<GatherTokenScaleParams>>> {
    if problem.capacity == 0 {
        return Ok(None);
    }
    let grid = [problem.capacity.div_ceil(CTA_ROWS) as u32, 1, 1];
    let config = LaunchConfig { grid, threads: GATHER_THREADS, shared_memory: 0 };
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.keys.rows.dtype)])?;
    Ok(Some(Launch::new(KERNEL, variant, config, *params)))
}
