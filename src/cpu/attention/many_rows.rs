//! Attention of many query rows: a lane for each row.
//!
//! Rows are taken in panels (`state`): with W lanes in a panel, q is `[words of D][W]`, a block of scores `[keys][W]`, p
//! `[words of keys][W]` and o `[Dv][W]`; both products are register tiles of scalars times vectors, for which K and V
//! need no transposition, and the softmax needs no sum across lanes. K and V of a block are made words once for all
//! panels (`stage`).

use super::block_step::{BlockStep, Buffers, RowKernel};
use super::keys::{Ahead, BLOCK};
use super::score::{Edits, Steps};
use super::softmax::softmax;
use super::stage::stage;
use super::state::PANEL;
use crate::cpu::micro_kernel::{Scalars, Vectors, store_rows, tile};
use crate::cpu::simd::{MAX_LANES, Simd};
use std::ops::Range;

/// The kernel for [`super::plan::Arrangement::RowPerLane`].
pub(super) struct ManyRows;

impl<S: Simd> RowKernel<S> for ManyRows {
    const KEYS: usize = BLOCK / 2 * S::ELEMENTS_PER_LANE;

    #[inline(always)]
    unsafe fn attend(simd: S, block_step: BlockStep, ahead: &mut Ahead, buffers: Buffers) {
        let (lanes, rows) = (block_step.state.lanes, block_step.rows);
        let panels = lanes.div_ceil(PANEL * S::LANES);
        // A little with each register tile, so that asking for more than the processor keeps open stops nothing.
        let tiles = (rows.block.len + block_step.dv).div_ceil(S::MR);
        let share = ahead.share(panels * tiles);
        // SAFETY: rows, state, lanes and buffers are the item's by this function's contract; panels are whole vectors of its
        // lanes, and their block is staged.
        unsafe {
            stage(simd, &block_step, buffers);
            for panel in 0..panels {
                let lane = panel * PANEL * S::LANES;
                let ahead = (&mut *ahead, share);
                match (lanes - lane > S::LANES, S::MR) {
                    (true, 4) => attend_panel::<S, 2, 4>(simd, &block_step, lane, ahead, buffers),
                    (true, _) => attend_panel::<S, 2, 8>(simd, &block_step, lane, ahead, buffers),
                    (false, 4) => attend_panel::<S, 1, 4>(simd, &block_step, lane, ahead, buffers),
                    (false, _) => attend_panel::<S, 1, 8>(simd, &block_step, lane, ahead, buffers),
                }
            }
        }
    }
}

/// The panel of lanes from `lane` on against the block, whose K and V stand in the buffers.
///
/// # Safety
/// As [`RowKernel::attend`]; `lane` is the first of a panel of NV vectors.
#[inline(always)]
unsafe fn attend_panel<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    block_step: &BlockStep,
    lane: usize,
    (ahead, share): (&mut Ahead, usize),
    buffers: Buffers,
) {
    let BlockStep { rows, state, d, dv, .. } = *block_step;
    let (width, first) = (NV * S::LANES, rows.block.first);
    let lanes = lane..lane + width;
    let seen = block_step.lanes.seen_by_any(&lanes, first, rows.block.len);
    if seen.is_empty() {
        return;
    }
    // Whole words of keys.
    let keys =
        seen.start / S::ELEMENTS_PER_LANE * S::ELEMENTS_PER_LANE..seen.end.next_multiple_of(S::ELEMENTS_PER_LANE);
    let edits = Edits {
        form: block_step.form,
        steps: Steps { count: keys.len(), first: keys.start, alternating: 1, stride: 1 },
        lanes: block_step.lanes,
        lane,
        head: block_step.head,
        first,
        masked: !block_step.lanes.seen_by_all(&lanes, first, &keys),
    };
    // SAFETY: keys of the block, lanes of the panel.
    unsafe {
        let q = block_step.q.add(lane * d / S::ELEMENTS_PER_LANE);
        let largest = scores::<S, NV, MR>(simd, q, d / S::ELEMENTS_PER_LANE, &keys, (ahead, share), buffers);
        let p = buffers.scores.add(keys.start * width);
        let mut keep = [0.0f32; PANEL * MAX_LANES];
        for (v, largest) in largest.into_iter().enumerate() {
            simd.store(keep.as_mut_ptr().add(v * S::LANES), largest);
        }
        // What tiles have seen, unless they saw other keys too.
        let known = keys.start.is_multiple_of(MR) && keys.end.is_multiple_of(MR);
        let state_of_lane = (state.m.add(lane), state.l.add(lane));
        softmax::<S, NV>(simd, p, edits, (S::LANES, known), state_of_lane, keep.as_mut_ptr());
        values::<S, NV, MR>(simd, state.o.add(lane * dv), dv, &keys, (ahead, share), buffers, &keep);
    }
}

/// `scores[j][row] = k[j] . q[row]`, for whole tiles that cover `keys`, and the largest of each row; a block's buffer has
/// room for whole tiles.
///
/// # Safety
/// `q` is a panel `[words][W]`, the buffers are a block's.
#[inline(always)]
unsafe fn scores<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    q: *const f32,
    words: usize,
    keys: &Range<usize>,
    (ahead, share): (&mut Ahead, usize),
    buffers: Buffers,
) -> [S::V; NV] {
    let (width, mut largest) = (NV * S::LANES, [simd.splat(f32::NEG_INFINITY); NV]);
    for j in (keys.start / MR * MR..keys.end).step_by(MR) {
        ahead.ask_for(share);
        // SAFETY: keys j to j + MR of the buffers.
        unsafe {
            let scalars = Scalars { from: buffers.k.add(j * words), row: words, step: 1 };
            let q = Vectors { from: q, step: width };
            let products = tile(simd, scalars, q, words, [[simd.splat(0.0); NV]; MR]);
            store_rows(simd, buffers.scores.add(j * width), width, products);
            for row in products {
                for (v, largest) in largest.iter_mut().enumerate() {
                    // NaN first, see `softmax`.
                    *largest = simd.max(row[v], *largest);
                }
            }
        }
    }
    largest
}

/// `o[i][row] = o[i][row] * keep[row] + sum over keys of v[j][i] * p[j][row]`
///
/// # Safety
/// `o` is a panel `[Dv][W]`, the buffers are a block's.
#[inline(always)]
unsafe fn values<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    o: *mut f32,
    dv: usize,
    keys: &Range<usize>,
    (ahead, share): (&mut Ahead, usize),
    buffers: Buffers,
    keep: &[f32; PANEL * MAX_LANES],
) {
    let width = NV * S::LANES;
    let mut kept = [simd.splat(0.0); NV];
    for (v, kept) in kept.iter_mut().enumerate() {
        // SAFETY: vector v < NV <= PANEL.
        *kept = unsafe { simd.load(keep.as_ptr().add(v * S::LANES)) };
    }
    for i in (0..dv).step_by(MR) {
        ahead.ask_for(share);
        // SAFETY: elements i to i + MR of dv, keys of the block.
        unsafe {
            let o = o.add(i * width);
            let mut sums = [[simd.splat(0.0); NV]; MR];
            for (r, row) in sums.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = simd.mul(simd.load(o.add(r * width + v * S::LANES)), kept[v]);
                }
            }
            let first = (i * BLOCK + keys.start * MR) / S::ELEMENTS_PER_LANE;
            let scalars = Scalars { from: buffers.v.add(first), row: 1, step: MR };
            let p = Vectors { from: buffers.scores.add(keys.start * width), step: width };
            store_rows(simd, o, width, tile(simd, scalars, p, keys.len() / S::ELEMENTS_PER_LANE, sums));
        }
    }
}
