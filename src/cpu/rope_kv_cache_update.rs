//! Rotates new queries and keys (rotary embedding) and writes K and V into a paged cache on the CPU.
//!
//! A task writes all rows of one KV head of K or of V, in order, or rotates all heads of a range of query rows.

use super::cache_rows::{CacheWriter, copy_unaliased_caches, slot_of};
use super::element::{Element, narrow, widen};
use super::kv_cache_update::{MIN_PARALLEL_BYTES, write_head};
use super::simd::{Isa, Simd, SimdKernel};
use crate::error::Result;
use crate::pool::{Pool, SingleThread, parallel_for};
use crate::problem::MAX_HEAD_DIM;
use crate::problem::rope_kv_cache_update::{RopeKvCacheUpdate, Rotation};
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Query elements of a task.
const TASK_ELEMENTS: usize = 1 << 15;

/// Copy the cache if it is not updated in place, then rotate and write.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &RopeKvCacheUpdate, pool: &dyn Pool) -> Result {
    // SAFETY: the caller guarantees valid caches and exclusive results.
    unsafe { copy_unaliased_caches(&problem.update, pool)? };
    let query = &problem.query;
    // If there are no rows, the other sizes are not bounded by memory, and their product may overflow or be 0.
    let tokens = (TASK_ELEMENTS / (query.dims[1].saturating_mul(query.dims[2]) as usize).max(1)).max(1);
    let pool = if query.bytes() < MIN_PARALLEL_BYTES { &SingleThread } else { pool };
    parallel_for(
        pool,
        2 * problem.update.key.rows.dims[1] as usize + (query.dims[0] as usize).div_ceil(tokens),
        || (),
        |(), task| {
            // SAFETY: the caller guarantees valid views, the problem has validated dtypes and shapes, and each task
            // runs once.
            unsafe {
                match query.dtype {
                    DType::F16 => run_task::<f16>(problem, task, tokens),
                    DType::BF16 => run_task::<bf16>(problem, task, tokens),
                    _ => run_task::<f32>(problem, task, tokens),
                }
            }
        },
    )
}

/// Run one task. The first Hkv tasks are the heads of K, the next Hkv the heads of V; the others are `tokens` query
/// rows each.
///
/// # Safety
/// As [`run`], with `T` the element type; each task runs once.
unsafe fn run_task<T: Element>(problem: &RopeKvCacheUpdate, task: usize, tokens: usize) {
    let kv_heads = problem.update.key.rows.dims[1] as usize;
    if task < kv_heads {
        // SAFETY: the caller guarantees valid views. task < Hkv, and no other task has this head of K.
        unsafe { Isa::best().dispatch(RotateKeys::<T> { problem, head: task, element: PhantomData }) };
    } else if task < 2 * kv_heads {
        // SAFETY: the caller guarantees valid views. Values have the dtype of keys, and no other task has this head of
        // V.
        unsafe { write_head::<T>(&problem.update, &problem.update.value, None, task - kv_heads) };
    } else {
        let first = (task - 2 * kv_heads) * tokens;
        let tokens = first..(first + tokens).min(problem.query.dims[0] as usize);
        // SAFETY: the caller guarantees valid views, and no other task has these tokens.
        unsafe { Isa::best().dispatch(RotateQueries::<T> { problem, tokens, element: PhantomData }) };
    }
}

/// Rotates all heads of the queries of `tokens`.
///
/// # Safety
/// As [`run`], with `T` the element type; the tokens are those of the queries, and nothing else accesses their results.
struct RotateQueries<'a, T> {
    problem: &'a RopeKvCacheUpdate<'a>,
    tokens: Range<usize>,
    element: PhantomData<T>,
}

/// Rotates one head of all keys and writes it into the cache.
///
/// # Safety
/// As [`run`], with `T` the element type; `head` is below Hkv, and nothing else accesses this head of K in the cache.
struct RotateKeys<'a, T> {
    problem: &'a RopeKvCacheUpdate<'a>,
    head: usize,
    element: PhantomData<T>,
}

impl<T: Element> SimdKernel for RotateQueries<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { problem, tokens, .. } = self;
        let (heads, head_dim) = (problem.query.dims[1] as usize, problem.query.dims[2] as usize);
        let mut numbers = [0.0f32; MAX_HEAD_DIM as usize];
        for (token, head) in tokens.flat_map(|token| (0..heads).map(move |head| (token, head))) {
            // SAFETY: token < T and head < Hq; the problem has validated sizes, strides and dtypes.
            unsafe {
                let from = row_of::<T>(&problem.query, token, head);
                let to = row_of::<T>(&problem.query_out, token, head).cast_mut();
                let rotated = rotate_row(simd, &problem.rotation, token, from, &mut numbers);
                narrow(simd, numbers.as_ptr(), to, rotated);
                to.add(rotated).copy_from_nonoverlapping(from.add(rotated), head_dim - rotated);
            }
        }
    }
}

impl<T: Element> SimdKernel for RotateKeys<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { problem, head, .. } = self;
        let key = &problem.update.key;
        let head_dim = key.rows.dims[2] as usize;
        let mut numbers = [0.0f32; MAX_HEAD_DIM as usize];
        // SAFETY: the scales are views of the problem; head < Hkv.
        let writer = unsafe { CacheWriter::<T>::new(&problem.update, key, head) };
        for token in 0..key.rows.dims[0] as usize {
            // SAFETY: the slot mapping has T elements, and token < T.
            let Some(slot) = (unsafe { slot_of(&problem.update, token) }) else { continue };
            // SAFETY: token < T and head < Hkv; the problem has validated sizes, strides and dtypes, and `slot_of` only
            // returns slots of the cache.
            unsafe {
                let from = row_of::<T>(&key.rows, token, head);
                let rotated = rotate_row(simd, &problem.rotation, token, from, &mut numbers);
                writer.store(simd, slot, 0, &mut numbers[..rotated]);
                if writer.copies_bits() {
                    writer.copy(slot, rotated, from.add(rotated), head_dim - rotated);
                } else {
                    widen(simd, from.add(rotated), numbers.as_mut_ptr(), head_dim - rotated);
                    writer.store(simd, slot, rotated, &mut numbers[..head_dim - rotated]);
                }
            }
        }
    }
}

/// The row of a token and a head in `[T, heads, D]`.
///
/// # Safety
/// The tensor has the token and the head, and its dtype is `T`.
#[inline(always)]
unsafe fn row_of<T>(rows: &Tensor, token: usize, head: usize) -> *const T {
    let element = token as i64 * rows.stride(0) + head as i64 * rows.stride(1);
    // SAFETY: the tensor has this token and head, so the offset stays within it.
    unsafe { rows.data.cast_const().cast::<T>().offset(element as isize) }
}

/// Write the rotated elements of a row to `numbers`, and return their number, `rot`.
///
/// # Safety
/// `from` is a row of D elements; the rotation's positions and table are readable; `token` is below T.
#[inline(always)]
unsafe fn rotate_row<S: Simd, T: Element>(
    simd: S,
    rotation: &Rotation,
    token: usize,
    from: *const T,
    numbers: &mut [f32; MAX_HEAD_DIM as usize],
) -> usize {
    if rotation.max_pos == 0 {
        return 0;
    }
    let (rotated, half) = (rotation.rotated, rotation.rotated / 2);
    // SAFETY: rotated <= D <= MAX_HEAD_DIM. There are T positions, and the position is clamped to the rows of the
    // table.
    let (cos, sin) = unsafe {
        widen(simd, from, numbers.as_mut_ptr(), rotated);
        let position = i64::from(rotation.positions.add(token).read()).clamp(0, rotation.max_pos as i64 - 1);
        // cos_sin [max_pos, rot]: cosines, then sines
        let row = rotation.cos_sin.offset((position * rotation.row_stride) as isize);
        if half == 0 { (&[][..], &[][..]) } else { std::slice::from_raw_parts(row, rotated).split_at(half) }
    };
    if rotation.interleaved {
        for ((pair, cos), sin) in numbers[..rotated].chunks_exact_mut(2).zip(cos).zip(sin) {
            (pair[0], pair[1]) = rotate_pair(pair[0], pair[1], *cos, *sin);
        }
    } else {
        let (first, second) = numbers[..rotated].split_at_mut(half);
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = rotate_pair(*a, *b, *cos, *sin);
        }
    }
    rotated
}

/// The pair (a, b) rotated by an angle, with the operations and so the bits of the CUDA kernel.
#[inline(always)]
fn rotate_pair(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a.mul_add(cos, -(b * sin)), b.mul_add(cos, a * sin))
}
