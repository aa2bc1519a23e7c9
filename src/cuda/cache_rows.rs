//! The parameters of the kernels that write cache rows, from the problem.

use super::chunk::{self, CHUNK, Divisor, aligned_to};
use super::device::Device;
use super::launch::{Shape, copy};
use super::params::cache_rows::NewRows as RowParams;
pub(super) use super::params::cache_rows::{CacheType, HeadSharing, ROW_THREADS, RowSharing};
use super::params::slots::SlotMapping;
use super::variants;
use crate::error::{Error, Result};
use crate::problem::kv_cache_update::{KvCacheUpdate, NewRows};
use crate::stream::Stream;
use crate::tensor::DType;

/// Threads per CTA, at most.
const THREADS: u32 = ROW_THREADS as u32;

/// CTAs that may share a row: the limit of the grid's second dimension.
const MOST_PARTS: u32 = 65535;

/// That of a cache under rows of another or the same dtype.
fn cache_type(rows: DType, cache: DType) -> CacheType {
    match cache {
        same if same == rows => CacheType::AsRows,
        DType::F8E4M3FN => CacheType::F8E4M3Fn,
        _ => CacheType::F8E5M2,
    }
}

/// The variant for rows of `dtype` of the first of these kernels, which has instructions that make fp8, or where the
/// device has none, of the second.
pub(super) fn variant([kernel, kernel_sm80]: [&str; 2], dtype: DType) -> Result<usize> {
    let makes_fp8 = Device::current()?.capability >= 89;
    variants::find(if makes_fp8 { kernel } else { kernel_sm80 }, &[variants::dtype_value(dtype)])
}

impl HeadSharing {
    /// Rows of heads `[num_heads, _]` of so many pieces, some of them rotated, `heads` of them in a share.
    pub(super) fn new(pieces: u32, turned: u32, num_heads: u32, heads: u32) -> Self {
        let step = num_heads.div_ceil(heads);
        Self { pieces: Divisor::new(pieces, u64::from(pieces) * u64::from(step)), turned, step }
    }

    /// Of a row.
    pub(super) fn shares(&self) -> u32 {
        self.pieces.divisor.saturating_mul(self.step)
    }
}

impl RowSharing {
    /// Rows whose heads are shared out like this, and the launch that has a thread for each share.
    pub(super) fn new(num_rows: usize, heads: &[&HeadSharing]) -> Result<(Self, Shape)> {
        let shares = heads.iter().fold(0, |sum: u32, of| sum.saturating_add(of.shares()));
        let cta_rows = (THREADS / shares).max(1);
        let parts = shares.div_ceil(THREADS);
        if parts > MOST_PARTS {
            return Err(Error::unimplemented("rows of more than 12 million pieces are not supported on CUDA"));
        }
        let threads = (cta_rows * shares).div_ceil(parts).next_multiple_of(32);
        let grid = [(num_rows as u32).div_ceil(cta_rows), parts, 1];
        let shares = Divisor::new(shares, u64::from(threads));
        let sharing = Self { num_rows: num_rows as i32, cta_rows: cta_rows as i32, shares };
        Ok((sharing, Shape { grid, threads, shared_memory: 0 }))
    }
}

impl RowParams {
    /// Rows that are written as they are, `heads` of them in a share.
    pub(super) fn new(new: &NewRows, cache_dtype: DType, heads: u32) -> Self {
        Self::in_pieces(new, cache_dtype, true, |aligned| {
            let (num_heads, elements) = (new.rows.dims[1] as u32, new.rows.dims[2] as u32);
            HeadSharing::new(elements / chunk::elements(new.rows.dtype, aligned), 0, num_heads, heads)
        })
    }

    /// Rows whose heads are shared out as `sharing` says of chunks, if they `may` be, or of single elements.
    pub(super) fn in_pieces(
        new: &NewRows,
        cache_dtype: DType,
        may: bool,
        sharing: impl FnOnce(bool) -> HeadSharing,
    ) -> Self {
        let (rows, cache) = (&new.rows, &new.cache);
        let (size, cache_size) = (rows.dtype.size() as i64, cache_dtype.size() as i64);
        // Heads have a multiple of 8 elements, so that chunks fill them.
        let rows_aligned = aligned_to(CHUNK, &[rows.data as i64, rows.stride(0) * size, rows.stride(1) * size]);
        let strides = [cache.page_stride, cache.token_stride, cache.head_stride].map(|stride| stride * cache_size);
        let stored_chunk = CHUNK / rows.dtype.size() * cache_dtype.size();
        let cache_aligned = aligned_to(stored_chunk, &strides) && aligned_to(stored_chunk, &[cache.data as i64]);
        let aligned = may && rows_aligned && cache_aligned;
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
            sharing: sharing(aligned),
        }
    }
}

impl SlotMapping {
    /// No row has a slot.
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

    /// There is no slot that a row could go to.
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Bring the caches over that are not updated in place.
///
/// # Safety
/// The problem's views are device memory of the current context that outlives the copies, the caches writable.
pub(super) unsafe fn bring_over(problem: &KvCacheUpdate, stream: Stream) -> Result {
    for copied in problem.copies.iter().flatten().filter(|c| c.is_needed()) {
        // SAFETY: operand and result are different buffers of the same size; the caller vouches for the memory.
        unsafe { copy(copied.to.data, copied.from.data, copied.from.bytes(), stream) }?;
    }
    Ok(())
}
