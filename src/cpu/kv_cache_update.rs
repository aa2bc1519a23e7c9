//! Writes new K and V rows into a paged cache on the CPU.
//!
//! A task takes one KV head of K or V through all rows, in order: no two threads write the same memory, and where slots
//! are equal the last row stays, whole.

use super::element::Element;
use crate::error::Result;
use crate::ops::kv_cache_update::{CacheCopy, KvCacheUpdate, NewRows};
use crate::pool::{Pool, SingleThread, parallel_for};
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};

/// Bytes below which a call is not worth a second thread.
const WORTH_SHARING: usize = 1 << 17;
/// Bytes that a task copies.
const COPY_CHUNK: usize = 1 << 20;

/// Copy the caches that are not updated in place, then write the rows.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the result caches writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &KvCacheUpdate, pool: &dyn Pool) -> Result {
    for copy in problem.copies.iter().flatten().filter(|copy| copy.is_needed()) {
        // SAFETY: the caller's word; operand and result are different buffers of one size.
        unsafe { bring_over(copy, pool)? };
    }
    let rows = &problem.key.rows;
    let heads = rows.dims[1] as usize;
    let pool = if rows.bytes() < WORTH_SHARING { &SingleThread } else { pool };
    parallel_for(
        pool,
        2 * heads,
        || (),
        |(), task| {
            let new = if task < heads { &problem.key } else { &problem.value };
            // SAFETY: the caller's word; the problem has checked dtypes and shapes.
            unsafe {
                match new.rows.dtype {
                    DType::F16 => write_head::<f16>(problem, new, task % heads),
                    DType::BF16 => write_head::<bf16>(problem, new, task % heads),
                    _ => write_head::<f32>(problem, new, task % heads),
                }
            }
        },
    )
}

/// # Safety
/// Both buffers are valid, of one size, dense, and do not overlap.
unsafe fn bring_over(copy: &CacheCopy, pool: &dyn Pool) -> Result {
    let bytes = copy.from.bytes();
    parallel_for(
        pool,
        bytes.div_ceil(COPY_CHUNK),
        || (),
        |(), chunk| {
            let first = chunk * COPY_CHUNK;
            let count = COPY_CHUNK.min(bytes - first);
            // SAFETY: within both buffers; chunks are disjoint.
            unsafe { copy.to.data.add(first).copy_from_nonoverlapping(copy.from.data.add(first), count) };
        },
    )
}

/// # Safety
/// As [`run`], with `T` the element type.
unsafe fn write_head<T: Element>(problem: &KvCacheUpdate, new: &NewRows, head: usize) {
    let (rows, cache) = (&new.rows, &new.cache);
    let head_dim = rows.dims[2] as usize;
    // SAFETY: a scale has one element, or one for each head.
    let scale = new.scale.map(|scale| unsafe { scale.data.cast::<f32>().add(head % scale.len()).read() });
    for token in 0..rows.dims[0] as usize {
        // SAFETY: token < T.
        let Some((page, offset)) = (unsafe { place(problem, &problem.slot_mapping, token) }) else { continue };
        // rows [T, Hkv, D]; cache (page, token, head)
        let from = token as i64 * rows.stride(0) + head as i64 * rows.stride(1);
        let to = page * cache.page_stride + offset * cache.token_stride + head as i64 * cache.head_stride;
        // SAFETY: the problem has checked that strides and sizes belong to the buffers, `place` that the slot does.
        unsafe {
            let from = rows.data.cast_const().cast::<T>().offset(from as isize);
            let to = cache.data.cast::<T>().offset(to as isize);
            match scale {
                None => to.copy_from_nonoverlapping(from, head_dim),
                Some(scale) => {
                    for i in 0..head_dim {
                        to.add(i).write(T::from_f32(from.add(i).read().to_f32() / scale));
                    }
                }
            }
        }
    }
}

/// Page and offset of a token's slot; `None` outside the cache.
///
/// # Safety
/// `slots` is readable and longer than `token`.
unsafe fn place(problem: &KvCacheUpdate, slots: &Tensor, token: usize) -> Option<(i64, i64)> {
    // SAFETY: this function's contract; the problem has checked the dtype.
    let slot = unsafe {
        match slots.dtype {
            DType::I32 => i64::from(slots.data.cast::<i32>().add(token).read()),
            _ => slots.data.cast::<i64>().add(token).read(),
        }
    };
    let (pages, page_size) = (problem.num_pages as i64, problem.page_size as i64);
    (0..pages * page_size).contains(&slot).then(|| (slot / page_size, slot % page_size))
}
