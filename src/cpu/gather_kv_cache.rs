//! Copies K and V rows of sequences out of a paged cache on the CPU. A task is a range of rows of the results.

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

/// Bytes of a task, enough to pay for scheduling it.
const TASK_BYTES: usize = 1 << 18;

/// Bytes of K and V of a page up to which the following pages are prefetched, if K and V of a page are not adjacent.
/// Within adjacent bytes the CPU's hardware prefetchers do this.
const MAX_PREFETCHED_PAGE: usize = 1 << 12;
/// Pages between the one that is copied and the one that is prefetched.
const PREFETCH_DISTANCE: usize = 8;

/// Runs per batch: first the K rows of a batch are copied, then its V rows.
const BATCH_RUNS: usize = 128;

/// Bytes of a result from which on it is stored with non-temporal stores, because the caches would not hold it.
const MIN_NONTEMPORAL: usize = 1 << 24;

/// The least scale for which fp8 is converted in bf16 pairs, whose products may lose subnormal numbers. An fp8 number
/// is 0 or at least 2^-16 (e5m2), and bf16 is subnormal below 2^-126, so that with this scale no product is subnormal.
const MIN_PAIR_SCALE: f32 = 1.0 / (1u128 << 110) as f32;

/// Compute the packed `keys` and `values`, and `cu_seqlens`.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &GatherKvCache, pool: &dyn Pool) -> Result {
    // SAFETY: the caller guarantees valid views and exclusive results. cu_seqlens has S + 1 elements, and nothing
    // writes them from here on.
    let starts = unsafe {
        write_starts(problem);
        std::slice::from_raw_parts(problem.cu_seqlens.cast_const(), problem.num_seqs + 1)
    };
    let row_bytes = row_bytes(&problem.keys) + row_bytes(&problem.values);
    let rows_of_task = (TASK_BYTES / row_bytes).max(1);
    parallel_for(
        pool,
        problem.capacity.div_ceil(rows_of_task),
        || (),
        |(), task| {
            let first = task * rows_of_task;
            let rows = first..(first + rows_of_task).min(problem.capacity);
            // SAFETY: the caller guarantees valid views, the problem has validated dtypes and shapes, and no other task
            // has these rows.
            unsafe { Isa::best().dispatch(GatherRows { problem, starts, rows }) };
        },
    )
}

impl GatheredRows<'_> {
    /// (Hkv, D)
    fn heads(&self) -> [usize; 2] {
        [1, 2].map(|axis| self.rows.dims[axis] as usize)
    }
}

/// Bytes of a row of a result, all heads together.
fn row_bytes(result: &GatheredRows) -> usize {
    result.heads().iter().product::<usize>() * result.rows.dtype.size()
}

/// Write `cu_seqlens`.
///
/// # Safety
/// The problem's `context_lens` are readable, `cu_seqlens` writable.
unsafe fn write_starts(problem: &GatherKvCache) {
    let max_len = problem.table.capacity();
    let mut start = 0;
    for b in 0..problem.num_seqs {
        // SAFETY: b < S; there are S lengths and S + 1 starts.
        unsafe {
            problem.cu_seqlens.add(b).write(start as i32);
            let len = usize::try_from(problem.context_lens.add(b).read()).unwrap_or(0).min(max_len);
            start = (start + len).min(problem.capacity);
        }
    }
    // SAFETY: there are S + 1 starts, and this is the last one.
    unsafe { problem.cu_seqlens.add(problem.num_seqs).write(start as i32) };
}

/// Gathers a range of rows of both results.
///
/// # Safety
/// As [`run`]; `starts` are the problem's, the rows are below N, and nothing else accesses them.
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
        let results = [&problem.keys, &problem.values];
        // SAFETY: called with b < S and entry < M, an element of the block table.
        let page = |b: usize, entry: usize| unsafe {
            let id = table.entries.offset(b as isize * table.stride as isize + entry as isize).read();
            i64::from(id).clamp(0, table.num_pages as i64 - 1)
        };
        let row_elements: usize = results.iter().map(|result| result.heads().iter().product::<usize>()).sum();
        let page_bytes = page_size * row_elements * problem.cache_dtype.size();
        let [keys, values] = results.map(|result| result.cache.data.addr());
        let prefetches = page_bytes <= MAX_PREFETCHED_PAGE && keys.abs_diff(values) >= page_bytes;
        let end = rows.end.min(starts[problem.num_seqs] as usize);
        let mut batch = [Run::default(); BATCH_RUNS];
        let mut count = 0;
        let gather_batch = |runs: &[Run]| {
            for result in results {
                // SAFETY: each run is in one page of the cache, since page ids are clamped, and its rows are the
                // task's.
                unsafe { simd.vectorize(GatherRuns { result, cache_dtype: problem.cache_dtype, runs, prefetches }) };
            }
        };
        let mut row = rows.start;
        // The last sequence that begins at or before the row. It has the row: empty sequences with the same start come
        // before it.
        let mut b = starts.partition_point(|&start| start as usize <= row).saturating_sub(1);
        while row < end {
            let (token, next) = (row - starts[b] as usize, end.min(starts[b + 1] as usize));
            let (mut entry, mut offset) = (token / page_size, token % page_size);
            while row < next {
                let tokens = (page_size - offset).min(next - row);
                batch[count] = Run { page: page(b, entry), token: offset, row, tokens };
                (row, entry, offset, count) = (row + tokens, entry + 1, 0, count + 1);
                if count == BATCH_RUNS || row == end {
                    gather_batch(&batch[..count]);
                    count = 0;
                }
            }
            b += 1;
        }
        simd.store_fence();
        for result in results {
            let bytes = row_bytes(result);
            // SAFETY: the rows from `row` on, to which no token belongs, are the task's.
            unsafe { result.rows.data.add(row * bytes).write_bytes(0, (rows.end - row) * bytes) };
        }
    }
}

/// Adjacent tokens of a page, and the rows of the results that they are copied to.
#[derive(Clone, Copy, Default)]
struct Run {
    page: i64,
    /// The first token, counted within the page.
    token: usize,
    /// The first row of the results.
    row: usize,
    tokens: usize,
}

/// Gathers a batch of runs into one result.
///
/// # Safety
/// The tokens are tokens of the cache; the rows are below N and writable, and nothing else accesses them.
struct GatherRuns<'a> {
    result: &'a GatheredRows<'a>,
    cache_dtype: DType,
    runs: &'a [Run],
    prefetches: bool,
}

impl SimdKernel for GatherRuns<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        // SAFETY: the contract of the type holds for the runs, and each arm names the element types of the cache and of
        // the result.
        unsafe {
            if self.result.scale.is_none() && self.cache_dtype == self.result.rows.dtype {
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
    /// Offsets in elements of a run's token `token`, in the cache and in the result.
    #[inline(always)]
    fn offsets(&self, run: &Run, token: usize) -> (isize, usize) {
        let (cache, [heads, head_dim]) = (&self.result.cache, self.result.heads());
        let from = run.page * cache.page_stride + (run.token + token) as i64 * cache.token_stride;
        (from as isize, (run.row + token) * heads * head_dim)
    }

    /// The ranges of elements that are contiguous both in the cache and in the result: the whole run, all heads of a
    /// token, or one head. With `separate_heads` a range has at most one head.
    #[inline(always)]
    fn contiguous_ranges(&self, run: &Run, separate_heads: bool) -> ContiguousRanges {
        let (cache, [heads, head_dim]) = (&self.result.cache, self.result.heads());
        let heads_contiguous = cache.head_stride == head_dim as i64 && !separate_heads;
        let all_contiguous = heads_contiguous && cache.token_stride == (heads * head_dim) as i64;
        let row = heads * head_dim;
        match (all_contiguous, heads_contiguous) {
            (true, _) => ContiguousRanges { tokens: 1, ranges: 1, len: run.tokens * row },
            (_, true) => ContiguousRanges { tokens: run.tokens, ranges: 1, len: row },
            _ => ContiguousRanges { tokens: run.tokens, ranges: heads, len: head_dim },
        }
    }

    /// Prefetch the cache rows of the run `PREFETCH_DISTANCE` after this one.
    #[inline(always)]
    fn prefetch_after(&self, index: usize) {
        let Some(run) = self.runs.get(index + PREFETCH_DISTANCE).filter(|_| self.prefetches) else { return };
        let ContiguousRanges { tokens, ranges, len } = self.contiguous_ranges(run, false);
        let (cache, size) = (&self.result.cache, self.cache_dtype.size());
        for token in 0..tokens {
            let (from, _) = self.offsets(run, token);
            for head in 0..ranges as isize {
                let from = (from + head * cache.head_stride as isize) * size as isize;
                prefetch_row(cache.data.wrapping_offset(from), len * size);
            }
        }
    }

    /// Whether aligned vectors of the result are stored with non-temporal stores.
    fn stores_nontemporal<S: Simd>(&self) -> bool {
        S::HAS_NONTEMPORAL_STORES && self.result.rows.bytes() >= MIN_NONTEMPORAL
    }

    /// Copy rows bit by bit.
    ///
    /// # Safety
    /// As [`GatherRuns`]; the result has the cache's dtype.
    #[inline(always)]
    unsafe fn copy<S: Simd>(&self, simd: S) {
        let (size, vector) = (self.result.rows.dtype.size(), S::LANES * size_of::<f32>());
        let (nontemporal, head_stride) =
            (self.stores_nontemporal::<S>(), self.result.cache.head_stride as isize * size as isize);
        for (index, run) in self.runs.iter().enumerate() {
            self.prefetch_after(index);
            let ContiguousRanges { tokens, ranges, len } = self.contiguous_ranges(run, false);
            let bytes = len * size;
            for token in 0..tokens {
                let (from, to) = self.offsets(run, token);
                // SAFETY: elements of the token's rows in the cache, whose strides the problem has validated, and of
                // the run's rows in the result.
                unsafe {
                    let from = self.result.cache.data.offset(from * size as isize).cast_const();
                    let to = self.result.rows.data.add(to * size);
                    for head in 0..ranges {
                        let (from, to) = (from.offset(head as isize * head_stride), to.add(head * bytes));
                        let stored = if nontemporal && is_aligned::<S>(to) { bytes - bytes % vector } else { 0 };
                        for i in (0..stored).step_by(vector) {
                            simd.store_nontemporal(to.add(i).cast(), simd.load(from.add(i).cast()));
                        }
                        if stored < bytes {
                            to.add(stored).copy_from_nonoverlapping(from.add(stored), bytes - stored);
                        }
                    }
                }
            }
        }
    }

    /// Convert rows of 8-bit floats.
    ///
    /// # Safety
    /// As [`GatherRuns`]; the cache holds `F`, the result f16, bf16 or f32.
    #[inline(always)]
    unsafe fn decode<S: Simd, F: LoadElement>(&self, simd: S) {
        let nontemporal = self.stores_nontemporal::<S>();
        let table = (S::ELEMENTS_PER_LANE == 2).then(|| simd.fp8_table(Fp8ToBf16Table::of(self.cache_dtype)));
        // SAFETY: the caller guarantees the element types. Each closure stays below the `len` elements that it is
        // given: 2 * LANES bf16 fill the LANES lanes of a vector.
        unsafe {
            match self.result.rows.dtype {
                DType::F16 => self.convert::<S, F, f16>(simd, |_, _, _, _| 0),
                DType::BF16 => self.convert::<S, F, bf16>(simd, |from, to, len, factor| {
                    let Some(table) = table.filter(|_| factor.abs() >= MIN_PAIR_SCALE) else { return 0 };
                    let (done, scale) = (len - len % (2 * S::LANES), simd.splat(factor));
                    let nontemporal = nontemporal && is_aligned::<S>(to);
                    for i in (0..done).step_by(2 * S::LANES) {
                        let pairs = simd.load_fp8_pairs(table, from.add(i).cast(), 2 * S::LANES);
                        let pairs = if self.result.scale.is_none() { pairs } else { simd.scale_pairs(pairs, scale) };
                        let to = to.add(i).cast();
                        if nontemporal { simd.store_nontemporal(to, pairs) } else { simd.store(to, pairs) }
                    }
                    done
                }),
                _ => self.convert::<S, F, f32>(simd, |from, to, len, factor| {
                    let done = if nontemporal && is_aligned::<S>(to) { len - len % S::LANES } else { 0 };
                    for i in (0..done).step_by(S::LANES) {
                        simd.store_nontemporal(to.add(i), simd.mul(F::load(simd, from.add(i)), simd.splat(factor)));
                    }
                    done
                }),
            }
        }
    }

    /// Convert rows, multiplied by the scale if there is one. `first(from, to, len, factor)` may convert the first
    /// elements of a range in a faster way, and returns how many it has converted.
    ///
    /// # Safety
    /// As [`GatherRuns`]; the cache holds `F`, the result `T`.
    #[inline(always)]
    unsafe fn convert<S: Simd, F: LoadElement, T: Element>(
        &self,
        simd: S,
        first: impl Fn(*const F, *mut T, usize, f32) -> usize,
    ) {
        let per_head = self.result.scale.is_some_and(|scale| scale.per_head);
        let (cache, rows) = (self.result.cache.data.cast::<F>(), self.result.rows.data.cast::<T>());
        for (index, run) in self.runs.iter().enumerate() {
            self.prefetch_after(index);
            let ContiguousRanges { tokens, ranges, len } = self.contiguous_ranges(run, per_head);
            for token in 0..tokens {
                let (from, to) = self.offsets(run, token);
                for head in 0..ranges {
                    // SAFETY: elements of the token's row in the cache, whose strides the problem has validated, and of
                    // its row in the result. A scale has Hkv values if it is per head, and then each range is one head.
                    unsafe {
                        let factor =
                            self.result.scale.map_or(1.0, |s| *s.values.add(if s.per_head { head } else { 0 }));
                        let from =
                            cache.offset(from + head as isize * self.result.cache.head_stride as isize).cast_const();
                        let to = rows.add(to + head * len);
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

/// Whether an address is aligned for non-temporal stores of whole vectors.
fn is_aligned<S: Simd>(to: *const impl Sized) -> bool {
    to.addr().is_multiple_of(S::LANES * size_of::<f32>())
}

/// Ranges of `len` contiguous elements: `ranges` per token, in the order of the result. A whole run counts as one
/// token.
struct ContiguousRanges {
    tokens: usize,
    ranges: usize,
    len: usize,
}
