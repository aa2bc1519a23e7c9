//! The GEMV-like path, for few query rows, decode above all: vectors lie along the head dimension, and K and V are
//! loaded straight from the cache.
//!
//! ROWS query rows (padded to a power of two) are multiplied with LANES / ROWS keys per step, so that the sums of a
//! step fill one vector and are reduced together. The lanes of the softmax's vectors are therefore (key, row) pairs.
//!
//! E is [`Simd::ELEMENTS_PER_LANE`]. Where it is 2, adjacent keys belong to consecutive steps, so that their p
//! share a lane: p is `[keys / E][ROWS]`. q is `[ROWS][D / E]` and o `[ROWS][Dv]`, each row padded to whole vectors.

use super::block_rows::BLOCK;
use super::block_step::{BlockBuffers, BlockKernel, BlockStep};
use super::key_scales::KeyScales;
use super::kv_loader::KvLoader;
use super::prefetcher::Prefetcher;
use super::score::{KeyPositions, MaskAndBias};
use super::softmax::softmax;
use crate::cpu::simd::{MAX_LANES, Simd};
use std::marker::PhantomData;

/// The kernel for [`super::plan::QueryLayout::HeadDimInLanes`] of ROWS rows, at most LANES / 2, with K and V loaded by
/// L.
pub(super) struct GemvKernel<L, const ROWS: usize>(PhantomData<L>);

impl<S: Simd, L: KvLoader<S>, const ROWS: usize> BlockKernel<S> for GemvKernel<L, ROWS> {
    /// The keys of E steps.
    const PADDING: usize = S::LANES / ROWS * S::ELEMENTS_PER_LANE;

    /// Two blocks, the one that is read and the one that is prefetched, take a quarter of an L2 cache of 1 MB. With fewer
    /// keys o is loaded, rescaled and stored more often, once per block and head.
    fn block_keys(key_bytes: usize) -> usize {
        const BLOCK_BYTES: usize = 128 << 10;
        let padding = <Self as BlockKernel<S>>::PADDING;
        (BLOCK_BYTES / key_bytes / padding * padding).clamp(padding, BLOCK)
    }

    #[inline(always)]
    unsafe fn attend(simd: S, block_step: BlockStep, prefetcher: &mut Prefetcher, buffers: BlockBuffers) {
        let BlockStep { rows, state, lanes, .. } = block_step;
        // Each of E steps takes LANES / ROWS of these keys, E apart.
        let keys = <Self as BlockKernel<S>>::PADDING;
        let first = rows.block.first;
        let (groups, padded_len) = (rows.block.len.div_ceil(keys), rows.block.len.next_multiple_of(keys));
        let steps = groups * S::ELEMENTS_PER_LANE;
        // SAFETY: the caller guarantees readable scales and their buffers, and at most BLOCK keys of ROWS lanes each.
        let load_scales = |from| unsafe { KeyScales::load_per_lane::<S, ROWS>(from, steps, buffers.scales) };
        let mask_and_bias = MaskAndBias {
            transform: block_step.transform,
            positions: KeyPositions { steps, first: 0, alternating: S::ELEMENTS_PER_LANE, stride: keys },
            scales: block_step.scales.map(load_scales),
            lanes,
            lane: 0,
            head: block_step.head,
            first,
            masked: !lanes.visible_to_all(&(0..S::LANES), first, &(0..padded_len)),
        };
        let loader = L::new(simd, block_step.kv_dtype);
        // SAFETY: the block has row addresses up to a multiple of PADDING, the keys of E steps, and the buffer of scores
        // has a vector for each step. The GEMV layout has one vector of m, l and rescale factors.
        unsafe {
            for step in 0..mask_and_bias.positions.steps {
                let key = step / S::ELEMENTS_PER_LANE * keys + step % S::ELEMENTS_PER_LANE;
                let products = scores::<S, L, ROWS>(simd, loader, &block_step, prefetcher, key);
                simd.store(buffers.scores.add(step * S::LANES), simd.horizontal_sums(products));
            }
            let mut rescale = [0.0f32; MAX_LANES];
            let state_vectors = (state.m, state.l);
            softmax::<S, 1>(simd, buffers.scores, mask_and_bias, (ROWS, false), state_vectors, rescale.as_mut_ptr());
            values::<S, L, ROWS>(simd, loader, &block_step, prefetcher, &rescale, buffers.scores);
        }
    }
}

/// Products of LANES / ROWS keys, from `first` on and E apart, with ROWS queries: `[key][row]` vectors whose lanes are
/// still to be summed.
///
/// # Safety
/// As [`BlockKernel::attend`].
#[inline(always)]
unsafe fn scores<S: Simd, L: KvLoader<S>, const ROWS: usize>(
    simd: S,
    loader: L,
    block_step: &BlockStep,
    prefetcher: &mut Prefetcher,
    first: usize,
) -> [S::V; MAX_LANES] {
    let keys = S::LANES / ROWS;
    let vector = S::LANES * S::ELEMENTS_PER_LANE;
    let row_stride = block_step.d.next_multiple_of(vector) / S::ELEMENTS_PER_LANE;
    let mut k = [std::ptr::null(); MAX_LANES];
    for (key, k) in k[..keys].iter_mut().enumerate() {
        *k = block_step.rows.k(first + key * S::ELEMENTS_PER_LANE);
    }
    let mut sums = [simd.splat(0.0); MAX_LANES];
    let by_two = if L::PREFERS_LOAD_2 { block_step.d / (2 * vector) * 2 * vector } else { 0 };
    let whole = block_step.d / vector * vector;
    let queries = |i: usize| (block_step.q.wrapping_add(i / S::ELEMENTS_PER_LANE), row_stride);
    // SAFETY: each iteration reads elements from i on of K rows and of queries, and i stays below d: whole vectors up
    // to `whole`, then what is left of the row.
    unsafe {
        for i in (0..by_two).step_by(2 * vector) {
            prefetcher.prefetch_in_pieces(2 * keys * vector * L::BYTES);
            for (key, row) in k[..keys].iter().enumerate() {
                let [x, y] = loader.load_2(simd, row.add(i * L::BYTES));
                add_products::<S, ROWS>(simd, x, key, queries(i), &mut sums);
                add_products::<S, ROWS>(simd, y, key, queries(i + vector), &mut sums);
            }
        }
        for i in (by_two..whole).step_by(vector) {
            prefetcher.prefetch_in_pieces(keys * vector * L::BYTES);
            for (key, row) in k[..keys].iter().enumerate() {
                let x = loader.load(simd, row.add(i * L::BYTES), vector);
                add_products::<S, ROWS>(simd, x, key, queries(i), &mut sums);
            }
        }
        if whole < block_step.d {
            for (key, row) in k[..keys].iter().enumerate() {
                let x = loader.load(simd, row.add(whole * L::BYTES), block_step.d - whole);
                add_products::<S, ROWS>(simd, x, key, queries(whole), &mut sums);
            }
        }
    }
    sums
}

/// Add the products of one vector of a key with the same elements of ROWS queries, whose rows are `row_stride` lanes
/// apart.
///
/// # Safety
/// From `q` on, each of ROWS queries has a vector.
#[inline(always)]
unsafe fn add_products<S: Simd, const ROWS: usize>(
    simd: S,
    x: S::V,
    key: usize,
    (q, row_stride): (*const f32, usize),
    sums: &mut [S::V; MAX_LANES],
) {
    for row in 0..ROWS {
        // SAFETY: row < ROWS, so this is the vector of one of the queries.
        let query = unsafe { simd.load(q.add(row * row_stride)) };
        sums[key * ROWS + row] = simd.dot(x, query, sums[key * ROWS + row]);
    }
}

/// `o[row] = o[row] * rescale[row] + sum over keys of p[key][row] * v[key]`, for as many vectors of columns at a time
/// as their sums fit into registers.
///
/// # Safety
/// As [`BlockKernel::attend`]; `p` is `[keys / E][ROWS]`.
#[inline(always)]
unsafe fn values<S: Simd, L: KvLoader<S>, const ROWS: usize>(
    simd: S,
    loader: L,
    block_step: &BlockStep,
    prefetcher: &mut Prefetcher,
    rescale: &[f32; MAX_LANES],
    p: *const f32,
) {
    let max_vectors = S::LANES / ROWS;
    let (dv, lanes) = (block_step.dv, S::LANES);
    let mut i = 0;
    while i < dv {
        let vectors = (dv - i) / lanes;
        // SAFETY: i < dv, and each call takes at most the vectors of columns that are left; the last may be a partial
        // one.
        unsafe {
            if max_vectors >= 8 && vectors >= 8 {
                value_columns::<S, L, ROWS, 8>(simd, loader, block_step, prefetcher, rescale, p, (i, lanes));
                i += 8 * lanes;
            } else if max_vectors >= 4 && vectors >= 4 {
                value_columns::<S, L, ROWS, 4>(simd, loader, block_step, prefetcher, rescale, p, (i, lanes));
                i += 4 * lanes;
            } else if vectors >= 2 {
                value_columns::<S, L, ROWS, 2>(simd, loader, block_step, prefetcher, rescale, p, (i, lanes));
                i += 2 * lanes;
            } else {
                let width = lanes.min(dv - i);
                value_columns::<S, L, ROWS, 1>(simd, loader, block_step, prefetcher, rescale, p, (i, width));
                i += lanes;
            }
        }
    }
}

/// [`values`] for NV vectors of columns from column `i` on, each of which has `width` columns.
///
/// # Safety
/// As [`values`].
#[inline(always)]
unsafe fn value_columns<S: Simd, L: KvLoader<S>, const ROWS: usize, const NV: usize>(
    simd: S,
    loader: L,
    block_step: &BlockStep,
    prefetcher: &mut Prefetcher,
    rescale: &[f32; MAX_LANES],
    p: *const f32,
    (i, width): (usize, usize),
) {
    let row_stride = block_step.dv.next_multiple_of(S::LANES);
    let o = block_step.state.o.wrapping_add(i);
    let mut sums = [[simd.splat(0.0); NV]; ROWS];
    // SAFETY: o is `[ROWS][row_stride]`, and the NV vectors from column i on lie in each row. The keys are those of the
    // block; `load_interleaved` reads `width` columns of their V rows, which have them.
    unsafe {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                let old = simd.load(o.add(row * row_stride + v * S::LANES));
                *sum = simd.mul(old, simd.splat(rescale[row]));
            }
        }
        for pair in 0..block_step.rows.block.len.div_ceil(S::ELEMENTS_PER_LANE) {
            // An odd last key is paired with itself: the padding of the block repeats it, and the p of the repetition
            // is 0.
            let key = pair * S::ELEMENTS_PER_LANE;
            let at = |key: usize| block_step.rows.v(key).wrapping_add(i * L::BYTES);
            let v_rows = (at(key), at(key + S::ELEMENTS_PER_LANE - 1));
            prefetcher.prefetch_in_pieces(NV * S::LANES * S::ELEMENTS_PER_LANE * L::BYTES);
            let mut x = [simd.splat(0.0); NV];
            for v in (0..NV).step_by(NV.min(4)) {
                let at = v * S::LANES * L::BYTES;
                let v_rows = (v_rows.0.wrapping_add(at), v_rows.1.wrapping_add(at));
                match NV {
                    1 => x[v] = loader.load_interleaved(simd, v_rows, width),
                    2 => x[v..v + 2].copy_from_slice(&loader.load_interleaved_2(simd, v_rows)),
                    _ => x[v..v + 4].copy_from_slice(&loader.load_interleaved_4(simd, v_rows)),
                }
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let weight = simd.splat(p.add(pair * ROWS + row).read());
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = simd.dot(x, weight, *sum);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                simd.store(o.add(row * row_stride + v * S::LANES), sum);
            }
        }
    }
}
