//! The parameters of the kernels that store rows in a paged cache: how rows are divided between threads, strides, slots.

use super::chunk::{self, CHUNK, Divisor, aligned_to};
use super::device::Device;
use super::enqueue::{LaunchConfig, copy};
use super::params::cache_rows::NewRows as RowParams;
pub(super) use super::params::cache_rows::{CacheType, HeadPartition, ROW_THREADS, RowPartition};
use super::params::slots::SlotMapping;
use super::variants;
use crate::error::{Error, Result};
use crate::problem::kv_cache_update::{KvCacheUpdate, NewRows};
use crate::stream::Stream;
use crate::tensor::DType;

/// Threads per CTA, at most.
const THREADS: u32 = ROW_THREADS as u32;

/// Maximum CTAs per row: the limit of the grid's second dimension.
const MAX_CTAS_PER_ROW: u32 = 65535;

/// How the kernels name the cache's dtype, given that of the rows.
fn cache_type(rows: DType, cache: DType) -> CacheType {
    match cache {
        same if same == rows => CacheType::AsRows,
        DType::F8E4M3FN => CacheType::F8E4M3Fn,
        _ => CacheType::F8E5M2,
    }
}

/// The variant for rows of `dtype`: of the first kernel, which converts to fp8 by instructions of sm_89, or on older
/// devices of the second.
pub(super) fn variant([kernel, kernel_sm80]: [&str; 2], dtype: DType) -> Result<usize> {
    let converts_to_fp8 = Device::current()?.capability >= 89;
    variants::find(if converts_to_fp8 { kernel } else { kernel_sm80 }, &[variants::dtype_value(dtype)])
}

impl HeadPartition {
    /// For rows of `num_heads` heads of `vectors` vectors each, the first `rotated` of which are rotated. A thread copies
    /// a vector of up to `heads_per_thread` heads.
    pub(super) fn new(vectors: u32, rotated: u32, num_heads: u32, heads_per_thread: u32) -> Self {
        let step = num_heads.div_ceil(heads_per_thread);
        Self { vectors: Divisor::new(vectors, u64::from(vectors) * u64::from(step)), rotated, step }
    }

    /// Threads that copy a row.
    pub(super) fn threads(&self) -> u32 {
        self.vectors.divisor.saturating_mul(self.step)
    }
}

impl RowPartition {
    /// For rows that consist of these tensors' rows, and the shape of the launch: short rows share a CTA, and long rows
    /// have several CTAs.
    pub(super) fn new(num_rows: usize, tensors: &[&HeadPartition]) -> Result<(Self, LaunchConfig)> {
        let row_threads = tensors.iter().fold(0, |sum: u32, heads| sum.saturating_add(heads.threads()));
        let cta_rows = (THREADS / row_threads).max(1);
        let row_ctas = row_threads.div_ceil(THREADS);
        if row_ctas > MAX_CTAS_PER_ROW {
            return Err(Error::unimplemented("rows that take more than 12 million threads are not supported on CUDA"));
        }
        let cta_threads = (cta_rows * row_threads).div_ceil(row_ctas).next_multiple_of(32);
        let grid = [(num_rows as u32).div_ceil(cta_rows), row_ctas, 1];
        let threads = Divisor::new(row_threads, u64::from(cta_threads));
        let partition = Self { num_rows: num_rows as i32, cta_rows: cta_rows as i32, threads };
        Ok((partition, LaunchConfig { grid, threads: cta_threads, shared_memory: 0 }))
    }
}

impl RowParams {
    /// For rows that are not rotated, with `heads_per_thread` heads per thread.
    pub(super) fn new(new: &NewRows, cache_dtype: DType, heads_per_thread: u32) -> Self {
        Self::partitioned(new, cache_dtype, true, |aligned| {
            let (num_heads, elements) = (new.rows.dims[1] as u32, new.rows.dims[2] as u32);
            HeadPartition::new(elements / chunk::elements(new.rows.dtype, aligned), 0, num_heads, heads_per_thread)
        })
    }

    /// For rows that `partition` divides, given whether vectors are 16 bytes. They are if all is aligned and `may_align`.
    pub(super) fn partitioned(
        new: &NewRows,
        cache_dtype: DType,
        may_align: bool,
        partition: impl FnOnce(bool) -> HeadPartition,
    ) -> Self {
        let (rows, cache) = (&new.rows, &new.cache);
        let (size, cache_size) = (rows.dtype.size() as i64, cache_dtype.size() as i64);
        // A head has a multiple of 8 elements, so 16-byte vectors leave no remainder.
        let rows_aligned = aligned_to(CHUNK, &[rows.data as i64, rows.stride(0) * size, rows.stride(1) * size]);
        let strides = [cache.page_stride, cache.token_stride, cache.head_stride].map(|stride| stride * cache_size);
        let stored_vector = CHUNK / rows.dtype.size() * cache_dtype.size();
        let cache_aligned = aligned_to(stored_vector, &strides) && aligned_to(stored_vector, &[cache.data as i64]);
        let aligned = may_align && rows_aligned && cache_aligned;
        Self {
            rows: rows.data.cast(),
            row_token_stride: rows.stride(0),
            row_head_stride: rows.stride(1),
            cache: cache.data.cast(),
            page_stride: cache.page_stride,
            token_stride: cache.token_stride,
            head_stride: cache.head_stride,
            scale: new.scale.map_or(std::ptr::null(), |scale| scale.values),
            scale_stride: new.scale.map_or(0, |scale| i64::from(scale.per_head)),
            cache_type: cache_type(rows.dtype, cache_dtype),
            num_heads: rows.dims[1] as i32,
            aligned: i64::from(aligned),
            heads: partition(aligned),
        }
    }
}

impl SlotMapping {
    /// The mapping of a call without new tokens.
    pub(super) const NONE: Self =
        Self { slots: std::ptr::null(), count: 0, page_size: 0, page_shift: -1, are_64_bit: 0 };

    pub(super) fn new(problem: &KvCacheUpdate) -> Self {
        Self {
            slots: problem.slot_mapping.data.cast(),
            count: problem.num_pages as i64 * problem.page_size as i64,
            page_size: problem.page_size as i32,
            page_shift: if problem.page_size.is_power_of_two() { problem.page_size.ilog2() as i32 } else { -1 },
            are_64_bit: i64::from(problem.slot_mapping.dtype == DType::I64),
        }
    }

    /// Whether the cache has no slot, so that no row is stored.
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Copies the caches that XLA has not aliased with the results.
///
/// # Safety
/// The problem's views are device memory of the current context that outlives the copies, the caches writable.
pub(super) unsafe fn copy_unaliased_caches(problem: &KvCacheUpdate, stream: Stream) -> Result {
    for copied in problem.copies.iter().flatten().filter(|c| c.is_needed()) {
        // SAFETY: a copy is needed only between different buffers, which have one size; the caller guarantees the memory.
        unsafe { copy(copied.to.data, copied.from.data, copied.from.bytes(), stream) }?;
    }
    Ok(())
}
