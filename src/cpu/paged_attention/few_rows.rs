//! Attention of few query rows, decode above all: vectors along the head dimension, read straight from the cache.
//!
//! ROWS rows (padded to a power of two) meet LANES / ROWS keys at a time, so that the sums of one such tile are as many
//! as a vector has lanes and are reduced together. Scores are `[keys][ROWS]`, seen by the softmax as vectors whose lane
//! is (key, row); q and o are `[ROWS][D padded to whole vectors]`.

use super::item::{Buffers, RowKernel, State, Visit};
use super::keys::Ahead;
use super::softmax::{Mask, exponentials, largest, merge_factors};
use crate::cpu::element::{Element, load_first};
use crate::cpu::simd::{MAX_LANES, Simd};

/// The kernel for [`super::plan::Arrangement::VectorPerRow`] of so many rows, at most half of LANES.
pub(super) struct FewRows<const ROWS: usize>;

impl<S: Simd, T: Element, const ROWS: usize> RowKernel<S, T> for FewRows<ROWS> {
    const BLOCK: usize = 32;

    #[inline(always)]
    fn row_of_lane(lane: usize) -> usize {
        lane % ROWS
    }

    #[inline(always)]
    fn key_of_lane(lane: usize) -> usize {
        lane / ROWS
    }

    #[inline(always)]
    unsafe fn place_query(q: *mut f32, _: usize, d: usize, row: usize, from: *const f32) {
        // SAFETY: row < ROWS; the padding behind d keeps its zeros.
        unsafe { std::ptr::copy_nonoverlapping(from, q.add(row * d.next_multiple_of(S::LANES)), d) }
    }

    #[inline(always)]
    unsafe fn take_output(o: *const f32, _: usize, d: usize, row: usize, to: *mut f32) {
        // SAFETY: row < ROWS.
        unsafe { std::ptr::copy_nonoverlapping(o.add(row * d.next_multiple_of(S::LANES)), to, d) }
    }

    #[inline(always)]
    unsafe fn sum_of_row(l: *const f32, _: usize, row: usize) -> f32 {
        // SAFETY: lane (key, row).
        (0..S::LANES / ROWS).map(|key| unsafe { l.add(key * ROWS + row).read() }).sum()
    }

    #[inline(always)]
    unsafe fn attend(simd: S, visit: Visit<T>, ahead: &mut Ahead<T>, buffers: &mut Buffers) {
        let Visit { rows, state, ranges, form, .. } = visit;
        let keys = S::LANES / ROWS;
        let steps = rows.block.len.div_ceil(keys);
        // SAFETY: the caller's word; the scores have room for whole steps.
        unsafe {
            for step in 0..steps {
                let sums = scores::<S, T, ROWS>(simd, &visit, ahead, step * keys);
                simd.store(buffers.scores.add(step * S::LANES), simd.sum_each(sums));
            }
            let mask = if ranges.seen_by_all(&(0..S::LANES), rows.block.first, &(0..steps * keys)) {
                None
            } else {
                let (low, high) = ranges.relative(simd, 0, rows.block.first);
                Some(Mask { low: [low], high: [high], first: 0.0, stride: keys as f32 })
            };
            let highest = largest::<S, 1>(simd, buffers.scores, steps, form, mask);
            let highest = over_keys::<S, ROWS>(simd, highest[0]);
            let keep = exponentials(simd, buffers.scores, steps, form, [highest], state.m, state.l);
            let mut factors = [0.0f32; MAX_LANES];
            simd.store(factors.as_mut_ptr(), keep[0]);
            values::<S, T, ROWS>(simd, &visit, ahead, &factors, buffers.scores);
        }
    }

    #[inline(always)]
    unsafe fn merge(simd: S, total: State, part: State, d: usize) {
        let padded = d.next_multiple_of(S::LANES);
        let (mut keep, mut add) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
        // SAFETY: both states have one vector of m and l, and [ROWS][padded] of o.
        unsafe {
            let (k, a) = merge_factors(simd, (total.m, total.l), (part.m.cast_const(), part.l.cast_const()));
            simd.store(keep.as_mut_ptr(), k);
            simd.store(add.as_mut_ptr(), a);
            for row in 0..ROWS {
                let (keep, add) = (simd.splat(keep[row]), simd.splat(add[row]));
                for at in (row * padded..(row + 1) * padded).step_by(S::LANES) {
                    let sum = simd.mul(simd.load(total.o.add(at)), keep);
                    simd.store(total.o.add(at), simd.fma(simd.load(part.o.add(at)), add, sum));
                }
            }
        }
    }
}

/// Products of LANES / ROWS keys from `first` on with ROWS queries, not yet summed over lanes; index
/// `key * ROWS + row`.
///
/// # Safety
/// As [`RowKernel::attend`].
#[inline(always)]
unsafe fn scores<S: Simd, T: Element, const ROWS: usize>(
    simd: S,
    visit: &Visit<T>,
    ahead: &mut Ahead<T>,
    first: usize,
) -> [S::V; MAX_LANES] {
    let keys = S::LANES / ROWS;
    let padded = visit.d.next_multiple_of(S::LANES);
    let mut k = [std::ptr::null(); MAX_LANES];
    for (key, k) in k[..keys].iter_mut().enumerate() {
        *k = visit.rows.k(first + key);
    }
    let mut sums = [simd.splat(0.0); MAX_LANES];
    for i in (0..visit.d).step_by(S::LANES) {
        let mut queries = [simd.splat(0.0); ROWS];
        for (row, query) in queries.iter_mut().enumerate() {
            // SAFETY: vector i of row `row`, padded.
            *query = unsafe { simd.load(visit.q.add(row * padded + i)) };
        }
        ahead.advance(keys * S::LANES);
        for key in 0..keys {
            // SAFETY: min(LANES, d - i) elements of a K row.
            let x = unsafe { load_up_to(simd, k[key].add(i), visit.d - i) };
            for row in 0..ROWS {
                sums[key * ROWS + row] = simd.fma(x, queries[row], sums[key * ROWS + row]);
            }
        }
    }
    sums
}

/// `o[row] = o[row] * keep[row] + sum over keys of p[key][row] * v[key]`, as many columns at a time as there are
/// registers for.
///
/// # Safety
/// As [`RowKernel::attend`]; `p` is `[keys][ROWS]`.
#[inline(always)]
unsafe fn values<S: Simd, T: Element, const ROWS: usize>(
    simd: S,
    visit: &Visit<T>,
    ahead: &mut Ahead<T>,
    keep: &[f32; MAX_LANES],
    p: *const f32,
) {
    let most = S::LANES / ROWS;
    let mut i = 0;
    while i < visit.d {
        let columns = (visit.d - i) / S::LANES;
        // SAFETY: columns i.. of d; the last may be half a vector, which only one column at a time allows for.
        unsafe {
            if most >= 8 && columns >= 8 {
                value_columns::<S, T, ROWS, 8>(simd, visit, ahead, keep, p, i);
                i += 8 * S::LANES;
            } else if most >= 4 && columns >= 4 {
                value_columns::<S, T, ROWS, 4>(simd, visit, ahead, keep, p, i);
                i += 4 * S::LANES;
            } else if columns >= 2 {
                value_columns::<S, T, ROWS, 2>(simd, visit, ahead, keep, p, i);
                i += 2 * S::LANES;
            } else {
                value_columns::<S, T, ROWS, 1>(simd, visit, ahead, keep, p, i);
                i += S::LANES;
            }
        }
    }
}

/// [`values`] for `COLUMNS` vectors from element `i` on.
///
/// # Safety
/// As [`values`].
#[inline(always)]
unsafe fn value_columns<S: Simd, T: Element, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    visit: &Visit<T>,
    ahead: &mut Ahead<T>,
    keep: &[f32; MAX_LANES],
    p: *const f32,
    i: usize,
) {
    let padded = visit.d.next_multiple_of(S::LANES);
    let o = visit.state.o.wrapping_add(i);
    let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
    // SAFETY: vectors of [ROWS][padded], keys of the block, elements of V rows.
    unsafe {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (column, sum) in sums.iter_mut().enumerate() {
                let old = simd.load(o.add(row * padded + column * S::LANES));
                *sum = simd.mul(old, simd.splat(keep[row]));
            }
        }
        for key in 0..visit.rows.block.len {
            let v = visit.rows.v(key).add(i);
            ahead.advance(COLUMNS * S::LANES);
            let mut x = [simd.splat(0.0); COLUMNS];
            for (column, x) in x.iter_mut().enumerate() {
                *x = load_up_to(simd, v.add(column * S::LANES), visit.d - i - column * S::LANES);
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let weight = simd.splat(p.add(key * ROWS + row).read());
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = simd.fma(x, weight, *sum);
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

/// A vector, or the first `left` elements and zeros.
///
/// # Safety
/// `from` has `min(LANES, left)` readable elements.
#[inline(always)]
unsafe fn load_up_to<S: Simd, T: Element>(simd: S, from: *const T, left: usize) -> S::V {
    // SAFETY: the caller's word.
    unsafe { if left >= S::LANES { T::load(simd, from) } else { load_first(simd, from, left) } }
}

/// The largest of all lanes of the same row, in all of them.
#[inline(always)]
fn over_keys<S: Simd, const ROWS: usize>(simd: S, x: S::V) -> S::V {
    let mut lanes = [0.0f32; MAX_LANES];
    // SAFETY: LANES <= MAX_LANES.
    unsafe { simd.store(lanes.as_mut_ptr(), x) };
    for lane in ROWS..S::LANES {
        lanes[lane % ROWS] = lanes[lane % ROWS].max(lanes[lane]);
    }
    for lane in ROWS..S::LANES {
        lanes[lane] = lanes[lane % ROWS];
    }
    // SAFETY: as above.
    unsafe { simd.load(lanes.as_ptr()) }
}
