//! Writes new K and V rows into a paged cache on the CPU.
//!
//! A task writes all rows of one KV head of K or of V, in order. No two threads therefore write the same memory, and if
//! several rows have the same slot, the last one remains, complete.

use super::cache_rows::{CacheWriter, copy_unaliased_caches, slot_of};
use super::element::{Element, widen};
use super::row_quantization::RowQuantization;
use super::simd::{Isa, Simd, SimdKernel};
use crate::error::Result;
use crate::pool::{Pool, SingleThread, parallel_for};
use crate::problem::kv_cache_update::{KvCacheUpdate, NewRows};
use crate::problem::{KvView, MAX_LATENT_DIM};
use crate::tensor::DType;
use half::{bf16, f16};
use std::marker::PhantomData;

/// Bytes of new rows below which a second thread costs more than it saves.
pub(super) const MIN_PARALLEL_BYTES: usize = 1 << 17;

/// Copy the caches that are not updated in place, then write the rows.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the result caches writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &KvCacheUpdate, pool: &dyn Pool) -> Result {
    // SAFETY: the caller guarantees valid caches and exclusive results.
    unsafe { copy_unaliased_caches(problem, pool)? };
    let rows = &problem.key.rows;
    let heads = rows.dims[1] as usize;
    let pool = if rows.bytes() < MIN_PARALLEL_BYTES { &SingleThread } else { pool };
    parallel_for(
        pool,
        2 * heads,
        || (),
        |(), task| {
            let scales = problem.scale_cache.as_ref();
            let (new, scales) = if task < heads {
                (&problem.key, scales.map(|scales| scales.k))
            } else {
                (&problem.value, scales.map(|scales| scales.v))
            };
            // SAFETY: the caller guarantees valid views, the problem has validated dtypes and shapes, and no other task
            // has this head of K or V.
            unsafe {
                match new.rows.dtype {
                    DType::F16 => write_head::<f16>(problem, new, scales, task % heads),
                    DType::BF16 => write_head::<bf16>(problem, new, scales, task % heads),
                    _ => write_head::<f32>(problem, new, scales, task % heads),
                }
            }
        },
    )
}

/// Write one head of K or V of all rows into the cache.
///
/// # Safety
/// As [`run`], with `T` the element type of `new`, which are the problem's keys or values, `scales` those of their rows in
/// the cache if the problem has a scale cache, and `head` below Hkv; this head of the cache is not otherwise accessed.
pub(super) unsafe fn write_head<T: Element>(
    problem: &KvCacheUpdate,
    new: &NewRows,
    scales: Option<KvView>,
    head: usize,
) {
    // SAFETY: the caller guarantees the contract of `WriteHead`, which is this function's.
    unsafe { Isa::best().dispatch(WriteHead::<T> { problem, new, scales, head, element: PhantomData }) };
}

/// # Safety
/// As [`write_head`].
struct WriteHead<'a, T> {
    problem: &'a KvCacheUpdate<'a>,
    new: &'a NewRows<'a>,
    scales: Option<KvView>,
    head: usize,
    element: PhantomData<T>,
}

impl<T: Element> SimdKernel for WriteHead<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { problem, new, scales, head, .. } = self;
        let rows = &new.rows;
        let head_dim = rows.dims[2] as usize;
        let mut numbers = [0.0f32; MAX_LATENT_DIM as usize];
        let quantization = RowQuantization::of(problem.cache_dtype);
        // SAFETY: the scales are views of the problem; head < Hkv.
        let writer = unsafe { CacheWriter::<T>::new(problem, new, head) };
        for token in 0..rows.dims[0] as usize {
            // SAFETY: the slot mapping has T elements, and token < T.
            let Some(slot) = (unsafe { slot_of(problem, token) }) else { continue };
            // rows [T, Hkv, D]
            let from = token as i64 * rows.stride(0) + head as i64 * rows.stride(1);
            // SAFETY: the problem has validated that strides and sizes stay within the buffers and that D is at most
            // MAX_LATENT_DIM; `slot_of` only returns slots of the cache.
            unsafe {
                let from = rows.data.cast_const().cast::<T>().offset(from as isize);
                if let Some(scales) = scales {
                    widen(simd, from, numbers.as_mut_ptr(), head_dim);
                    writer.quantize(quantization, slot, &numbers[..head_dim], scales);
                } else if writer.copies_bits() {
                    writer.copy(slot, 0, from, head_dim);
                } else {
                    widen(simd, from, numbers.as_mut_ptr(), head_dim);
                    writer.store(simd, slot, 0, &mut numbers[..head_dim]);
                }
            }
        }
    }
}
