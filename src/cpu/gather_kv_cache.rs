//! Copies K and V rows of sequences out of a paged cache on the CPU. A task is a range of rows of the results.

use super::element::{Element, LoadElement};
use super::element_fp8::{E4m3, E5m2};
use super::fp8_decoding::Fp8ToBf16Table;
use super::simd::{Isa, Simd, SimdKernel, prefetch_row};
use crate::error::Result;
use crate::pool::{Pool, parallel_for};
use crate::problem::gather_kv_cache::{GatherKvCache, GatheredRows};
use crate::problem::{KvScaleCache, KvView};
use crate::tensor::DType;
use half::{bf16, f16};
use std::ops::Range;

/// Bytes of a task, enough to pay for scheduling it.
const TASK_BYTES: usize = 1 << 18;

/// Bytes of K and V of a page up to which the following pages are prefetched, if rows are converted and K and V of a
/// page are not adjacent. Within adjacent bytes the CPU's hardware prefetchers do this, and a copy executes so few
/// instructions per row that its loads run ahead.
const MAX_PREFETCHED_PAGE: usize = 1 << 12;
/// Pages between the one that is copied and the one that is prefetched.
const PREFETCH_DISTANCE: usize = 8;

/// Runs per batch: first the K rows of a batch are copied, then its V rows.
const BATCH_RUNS: usize = 128;

/// Bytes of a result from which on it is stored with non-temporal stores, because the caches would not hold it.
const MIN_NONTEMPORAL: usize = 1 << 24;

/// Bytes of a contiguous range up to which it is copied in vectors, because calling memcpy takes longer.
const MAX_VECTOR_COPY: usize = 1 << 9;

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

    /// Whether rows are copied bit by bit out of a cache of this dtype.
    fn is_copied(&self, cache_dtype: DType) -> bool {
        self.scale.is_none() && self.rows.dtype == cache_dtype
    }

    /// Whether a contiguous range has one head: the heads are not adjacent in the cache, or each has its scale.
    fn separates_heads(&self) -> bool {
        self.cache.head_stride != self.rows.dims[2] || self.scale.is_some_and(|scale| scale.per_head)
    }

    /// Whether a contiguous range has all adjacent tokens of a page.
    fn joins_tokens(&self) -> bool {
        !self.separates_heads() && self.cache.token_stride == self.rows.dims[1] * self.rows.dims[2]
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
        let copies = results.into_iter().all(|result| result.is_copied(problem.cache_dtype));
        let prefetches = !copies && page_bytes <= MAX_PREFETCHED_PAGE && keys.abs_diff(values) >= page_bytes;
        let end = rows.end.min(starts[problem.num_seqs] as usize);
        let joins_tokens = problem.scale_cache.is_none() && results.into_iter().all(GatheredRows::joins_tokens);
        let one_token = page_size == 1 || !joins_tokens;
        let mut batch = [Run::default(); BATCH_RUNS];
        let (mut count, mut first_row) = (0, rows.start);
        let mut row = rows.start;
        // The last sequence that begins at or before the row. It has the row: empty sequences with the same start come
        // before it.
        let mut b = starts.partition_point(|&start| start as usize <= row).saturating_sub(1);
        while row < end {
            let (token, next) = (row - starts[b] as usize, end.min(starts[b + 1] as usize));
            let (mut entry, mut offset) = (token / page_size, token % page_size);
            while row < next {
                let tokens = if joins_tokens { page_size - offset } else { 1 }.min(next - row);
                let page = page(b, entry);
                let offsets = results.map(|GatheredRows { cache, .. }| {
                    (page * cache.page_stride + offset as i64 * cache.token_stride) as isize
                });
                let scale = problem.scale_cache.map_or(0, |KvScaleCache { k, .. }| {
                    (page * k.page_stride + offset as i64 * k.token_stride) as isize
                });
                batch[count] = Run { offsets, scale, tokens };
                (row, offset, count) = (row + tokens, offset + tokens, count + 1);
                if offset == page_size {
                    (entry, offset) = (entry + 1, 0);
                }
                if count == BATCH_RUNS || row == end {
                    let runs = &batch[..count];
                    for (index, result) in results.into_iter().enumerate() {
                        let cache_dtype = problem.cache_dtype;
                        // SAFETY: each run is in one page of the cache, since page ids are clamped, and its rows are
                        // the task's.
                        unsafe {
                            let scales = problem.scale_cache.map(|scales| [scales.k, scales.v][index]);
                            let runs = GatherRuns {
                                result,
                                index,
                                cache_dtype,
                                scales,
                                runs,
                                one_token,
                                first_row,
                                prefetches,
                            };
                            simd.vectorize(runs);
                        }
                    }
                    (count, first_row) = (0, row);
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

/// Adjacent tokens of a page; one token where a contiguous range has one at most. The rows of a run follow those of the
/// run before it.
#[derive(Clone, Copy, Default)]
struct Run {
    /// Offsets of the first token in the caches of K and V, in elements.
    offsets: [isize; 2],
    /// Offset of the first token's scales, in elements, which is that of K and of V; 0 of a cache without scales.
    scale: isize,
    tokens: usize,
}

/// Gathers a batch of runs into one result.
///
/// # Safety
/// The tokens are tokens of the cache; the rows are below N and writable, and nothing else accesses them.
struct GatherRuns<'a> {
    result: &'a GatheredRows<'a>,
    /// 0 for K, 1 for V.
    index: usize,
    cache_dtype: DType,
    /// The scales of the rows. Each run then has one token.
    scales: Option<KvView>,
    runs: &'a [Run],
    /// Whether each run has one token.
    one_token: bool,
    /// The row of the result that the first token is copied to.
    first_row: usize,
    prefetches: bool,
}

impl SimdKernel for GatherRuns<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        // SAFETY: the contract of the type holds for the runs, and each arm names the element types of the cache and of
        // the result.
        unsafe {
            if self.result.is_copied(self.cache_dtype) {
                return self.copy(simd);
            }
            if let Some(scales) = self.scales {
                return match self.cache_dtype {
                    DType::I8 => self.dequantize::<S, i8>(simd, scales),
                    _ => self.dequantize::<S, E4m3>(simd, scales),
                };
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
    /// Contiguous ranges per token, and their length in elements.
    fn ranges(&self) -> (usize, usize) {
        let [heads, head_dim] = self.result.heads();
        if self.result.separates_heads() { (heads, head_dim) } else { (1, heads * head_dim) }
    }

    /// Calls `each(from, to, head, len)` for each contiguous range of the cache, in the order of the result: its offsets in
    /// the cache and in the result, its first head and its length, in elements. A range is a run, or one head of a token.
    #[inline(always)]
    fn for_each_range(&self, mut each: impl FnMut(isize, usize, usize, usize)) {
        let head_stride = self.result.cache.head_stride as isize;
        let (ranges, token_len) = self.ranges();
        let mut to = self.first_row * ranges * token_len;
        for (i, run) in self.runs.iter().enumerate() {
            self.prefetch_after(i);
            let (mut from, len) = (run.offsets[self.index], run.tokens * token_len);
            for head in 0..ranges {
                // The only call of the closure: with a second one the compiler may not inline it, and then it is
                // compiled without the instruction set.
                each(from, to, head, len);
                (from, to) = (from + head_stride, to + len);
            }
        }
    }

    /// Prefetch the cache rows of the run `PREFETCH_DISTANCE` after run `i`.
    #[inline(always)]
    fn prefetch_after(&self, i: usize) {
        let Some(run) = self.runs.get(i + PREFETCH_DISTANCE).filter(|_| self.prefetches) else { return };
        let (size, row) = (self.cache_dtype.size(), self.result.heads().iter().product::<usize>());
        let from = self.result.cache.data.wrapping_offset(run.offsets[self.index] * size as isize);
        prefetch_row(from, run.tokens * row * size);
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
        let nontemporal = self.stores_nontemporal::<S>();
        let bytes = self.ranges().1 * size;
        if nontemporal && self.one_token && bytes.is_multiple_of(vector) && is_aligned::<S>(self.result.rows.data) {
            // SAFETY: this function's contract; a range has this number of vectors, and all of them are aligned.
            unsafe {
                match bytes / vector {
                    1 => return self.copy_vectors::<S, 1>(simd),
                    2 => return self.copy_vectors::<S, 2>(simd),
                    4 => return self.copy_vectors::<S, 4>(simd),
                    8 => return self.copy_vectors::<S, 8>(simd),
                    16 => return self.copy_vectors::<S, 16>(simd),
                    _ => {}
                }
            }
        }
        self.for_each_range(|from, to, _, len| {
            let bytes = len * size;
            // SAFETY: elements of the run's tokens in the cache, whose strides the problem has validated, and of the run's
            // rows in the result.
            unsafe {
                let from = self.result.cache.data.offset(from * size as isize).cast_const();
                let to = self.result.rows.data.add(to * size);
                let nontemporal = nontemporal && is_aligned::<S>(to);
                let stored = if nontemporal || bytes <= MAX_VECTOR_COPY { bytes - bytes % vector } else { 0 };
                for i in (0..stored).step_by(vector) {
                    store(simd, to.add(i).cast(), simd.load(from.add(i).cast()), nontemporal);
                }
                if stored < bytes {
                    to.add(stored).copy_from_nonoverlapping(from.add(stored), bytes - stored);
                }
            }
        });
    }

    /// Copy ranges of `N` vectors, one token per run, with non-temporal stores. Bounds per range would take as long as the
    /// stores of one or two vectors. Where stores go through the caches they take no time that counts.
    ///
    /// # Safety
    /// As [`copy`](Self::copy); a range has `N` vectors, and the result is aligned to them.
    #[inline(always)]
    unsafe fn copy_vectors<S: Simd, const N: usize>(&self, simd: S) {
        let (size, vector) = (self.result.rows.dtype.size() as isize, S::LANES * size_of::<f32>());
        let (ranges, stride) = (self.ranges().0, self.result.cache.head_stride as isize * size);
        let mut to = self.result.rows.data.wrapping_add(self.first_row * ranges * N * vector);
        for run in self.runs {
            let mut from = self.result.cache.data.cast_const().wrapping_offset(run.offsets[self.index] * size);
            for _ in 0..ranges {
                for i in 0..N {
                    // SAFETY: the vectors of a head, or of all heads, of the run's token in the cache, whose strides the
                    // problem has validated, and of the run's row in the result.
                    unsafe {
                        let x = simd.load(from.add(i * vector).cast());
                        simd.store_nontemporal(to.add(i * vector).cast(), x);
                    }
                }
                (from, to) = (from.wrapping_offset(stride), to.wrapping_add(N * vector));
            }
        }
    }

    /// Convert rows of 8-bit floats.
    ///
    /// # Safety
    /// As [`GatherRuns`]; the cache holds `F`, the result f16, bf16 or f32.
    #[inline(always)]
    unsafe fn decode<S: Simd, F: LoadElement>(&self, simd: S) {
        let (nontemporal, has_scale) = (self.stores_nontemporal::<S>(), self.result.scale.is_some());
        let table = (S::ELEMENTS_PER_LANE == 2).then(|| simd.fp8_table(Fp8ToBf16Table::of(self.cache_dtype)));
        // SAFETY: the caller guarantees the element types. Each closure stays below the `len` elements that it is
        // given: 2 * LANES bf16 fill the LANES lanes of a vector.
        unsafe {
            match self.result.rows.dtype {
                DType::F16 => self.convert::<S, F, f16>(simd, |_, _, _, _| 0),
                DType::BF16 => self.convert::<S, F, bf16>(simd, |from, to, len, factor| {
                    let Some(table) = table.filter(|_| factor.abs() >= MIN_PAIR_SCALE) else { return 0 };
                    let (vector, scale) = (2 * S::LANES, simd.splat(factor));
                    let nontemporal = nontemporal && is_aligned::<S>(to);
                    let (in_twos, done) = (len - len % (2 * vector), len - len % vector);
                    for i in (0..in_twos).step_by(2 * vector) {
                        let both = simd.load_fp8_pairs_2::<false>(table, from.add(i).cast());
                        for (j, pairs) in both.into_iter().enumerate() {
                            let pairs = if has_scale { simd.scale_pairs(pairs, scale) } else { pairs };
                            store(simd, to.add(i + j * vector).cast(), pairs, nontemporal);
                        }
                    }
                    if in_twos < done {
                        let pairs = simd.load_fp8_pairs::<false>(table, from.add(in_twos).cast(), vector);
                        let pairs = if has_scale { simd.scale_pairs(pairs, scale) } else { pairs };
                        store(simd, to.add(in_twos).cast(), pairs, nontemporal);
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

    /// Convert rows of `F`, each multiplied by its scale.
    ///
    /// # Safety
    /// As [`GatherRuns`]; the cache holds `F`, the result f16, bf16 or f32.
    #[inline(always)]
    unsafe fn dequantize<S: Simd, F: LoadElement>(&self, simd: S, scales: KvView) {
        // SAFETY: the caller guarantees the cache's type, and each arm names that of the result.
        unsafe {
            match self.result.rows.dtype {
                DType::F16 => self.dequantize_to::<S, F, f16>(simd, scales),
                DType::BF16 => self.dequantize_to::<S, F, bf16>(simd, scales),
                _ => self.dequantize_to::<S, F, f32>(simd, scales),
            }
        }
    }

    /// # Safety
    /// As [`Self::dequantize`]; the result holds `T`.
    #[inline(always)]
    unsafe fn dequantize_to<S: Simd, F: LoadElement, T: Element>(&self, simd: S, scales: KvView) {
        let (cache, rows) = (self.result.cache.data.cast::<F>(), self.result.rows.data.cast::<T>());
        let [heads, head_dim] = self.result.heads();
        for (i, run) in self.runs.iter().enumerate() {
            self.prefetch_after(i);
            for head in 0..heads {
                let at = |of: &KvView, first: isize| first + head as isize * of.head_stride as isize;
                // SAFETY: elements of the run's token in the cache and its scale, whose strides the problem has validated,
                // and of its row in the result.
                unsafe {
                    let from = cache.offset(at(&self.result.cache, run.offsets[self.index])).cast_const();
                    let to = rows.add(((self.first_row + i) * heads + head) * head_dim);
                    let factor = scales.data.cast::<f32>().offset(at(&scales, run.scale)).read();
                    let whole = head_dim - head_dim % S::LANES;
                    for i in (0..whole).step_by(S::LANES) {
                        T::store(simd, to.add(i), simd.mul(F::load(simd, from.add(i)), simd.splat(factor)));
                    }
                    for i in whole..head_dim {
                        to.add(i).write(T::from_f32(from.add(i).read().to_f32() * factor));
                    }
                }
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
        let (cache, rows) = (self.result.cache.data.cast::<F>(), self.result.rows.data.cast::<T>());
        self.for_each_range(|from, to, head, len| {
            // SAFETY: elements of the run's tokens in the cache, whose strides the problem has validated, and of its rows in
            // the result. A scale has Hkv values if it is per head, and then each range is one head.
            unsafe {
                let factor = self.result.scale.map_or(1.0, |s| *s.values.add(if s.per_head { head } else { 0 }));
                let (from, to) = (cache.offset(from).cast_const(), rows.add(to));
                let mut i = first(from, to, len, factor);
                while i + S::LANES <= len {
                    T::store(simd, to.add(i), simd.mul(F::load(simd, from.add(i)), simd.splat(factor)));
                    i += S::LANES;
                }
                for i in i..len {
                    to.add(i).write(T::from_f32(from.add(i).read().to_f32() * factor));
                }
            }
        });
    }
}

/// Whether an address is aligned for non-temporal stores of whole vectors.
fn is_aligned<S: Simd>(to: *const impl Sized) -> bool {
    to.addr().is_multiple_of(S::LANES * size_of::<f32>())
}

/// Stores a vector, with a non-temporal store if `nontemporal`.
///
/// # Safety
/// As `Simd::store`, and as `Simd::store_nontemporal` if `nontemporal`.
#[inline(always)]
unsafe fn store<S: Simd>(simd: S, to: *mut f32, x: S::V, nontemporal: bool) {
    // SAFETY: the caller guarantees it.
    unsafe { if nontemporal { simd.store_nontemporal(to, x) } else { simd.store(to, x) } }
}
