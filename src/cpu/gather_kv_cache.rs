//! Copies the K and V rows of sequences out of a paged cache on the CPU: tasks of neighbouring rows of the results.

use super::element_rows::{narrow_row, widen_row};
use super::simd::{Isa, Simd, Vectorised};
use crate::error::Result;
use crate::ops::MAX_HEAD_DIM;
use crate::ops::gather_kv_cache::{GatherKvCache, GatheredRows};
use crate::pool::{Pool, parallel_for};
use std::ops::Range;

/// Bytes of one task: large enough to pay for handing it to another thread.
const TASK: usize = 1 << 18;

/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &GatherKvCache, pool: &dyn Pool) -> Result {
    // SAFETY: the caller's word; from here on nothing writes the starts.
    let starts = unsafe {
        write_starts(problem);
        std::slice::from_raw_parts(problem.cu_seqlens.cast_const(), problem.num_seqs + 1)
    };
    let row_bytes = row_bytes(&problem.keys) + row_bytes(&problem.values);
    let rows_of_task = (TASK / row_bytes).max(1);
    parallel_for(
        pool,
        problem.capacity.div_ceil(rows_of_task),
        || (),
        |(), task| {
            let first = task * rows_of_task;
            let rows = first..(first + rows_of_task).min(problem.capacity);
            // SAFETY: the views are valid by this function's contract, the problem has checked their dtypes and shapes, and
            // no other task has these rows.
            unsafe { Isa::best().run(GatherRows { problem, starts, rows }) };
        },
    )
}

/// Bytes of a row of a result, all heads of it.
fn row_bytes(of: &GatheredRows) -> usize {
    (of.rows.dims[1] * of.rows.dims[2]) as usize * of.rows.dtype.size()
}

/// `cu_seqlens`.
///
/// # Safety
/// The problem's lengths are readable, its starts writable.
unsafe fn write_starts(problem: &GatherKvCache) {
    let longest = problem.table.capacity();
    let mut start = 0;
    for b in 0..problem.num_seqs {
        // SAFETY: below S.
        unsafe {
            problem.cu_seqlens.add(b).write(start as i32);
            let len = usize::try_from(problem.context_lens.add(b).read()).unwrap_or(0).min(longest);
            start = (start + len).min(problem.capacity);
        }
    }
    // SAFETY: S+1 starts.
    unsafe { problem.cu_seqlens.add(problem.num_seqs).write(start as i32) };
}

/// A task.
///
/// # Safety
/// As [`run`]; `starts` are the problem's, the rows are below N and not otherwise accessed.
struct GatherRows<'a> {
    problem: &'a GatherKvCache<'a>,
    starts: &'a [i32],
    rows: Range<usize>,
}

impl Vectorised for GatherRows<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { problem, starts, rows } = self;
        let end = starts[problem.num_seqs] as usize;
        let mut row = rows.start;
        // The last sequence that begins at the row or before it: those without a token come before the one that has it.
        let mut b = starts.partition_point(|&start| start as usize <= row).saturating_sub(1);
        while row < rows.end.min(end) {
            if row >= starts[b + 1] as usize {
                b += 1;
                continue;
            }
            let (token, page_size) = (row - starts[b] as usize, problem.table.page_size);
            let count = (page_size - token % page_size).min(starts[b + 1] as usize - row).min(rows.end - row);
            let run = Run { page: 0, token: token % page_size, row, count };
            // SAFETY: a token of the sequence, whose entry is below M; the run lies in one page, and its rows are the task's.
            unsafe {
                let entry = b as isize * problem.table.stride as isize + (token / page_size) as isize;
                let page = problem.table.entries.offset(entry).read();
                let run = Run { page: i64::from(page).clamp(0, problem.table.num_pages as i64 - 1), ..run };
                gather(simd, problem, &problem.keys, &run);
                gather(simd, problem, &problem.values, &run);
            }
            row += count;
        }
        for of in [&problem.keys, &problem.values] {
            let bytes = row_bytes(of);
            // SAFETY: rows of the result that are the task's.
            unsafe { of.rows.data.add(row * bytes).write_bytes(0, (rows.end - row) * bytes) };
        }
    }
}

/// Neighbouring tokens of a page and the rows of the results that they go to.
struct Run {
    page: i64,
    token: usize,
    row: usize,
    count: usize,
}

/// # Safety
/// The tokens are of the cache, and the rows are below N, writable and not otherwise accessed.
#[inline(always)]
unsafe fn gather<S: Simd>(simd: S, problem: &GatherKvCache, of: &GatheredRows, run: &Run) {
    let (cache, rows) = (&of.cache, &of.rows);
    let [heads, head_dim] = [1, 2].map(|axis| rows.dims[axis] as usize);
    let (from_size, to_size) = (problem.cache_dtype.size(), rows.dtype.size());
    let copies_bits = of.scale.is_none() && problem.cache_dtype == rows.dtype;
    // What lies together in the cache as it does in the result: all of the run, the heads of a token, or one head.
    let heads_together = copies_bits && cache.head_stride == head_dim as i64;
    let all_together = heads_together && cache.token_stride == (heads * head_dim) as i64;
    let tokens = if all_together { 1 } else { run.count };
    let parts = if heads_together { 1 } else { heads };
    let elements = head_dim * heads / parts * (run.count / tokens);
    let mut numbers = [0.0f32; MAX_HEAD_DIM as usize];
    for token in 0..tokens {
        let first = run.page * cache.page_stride + (run.token + token) as i64 * cache.token_stride;
        for head in 0..parts {
            let from = (first + head as i64 * cache.head_stride) as isize * from_size as isize;
            let to = ((run.row + token) * heads + head) * head_dim * to_size;
            // SAFETY: elements of the token's rows in the cache, whose strides the problem has checked; a head has at most
            // MAX_HEAD_DIM elements, and rows are converted head by head; there is one scale, or one for each head.
            unsafe {
                let (from, to) = (cache.data.offset(from).cast_const(), rows.data.add(to));
                if copies_bits {
                    to.copy_from_nonoverlapping(from, elements * from_size);
                    continue;
                }
                widen_row(simd, problem.cache_dtype, from, numbers.as_mut_ptr(), head_dim);
                if let Some(scale) = of.scale {
                    let factor = scale.values.add(if scale.per_head { head } else { 0 }).read();
                    numbers[..head_dim].iter_mut().for_each(|x| *x *= factor);
                }
                narrow_row(simd, rows.dtype, numbers.as_ptr(), to, head_dim);
            }
        }
    }
}
