//! Attention of few query rows, decode above all: vectors along the head dimension, read straight from the cache.
//!
//! ROWS rows (padded to a power of two) meet LANES / ROWS keys at a time, so that the sums of one such step are as many
//! as a vector has lanes and are reduced together; the softmax sees vectors whose lane is (key, row). Where a word holds
//! two elements, neighbouring keys belong to neighbouring steps, so that p of both becomes one word: p is
//! `[words of keys][ROWS]`. q is `[ROWS][words of D]` and o `[ROWS][Dv]`, padded to whole vectors.

use super::block_step::{BlockStep, Buffers, RowKernel};
use super::keys::{Ahead, PADDING};
use super::score::{Edits, Steps};
use super::softmax::softmax;
use super::sources::Source;
use crate::cpu::simd::{MAX_LANES, Simd};
use std::marker::PhantomData;

/// The kernel for [`super::plan::Arrangement::VectorPerRow`] of so many rows, at most half of LANES, over K and V of
/// source T.
pub(super) struct FewRows<T, const ROWS: usize>(PhantomData<T>);

impl<S: Simd, T: Source<S>, const ROWS: usize> RowKernel<S> for FewRows<T, ROWS> {
    // What is read and what is asked for meanwhile are to share the second level of cache.
    const KEYS: usize = if T::BYTES < 4 { 2 * PADDING } else { PADDING };

    #[inline(always)]
    unsafe fn attend(simd: S, block_step: BlockStep, ahead: &mut Ahead, buffers: Buffers) {
        let BlockStep { rows, state, lanes, .. } = block_step;
        // A word of keys for each row fills as many vectors as a word has elements.
        let keys = S::LANES / ROWS * S::ELEMENTS_PER_LANE;
        let first = rows.block.first;
        let (words, padded_len) = (rows.block.len.div_ceil(keys), rows.block.len.next_multiple_of(keys));
        let edits = Edits {
            form: block_step.form,
            steps: Steps {
                count: words * S::ELEMENTS_PER_LANE,
                first: 0,
                alternating: S::ELEMENTS_PER_LANE,
                stride: keys,
            },
            lanes,
            lane: 0,
            head: block_step.head,
            first,
            masked: !lanes.seen_by_all(&(0..S::LANES), first, &(0..padded_len)),
        };
        let source = T::new(simd, block_step.kv_dtype);
        // SAFETY: the block has addresses for whole steps of keys, the buffer of scores room for them; m, l and `keep` are one
        // vector each.
        unsafe {
            for step in 0..edits.steps.count {
                let key = step / S::ELEMENTS_PER_LANE * keys + step % S::ELEMENTS_PER_LANE;
                let sums = scores::<S, T, ROWS>(simd, source, &block_step, ahead, key);
                simd.store(buffers.scores.add(step * S::LANES), simd.horizontal_sums(sums));
            }
            let mut keep = [0.0f32; MAX_LANES];
            softmax::<S, 1>(simd, buffers.scores, edits, (ROWS, false), (state.m, state.l), keep.as_mut_ptr());
            values::<S, T, ROWS>(simd, source, &block_step, ahead, &keep, buffers.scores);
        }
    }
}

/// Products of `LANES / ROWS` keys, from `first` on and `ELEMENTS_PER_LANE` apart, with ROWS queries, not yet summed over lanes; index
/// `key * ROWS + row`.
///
/// # Safety
/// As [`RowKernel::attend`].
#[inline(always)]
unsafe fn scores<S: Simd, T: Source<S>, const ROWS: usize>(
    simd: S,
    source: T,
    block_step: &BlockStep,
    ahead: &mut Ahead,
    first: usize,
) -> [S::V; MAX_LANES] {
    let keys = S::LANES / ROWS;
    let vector = S::LANES * S::ELEMENTS_PER_LANE;
    let padded = block_step.d.next_multiple_of(vector) / S::ELEMENTS_PER_LANE;
    let mut k = [std::ptr::null(); MAX_LANES];
    for (key, k) in k[..keys].iter_mut().enumerate() {
        *k = block_step.rows.k(first + key * S::ELEMENTS_PER_LANE);
    }
    let mut sums = [simd.splat(0.0); MAX_LANES];
    let twice = if T::TWICE { block_step.d / (2 * vector) * 2 * vector } else { 0 };
    let whole = block_step.d / vector * vector;
    let queries = |i: usize| (block_step.q.wrapping_add(i / S::ELEMENTS_PER_LANE), padded);
    // SAFETY: elements i to d of K rows and queries.
    unsafe {
        for i in (0..twice).step_by(2 * vector) {
            ahead.advance(2 * keys * vector * T::BYTES);
            for (key, row) in k[..keys].iter().enumerate() {
                let [x, y] = source.words_twice(simd, row.add(i * T::BYTES));
                add_products::<S, ROWS>(simd, x, key, queries(i), &mut sums);
                add_products::<S, ROWS>(simd, y, key, queries(i + vector), &mut sums);
            }
        }
        for i in (twice..whole).step_by(vector) {
            ahead.advance(keys * vector * T::BYTES);
            for (key, row) in k[..keys].iter().enumerate() {
                let x = source.words(simd, row.add(i * T::BYTES), vector);
                add_products::<S, ROWS>(simd, x, key, queries(i), &mut sums);
            }
        }
        if whole < block_step.d {
            for (key, row) in k[..keys].iter().enumerate() {
                let x = source.words(simd, row.add(whole * T::BYTES), block_step.d - whole);
                add_products::<S, ROWS>(simd, x, key, queries(whole), &mut sums);
            }
        }
    }
    sums
}

/// Add the products of a vector of words of one key with those of ROWS queries, which are `padded` words apart.
///
/// # Safety
/// From `q` on, each of ROWS queries has a vector.
#[inline(always)]
unsafe fn add_products<S: Simd, const ROWS: usize>(
    simd: S,
    x: S::V,
    key: usize,
    (q, padded): (*const f32, usize),
    sums: &mut [S::V; MAX_LANES],
) {
    for row in 0..ROWS {
        // SAFETY: row < ROWS.
        let query = unsafe { simd.load(q.add(row * padded)) };
        sums[key * ROWS + row] = simd.dot(x, query, sums[key * ROWS + row]);
    }
}

/// `o[row] = o[row] * keep[row] + sum over keys of p[key][row] * v[key]`, as many columns at a time as there are
/// registers for.
///
/// # Safety
/// As [`RowKernel::attend`]; `p` is `[words of keys][ROWS]`.
#[inline(always)]
unsafe fn values<S: Simd, T: Source<S>, const ROWS: usize>(
    simd: S,
    source: T,
    block_step: &BlockStep,
    ahead: &mut Ahead,
    keep: &[f32; MAX_LANES],
    p: *const f32,
) {
    let most = S::LANES / ROWS;
    let (dv, lanes) = (block_step.dv, S::LANES);
    let mut i = 0;
    while i < dv {
        let columns = (dv - i) / lanes;
        // SAFETY: columns i.. of dv; the last vector may be a part of one.
        unsafe {
            if most >= 8 && columns >= 8 {
                value_columns::<S, T, ROWS, 8>(simd, source, block_step, ahead, keep, p, (i, lanes));
                i += 8 * lanes;
            } else if most >= 4 && columns >= 4 {
                value_columns::<S, T, ROWS, 4>(simd, source, block_step, ahead, keep, p, (i, lanes));
                i += 4 * lanes;
            } else if columns >= 2 {
                value_columns::<S, T, ROWS, 2>(simd, source, block_step, ahead, keep, p, (i, lanes));
                i += 2 * lanes;
            } else {
                value_columns::<S, T, ROWS, 1>(simd, source, block_step, ahead, keep, p, (i, lanes.min(dv - i)));
                i += lanes;
            }
        }
    }
}

/// [`values`] for `COLUMNS` vectors from column `i` on, each of which has `width` columns.
///
/// # Safety
/// As [`values`].
#[inline(always)]
unsafe fn value_columns<S: Simd, T: Source<S>, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    source: T,
    block_step: &BlockStep,
    ahead: &mut Ahead,
    keep: &[f32; MAX_LANES],
    p: *const f32,
    (i, width): (usize, usize),
) {
    let padded = block_step.dv.next_multiple_of(S::LANES);
    let o = block_step.state.o.wrapping_add(i);
    let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
    // SAFETY: vectors of [ROWS][padded], keys of the block, elements of V rows.
    unsafe {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (column, sum) in sums.iter_mut().enumerate() {
                let old = simd.load(o.add(row * padded + column * S::LANES));
                *sum = simd.mul(old, simd.splat(keep[row]));
            }
        }
        for word in 0..block_step.rows.block.len.div_ceil(S::ELEMENTS_PER_LANE) {
            // The partner of a last key without one is that key again, with a p of 0.
            let key = word * S::ELEMENTS_PER_LANE;
            let at = |key: usize| block_step.rows.v(key).wrapping_add(i * T::BYTES);
            let v = (at(key), at(key + 1));
            ahead.advance(COLUMNS * S::LANES * S::ELEMENTS_PER_LANE * T::BYTES);
            let mut x = [simd.splat(0.0); COLUMNS];
            for column in (0..COLUMNS).step_by(if COLUMNS.is_multiple_of(4) { 4 } else { 1 }) {
                let at = column * S::LANES * T::BYTES;
                let v = (v.0.wrapping_add(at), v.1.wrapping_add(at));
                if COLUMNS.is_multiple_of(4) {
                    x[column..column + 4].copy_from_slice(&source.columns_4(simd, v));
                } else {
                    x[column] = source.columns(simd, v, width);
                }
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let weight = simd.splat(p.add(word * ROWS + row).read());
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = simd.dot(x, weight, *sum);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (column, sum) in sums.into_iter().enumerate() {
                simd.store(o.add(row * padded + column * S::LANES), sum);
            }
        }
    }
}
