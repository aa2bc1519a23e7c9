//! Copies the K and V rows of sequences out of a paged cache on the CPU: tasks of adjacent rows of the results.

use super::element::{Element, LoadElement};
use super::element_fp8::{E4m3, E5m2};
use super::fp8_decoding::Fp8ToBf16Table;
use super::simd::{Isa, Simd, SimdKernel, prefetch_row};
use crate::error::Result;
use crate::pool::{Pool, parallel_for};
use crate::problem::gather_kv_cache::{GatherKvCache, GatheredRows};
use crate::tensor::DType;
use half::{bf16, f16};
use std::ops::Range;

/// Bytes of one task: large enough to pay for handing it to another thread.
const TASK: usize = 1 << 18;

/// Bytes of a page, K and V, up to which the pages that follow are prefetched where K and V lie apart: in what lies
/// together, the CPU looks ahead by itself.
const SMALL_PAGE: usize = 1 << 12;
const PAGES_AHEAD: usize = 8;

/// Runs that are found before their K is moved, then their V.
const RUNS: usize = 128;

/// Bytes of a result from which on it is stored past the caches.
const STREAMED: usize = 1 << 24;

/// In words, which may lose subnormal numbers, no product of a code and such a factor is one: codes are 0 or at least 2^-16
/// (e5m2), numbers of bf16 subnormal below 2^-126.
const LEAST_FACTOR_OF_WORDS: f32 = 1.0 / (1u128 << 110) as f32;

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
            unsafe { Isa::best().dispatch(GatherRows { problem, starts, rows }) };
        },
    )
}

impl GatheredRows<'_> {
    /// Hkv and D.
    fn heads(&self) -> [usize; 2] {
        [1, 2].map(|axis| self.rows.dims[axis] as usize)
    }
}

/// Bytes of a row of a result, all heads of it.
fn row_bytes(of: &GatheredRows) -> usize {
    of.heads().iter().product::<usize>() * of.rows.dtype.size()
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

impl SimdKernel for GatherRows<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { problem, starts, rows } = self;
        let (table, page_size) = (&problem.table, problem.table.page_size);
        let sides = [&problem.keys, &problem.values];
        // SAFETY: an entry of sequence b, below M.
        let page = |b: usize, entry: usize| unsafe {
            let listed = table.entries.offset(b as isize * table.stride as isize + entry as isize).read();
            i64::from(listed).clamp(0, table.num_pages as i64 - 1)
        };
        let row_elements: usize = sides.iter().map(|of| of.heads().iter().product::<usize>()).sum();
        let page_bytes = page_size * row_elements * problem.cache_dtype.size();
        let [keys, values] = sides.map(|of| of.cache.data.addr());
        let prefetches = page_bytes <= SMALL_PAGE && keys.abs_diff(values) >= page_bytes;
        let end = rows.end.min(starts[problem.num_seqs] as usize);
        let mut found = [Run::default(); RUNS];
        let mut count = 0;
        let move_rows = |runs: &[Run]| {
            for of in sides {
                // SAFETY: each run lies in one page, and its rows are the task's.
                unsafe { simd.vectorize(GatherRuns { of, cache_dtype: problem.cache_dtype, runs, prefetches }) };
            }
        };
        let mut row = rows.start;
        // The last sequence that begins at the row or before it: those without a token come before the one that has it.
        let mut b = starts.partition_point(|&start| start as usize <= row).saturating_sub(1);
        while row < end {
            let (token, next) = (row - starts[b] as usize, end.min(starts[b + 1] as usize));
            let (mut entry, mut offset) = (token / page_size, token % page_size);
            while row < next {
                let tokens = (page_size - offset).min(next - row);
                found[count] = Run { page: page(b, entry), token: offset, row, tokens };
                (row, entry, offset, count) = (row + tokens, entry + 1, 0, count + 1);
                if count == RUNS || row == end {
                    move_rows(&found[..count]);
                    count = 0;
                }
            }
            b += 1;
        }
        simd.store_fence();
        for of in sides {
            let bytes = row_bytes(of);
            // SAFETY: rows of the result that are the task's.
            unsafe { of.rows.data.add(row * bytes).write_bytes(0, (rows.end - row) * bytes) };
        }
    }
}

/// Adjacent tokens of a page and the rows of the results that they go to.
#[derive(Clone, Copy, Default)]
struct Run {
    page: i64,
    token: usize,
    row: usize,
    tokens: usize,
}

/// Runs of one result.
///
/// # Safety
/// The tokens are of the cache, and the rows are below N, writable and not otherwise accessed.
struct GatherRuns<'a> {
    of: &'a GatheredRows<'a>,
    cache_dtype: DType,
    runs: &'a [Run],
    prefetches: bool,
}

impl SimdKernel for GatherRuns<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        // SAFETY: this struct's contract; the elements of cache and result are of their dtypes.
        unsafe {
            if self.of.scale.is_none() && self.cache_dtype == self.of.rows.dtype {
                return self.copy(simd);
            }
            match self.cache_dtype {
                DType::F8E4M3FN => self.decode::<S, E4m3>(simd),
                DType::F8E5M2 => self.decode::<S, E5m2>(simd),
                DType::F16 => self.convert::<S, f16, f16>(simd, |_, _, _, _| 0),
                DType::BF16 => self.convert::<S, bf16, bf16>(simd, |_, _, _, _| 0),
                _ => self.convert::<S, f32, f32>(simd, |_, _, _, _| 0),
            }
        }
    }
}

impl GatherRuns<'_> {
    /// The element of the cache, and that of the result, with which a run's token `token` begins.
    #[inline(always)]
    fn places(&self, run: &Run, token: usize) -> (isize, usize) {
        let (cache, [heads, head_dim]) = (&self.of.cache, self.of.heads());
        let from = run.page * cache.page_stride + (run.token + token) as i64 * cache.token_stride;
        (from as isize, (run.row + token) * heads * head_dim)
    }

    /// What lies together in the cache as it does in the result: all of a run, the heads of a token, or, where heads are
    /// `apart` too, one head.
    #[inline(always)]
    fn pieces(&self, run: &Run, apart: bool) -> Pieces {
        let (cache, [heads, head_dim]) = (&self.of.cache, self.of.heads());
        let heads_together = cache.head_stride == head_dim as i64 && !apart;
        let all_together = heads_together && cache.token_stride == (heads * head_dim) as i64;
        let row = heads * head_dim;
        match (all_together, heads_together) {
            (true, _) => Pieces { tokens: 1, parts: 1, len: run.tokens * row },
            (_, true) => Pieces { tokens: run.tokens, parts: 1, len: row },
            _ => Pieces { tokens: run.tokens, parts: heads, len: head_dim },
        }
    }

    /// Asks for what the run `PAGES_AHEAD` after this one reads of the cache.
    #[inline(always)]
    fn prefetch_after(&self, index: usize) {
        let Some(run) = self.runs.get(index + PAGES_AHEAD).filter(|_| self.prefetches) else { return };
        let Pieces { tokens, parts, len } = self.pieces(run, false);
        let (cache, size) = (&self.of.cache, self.cache_dtype.size());
        for token in 0..tokens {
            let (from, _) = self.places(run, token);
            for part in 0..parts as isize {
                let from = (from + part * cache.head_stride as isize) * size as isize;
                prefetch_row(cache.data.wrapping_offset(from), len * size);
            }
        }
    }

    /// Whether the result, which the caches would not hold, is stored past them where it is aligned.
    fn streams<S: Simd>(&self) -> bool {
        S::HAS_NONTEMPORAL_STORES && self.of.rows.bytes() >= STREAMED
    }

    /// Bit by bit.
    ///
    /// # Safety
    /// As of the struct; the result has the cache's dtype.
    #[inline(always)]
    unsafe fn copy<S: Simd>(&self, simd: S) {
        let (size, vector) = (self.of.rows.dtype.size(), S::LANES * size_of::<f32>());
        let (streams, part_step) = (self.streams::<S>(), self.of.cache.head_stride as isize * size as isize);
        for (index, run) in self.runs.iter().enumerate() {
            self.prefetch_after(index);
            let Pieces { tokens, parts, len } = self.pieces(run, false);
            let bytes = len * size;
            for token in 0..tokens {
                let (from, to) = self.places(run, token);
                // SAFETY: elements of the token's rows in the cache, whose strides the problem has checked, and of the run's
                // rows.
                unsafe {
                    let from = self.of.cache.data.offset(from * size as isize).cast_const();
                    let to = self.of.rows.data.add(to * size);
                    for part in 0..parts {
                        let (from, to) = (from.offset(part as isize * part_step), to.add(part * bytes));
                        let streamed = if streams && is_aligned::<S>(to) { bytes - bytes % vector } else { 0 };
                        for i in (0..streamed).step_by(vector) {
                            simd.store_nontemporal(to.add(i).cast(), simd.load(from.add(i).cast()));
                        }
                        if streamed < bytes {
                            to.add(streamed).copy_from_nonoverlapping(from.add(streamed), bytes - streamed);
                        }
                    }
                }
            }
        }
    }

    /// # Safety
    /// As of the struct; the cache holds `F`, the result f16, bf16 or f32.
    #[inline(always)]
    unsafe fn decode<S: Simd, F: LoadElement>(&self, simd: S) {
        let streams = self.streams::<S>();
        let table = (S::ELEMENTS_PER_LANE == 2).then(|| simd.fp8_table(Fp8ToBf16Table::of(self.cache_dtype)));
        // SAFETY: this function's contract; two `LANES` elements are `LANES` words.
        unsafe {
            match self.of.rows.dtype {
                DType::F16 => self.convert::<S, F, f16>(simd, |_, _, _, _| 0),
                DType::BF16 => self.convert::<S, F, bf16>(simd, |from, to, len, factor| {
                    let Some(table) = table.filter(|_| factor.abs() >= LEAST_FACTOR_OF_WORDS) else { return 0 };
                    let (done, scale) = (len - len % (2 * S::LANES), simd.splat(factor));
                    let streams = streams && is_aligned::<S>(to);
                    for i in (0..done).step_by(2 * S::LANES) {
                        let words = simd.load_fp8_pairs(table, from.add(i).cast(), 2 * S::LANES);
                        let words = if self.of.scale.is_none() { words } else { simd.scale_pairs(words, scale) };
                        if streams { simd.store_nontemporal(to.add(i).cast(), words) } else { simd.store(to.add(i).cast(), words) }
                    }
                    done
                }),
                _ => self.convert::<S, F, f32>(simd, |from, to, len, factor| {
                    let done = if streams && is_aligned::<S>(to) { len - len % S::LANES } else { 0 };
                    for i in (0..done).step_by(S::LANES) {
                        simd.store_nontemporal(to.add(i), simd.mul(F::load(simd, from.add(i)), simd.splat(factor)));
                    }
                    done
                }),
            }
        }
    }

    /// Times the scale, if there is one. `first` converts as many elements as it likes, from the first on, times a factor.
    ///
    /// # Safety
    /// As of the struct; the cache holds `F`, the result `T`.
    #[inline(always)]
    unsafe fn convert<S: Simd, F: LoadElement, T: Element>(
        &self,
        simd: S,
        first: impl Fn(*const F, *mut T, usize, f32) -> usize,
    ) {
        let per_head = self.of.scale.is_some_and(|scale| scale.per_head);
        let (cache, rows) = (self.of.cache.data.cast::<F>(), self.of.rows.data.cast::<T>());
        for (index, run) in self.runs.iter().enumerate() {
            self.prefetch_after(index);
            let Pieces { tokens, parts, len } = self.pieces(run, per_head);
            for token in 0..tokens {
                let (from, to) = self.places(run, token);
                for part in 0..parts {
                    // SAFETY: the elements of the token's part in the cache, whose strides the problem has checked, and of its
                    // row; there is one scale, or one for each head, which are the parts then.
                    unsafe {
                        let factor = self.of.scale.map_or(1.0, |s| *s.values.add(if s.per_head { part } else { 0 }));
                        let from = cache.offset(from + part as isize * self.of.cache.head_stride as isize).cast_const();
                        let to = rows.add(to + part * len);
                        let mut i = first(from, to, len, factor);
                        while i + S::LANES <= len {
                            T::store(simd, to.add(i), simd.mul(F::load(simd, from.add(i)), simd.splat(factor)));
                            i += S::LANES;
                        }
                        for i in i..len {
                            to.add(i).write(T::from_f32(from.add(i).read().to_f32() * factor));
                        }
                    }
                }
            }
        }
    }
}

/// Whether whole vectors can be streamed to this place.
fn is_aligned<S: Simd>(to: *const impl Sized) -> bool {
    to.addr().is_multiple_of(S::LANES * size_of::<f32>())
}

/// Elements of a run that are taken at once: `len` of each of `parts` of each of `tokens`, in the order of the result.
struct Pieces {
    tokens: usize,
    parts: usize,
    len: usize,
}
