//! Attention of many query rows: a lane for each row.
//!
//! Rows are taken in panels of two vectors (the last may have one). With W lanes in a panel, q is `[D][W]`, a block of
//! scores `[keys][W]` and o `[D][W]`; both products are register tiles of scalars times vectors, for which K and V
//! need no transposition, and the softmax needs no sum across lanes. K and V of a block are widened to f32 once for
//! all panels: K as `[keys][D]`, V as `[D / TILE][keys][TILE]`, which is how the tiles walk.

use super::item::{Buffers, RowKernel, State, Visit};
use super::keys::{Ahead, BLOCK, HeadRows};
use super::softmax::{Mask, exponentials, largest, merge_factors};
use crate::cpu::element::{Element, widen};
use crate::cpu::simd::Simd;
use std::ops::Range;

/// Vectors of a panel.
const PANEL: usize = 2;

/// The kernel for [`super::plan::Arrangement::RowPerLane`].
pub(super) struct ManyRows;

impl<S: Simd, T: Element> RowKernel<S, T> for ManyRows {
    const BLOCK: usize = BLOCK;

    #[inline(always)]
    fn row_of_lane(lane: usize) -> usize {
        lane
    }

    #[inline(always)]
    fn key_of_lane(_: usize) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn place_query(q: *mut f32, lanes: usize, d: usize, row: usize, from: *const f32) {
        let (base, width) = panel_of_row::<S>(lanes, row);
        for i in 0..d {
            // SAFETY: element (i, row - base) of the panel, within lanes * d.
            unsafe { q.add(base * d + i * width + row - base).write(from.add(i).read()) }
        }
    }

    #[inline(always)]
    unsafe fn take_output(o: *const f32, lanes: usize, d: usize, row: usize, to: *mut f32) {
        let (base, width) = panel_of_row::<S>(lanes, row);
        for i in 0..d {
            // SAFETY: as in `place_query`.
            unsafe { to.add(i).write(o.add(base * d + i * width + row - base).read()) }
        }
    }

    #[inline(always)]
    unsafe fn sum_of_row(l: *const f32, _: usize, row: usize) -> f32 {
        // SAFETY: row < lanes.
        unsafe { l.add(row).read() }
    }

    #[inline(always)]
    unsafe fn attend(simd: S, visit: Visit<T>, ahead: &mut Ahead<T>, buffers: &mut Buffers) {
        let (d, lanes) = (visit.d, visit.state.lanes);
        let panels = lanes.div_ceil(PANEL * S::LANES);
        // SAFETY: the caller's word.
        unsafe {
            widen_block(simd, visit.rows, d, buffers);
            for panel in 0..panels {
                for _ in 0..BLOCK.div_ceil(panels) {
                    // A K row and a V row.
                    ahead.advance(d);
                    ahead.advance(d);
                }
                let lane = panel * PANEL * S::LANES;
                match (lanes - lane > S::LANES, S::TILE) {
                    (true, 4) => attend_panel::<S, T, 2, 4>(simd, &visit, lane, buffers),
                    (true, _) => attend_panel::<S, T, 2, 8>(simd, &visit, lane, buffers),
                    (false, 4) => attend_panel::<S, T, 1, 4>(simd, &visit, lane, buffers),
                    (false, _) => attend_panel::<S, T, 1, 8>(simd, &visit, lane, buffers),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn merge(simd: S, total: State, part: State, d: usize) {
        for lane in (0..total.lanes).step_by(S::LANES) {
            let (base, width) = panel_of_row::<S>(total.lanes, lane);
            // SAFETY: vector `lane` of both states, then its column of both panels.
            unsafe {
                let of = |s: State| (s.m.add(lane), s.l.add(lane));
                let (m, l) = of(part);
                let (keep, add) = merge_factors(simd, of(total), (m.cast_const(), l.cast_const()));
                for i in 0..d {
                    let at = base * d + i * width + lane - base;
                    let sum = simd.mul(simd.load(total.o.add(at)), keep);
                    simd.store(total.o.add(at), simd.fma(simd.load(part.o.add(at)), add, sum));
                }
            }
        }
    }
}

/// First lane and width of the panel that has this lane.
#[inline(always)]
fn panel_of_row<S: Simd>(lanes: usize, lane: usize) -> (usize, usize) {
    let full = PANEL * S::LANES;
    let base = lane / full * full;
    (base, full.min(lanes - base))
}

/// K and V of the block, widened.
///
/// # Safety
/// The rows are readable; the buffers have room for [`BLOCK`] keys.
#[inline(always)]
unsafe fn widen_block<S: Simd, T: Element>(simd: S, rows: HeadRows<T>, d: usize, buffers: &mut Buffers) {
    let mut row = [0.0f32; 256];
    for j in 0..rows.block.len {
        // SAFETY: key j of the block; d <= 256 is a multiple of TILE.
        unsafe {
            widen(simd, rows.k(j), buffers.k.add(j * d), d);
            widen(simd, rows.v(j), row.as_mut_ptr(), d);
            for tile in 0..d / S::TILE {
                let to = buffers.v.add((tile * BLOCK + j) * S::TILE);
                std::ptr::copy_nonoverlapping(row.as_ptr().add(tile * S::TILE), to, S::TILE);
            }
        }
    }
}

/// The panel of lanes from `lane` on against the block, whose K and V stand widened in the buffers.
///
/// # Safety
/// As [`RowKernel::attend`].
#[inline(always)]
unsafe fn attend_panel<S: Simd, T: Element, const NV: usize, const TILE: usize>(
    simd: S,
    visit: &Visit<T>,
    lane: usize,
    buffers: &mut Buffers,
) {
    let Visit { rows, ranges, form, state, d, .. } = *visit;
    let (width, first) = (NV * S::LANES, rows.block.first);
    let lanes = lane..lane + width;
    let keys = ranges.seen_by_any(&lanes, first, rows.block.len);
    if keys.is_empty() {
        return;
    }
    // SAFETY: keys of the block, lanes of the panel.
    unsafe {
        scores::<S, NV, TILE>(simd, visit.q.add(lane * d), d, &keys, buffers);
        let p = buffers.scores.add(keys.start * width);
        let mask = if ranges.seen_by_all(&lanes, first, &keys) {
            None
        } else {
            let (mut low, mut high) = ([simd.splat(0.0); NV], [simd.splat(0.0); NV]);
            for v in 0..NV {
                (low[v], high[v]) = ranges.relative(simd, lane + v * S::LANES, first);
            }
            Some(Mask { low, high, first: keys.start as f32, stride: 1.0 })
        };
        let highest = largest(simd, p, keys.len(), form, mask);
        let keep = exponentials(simd, p, keys.len(), form, highest, state.m.add(lane), state.l.add(lane));
        values::<S, NV, TILE>(simd, state.o.add(lane * d), d, &keys, buffers, keep);
    }
}

/// `scores[j][row] = k[j] . q[row]`, for whole tiles that cover `keys`; a block's buffer has room for whole tiles.
///
/// # Safety
/// `q` is a panel `[D][W]`, the buffers are a block's.
#[inline(always)]
unsafe fn scores<S: Simd, const NV: usize, const TILE: usize>(
    simd: S,
    q: *const f32,
    d: usize,
    keys: &Range<usize>,
    buffers: &mut Buffers,
) {
    for j in (keys.start / TILE * TILE..keys.end).step_by(TILE) {
        // SAFETY: keys j to j + TILE of the buffers.
        unsafe {
            let scalars = Scalars { from: buffers.k.add(j * d), row: d, step: 1 };
            let products = tile(simd, scalars, q, d, [[simd.splat(0.0); NV]; TILE]);
            store_rows(simd, buffers.scores.add(j * NV * S::LANES), products);
        }
    }
}

/// `o[i][row] = o[i][row] * keep[row] + sum over keys of v[j][i] * p[j][row]`
///
/// # Safety
/// `o` is a panel `[D][W]`, the buffers are a block's.
#[inline(always)]
unsafe fn values<S: Simd, const NV: usize, const TILE: usize>(
    simd: S,
    o: *mut f32,
    d: usize,
    keys: &Range<usize>,
    buffers: &mut Buffers,
    keep: [S::V; NV],
) {
    let width = NV * S::LANES;
    for i in (0..d).step_by(TILE) {
        // SAFETY: elements i to i + TILE of d, keys of the block.
        unsafe {
            let o = o.add(i * width);
            let mut sums = [[simd.splat(0.0); NV]; TILE];
            for (r, row) in sums.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = simd.mul(simd.load(o.add(r * width + v * S::LANES)), keep[v]);
                }
            }
            let scalars = Scalars { from: buffers.v.add(i * BLOCK + keys.start * TILE), row: 1, step: TILE };
            let p = buffers.scores.add(keys.start * width);
            store_rows(simd, o, tile(simd, scalars, p, keys.len(), sums));
        }
    }
}

/// The scalar operand of a register tile: element (row, step) is `from[row * self.row + step * self.step]`.
#[derive(Clone, Copy)]
struct Scalars {
    from: *const f32,
    row: usize,
    step: usize,
}

/// `sums[r] += sum over steps of scalar (r, step) * vectors[step]`, with `vectors` as `[steps][NV]`.
///
/// # Safety
/// All scalars and vectors are readable.
#[inline(always)]
unsafe fn tile<S: Simd, const NV: usize, const TILE: usize>(
    simd: S,
    scalars: Scalars,
    vectors: *const f32,
    steps: usize,
    mut sums: [[S::V; NV]; TILE],
) -> [[S::V; NV]; TILE] {
    for step in 0..steps {
        // SAFETY: step < steps, r < TILE, v < NV.
        unsafe {
            let mut b = [simd.splat(0.0); NV];
            for (v, b) in b.iter_mut().enumerate() {
                *b = simd.load(vectors.add((step * NV + v) * S::LANES));
            }
            for (r, row) in sums.iter_mut().enumerate() {
                let a = simd.splat(scalars.from.add(r * scalars.row + step * scalars.step).read());
                for (sum, b) in row.iter_mut().zip(b) {
                    *sum = simd.fma(a, b, *sum);
                }
            }
        }
    }
    sums
}

/// # Safety
/// `to` has room for `[TILE][NV]` vectors.
#[inline(always)]
unsafe fn store_rows<S: Simd, const NV: usize, const TILE: usize>(simd: S, to: *mut f32, rows: [[S::V; NV]; TILE]) {
    for (r, row) in rows.into_iter().enumerate() {
        for (v, x) in row.into_iter().enumerate() {
            // SAFETY: vector (r, v).
            unsafe { simd.store(to.add((r * NV + v) * S::LANES), x) }
        }
    }
}
