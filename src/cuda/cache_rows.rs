//! What the kernels that write cache rows are told of them: `kernels/include/cache_rows.cuh`.

use super::chunk::{CHUNK, aligned_to};
use super::launch::copy;
use crate::error::Result;
use crate::ops::kv_cache_update::{KvCacheUpdate, NewRows};
use crate::stream::Stream;
use crate::tensor::DType;

/// `NewRows`
#[repr(C)]
pub(super) struct RowParams {
    rows: *const u8,
    row_token_stride: i64,
    row_head_stride: i64,
    cache: *mut u8,
    page_stride: i64,
    token_stride: i64,
    head_stride: i64,
    scale: *const f32,
    scale_stride: i64,
    cache_type: i32,
    num_heads: i32,
    head_dim: i32,
    pub(super) aligned: i32,
}

/// `SlotMapping`
#[repr(C)]
pub(super) struct SlotParams {
    slots: *const u8,
    count: i64,
    page_size: i64,
    are_64_bit: i64,
}

// The header asserts the same numbers.
const _: () = assert!(size_of::<RowParams>() == 88 && size_of::<SlotParams>() == 32);

/// `CacheType` of the header for a cache under rows of another or the same dtype.
fn cache_type(rows: DType, cache: DType) -> i32 {
    match cache {
        same if same == rows => 0,
        DType::F8E4M3FN => 1,
        _ => 2,
    }
}

impl RowParams {
    pub(super) fn new(new: &NewRows, cache_dtype: DType) -> Self {
        let (rows, cache) = (&new.rows, &new.cache);
        let (size, cache_size) = (rows.dtype.size() as i64, cache_dtype.size() as i64);
        // Heads have a multiple of 8 elements, so that chunks fill them.
        let rows_aligned = aligned_to(CHUNK, &[rows.data as i64, rows.stride(0) * size, rows.stride(1) * size]);
        let strides = [cache.page_stride, cache.token_stride, cache.head_stride].map(|stride| stride * cache_size);
        let stored_chunk = CHUNK / rows.dtype.size() * cache_dtype.size();
        let cache_aligned = aligned_to(stored_chunk, &strides) && aligned_to(stored_chunk, &[cache.data as i64]);
        Self {
            rows: rows.data,
            row_token_stride: rows.stride(0),
            row_head_stride: rows.stride(1),
            cache: cache.data,
            page_stride: cache.page_stride,
            token_stride: cache.token_stride,
            head_stride: cache.head_stride,
            scale: new.scale.map_or(std::ptr::null(), |scale| scale.values),
            scale_stride: new.scale.map_or(0, |scale| i64::from(scale.per_head)),
            cache_type: cache_type(rows.dtype, cache_dtype),
            num_heads: rows.dims[1] as i32,
            head_dim: rows.dims[2] as i32,
            aligned: i32::from(rows_aligned && cache_aligned),
        }
    }
}

impl SlotParams {
    pub(super) fn new(problem: &KvCacheUpdate) -> Self {
        Self {
            slots: problem.slot_mapping.data,
            count: problem.num_pages as i64 * problem.page_size as i64,
            page_size: problem.page_size as i64,
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
