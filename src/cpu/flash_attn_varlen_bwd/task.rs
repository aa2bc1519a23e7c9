//! Runs one task of the plan: steps through the keys of a work tile block by block, and for each block through the
//! tile's rows, a micro-panel at a time.

use super::kv_block::{KvBlock, clear_gradients, scale_row};
use super::packing::row_stride;
use super::plan::{BwdPlan, BwdTask, BwdTile, KEYS};
use super::query_panel::{MAX_ROWS, QueryPanel};
use super::softmax_bwd::SoftmaxBwd;
use crate::cpu::aligned::AlignedBuffer;
use crate::cpu::attention::score::ScaleAndCap;
use crate::cpu::attention::sequences::Window;
use crate::cpu::element_rows::narrow_row;
use crate::cpu::micro_kernel::{BroadcastOperand, VectorOperand, load_rows, micro_kernel, store_rows};
use crate::cpu::simd::{Simd, SimdKernel};
use crate::error::Result;
use crate::problem::MAX_HEAD_DIM;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::ops::Range;

/// Memory of one thread for the whole call, sized for the largest work tile.
pub(super) struct BwdScratch {
    /// A query panel, a block of keys, P, dS and interleaved dS `[KEYS][lanes]`, then dQ.
    floats: AlignedBuffer,
}

impl BwdScratch {
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(super) fn new(plan: &BwdPlan, problem: &FlashAttnVarlenBwd) -> Result<Self> {
        let (d, dv) = (problem.forward.head_dim, problem.forward.value_dim);
        let len = QueryPanel::len(d, dv) + KvBlock::len(d, dv) + 3 * KEYS * MAX_ROWS + plan.dq_len;
        Ok(Self { floats: AlignedBuffer::zeros(len)? })
    }
}

/// A task of the plan, for [`crate::cpu::simd::Isa::dispatch`].
///
/// # Safety
/// The problem's views are valid host memory, and nothing else accesses its results. Plan, scratch and deltas were made
/// for the problem, and for the lanes of the instruction set that runs this. Each task runs once. If
/// [`Simd::ELEMENTS_PER_LANE`] is 2, q, K, V and dout are bf16.
pub(super) struct RunBwdTask<'a> {
    problem: &'a FlashAttnVarlenBwd<'a>,
    plan: &'a BwdPlan,
    scratch: &'a mut BwdScratch,
    /// `[Tq, Hq]`
    deltas: *const f32,
    task: &'a BwdTask,
}

impl<'a> RunBwdTask<'a> {
    pub(super) fn new(
        problem: &'a FlashAttnVarlenBwd<'a>,
        plan: &'a BwdPlan,
        scratch: &'a mut BwdScratch,
        deltas: *const f32,
        task: &'a BwdTask,
    ) -> Self {
        Self { problem, plan, scratch, deltas, task }
    }
}

impl SimdKernel for RunBwdTask<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let tile = match self.task {
            // SAFETY: dk and dv are writable, and no tile has these keys, to which no query attends.
            BwdTask::Clear(keys) => return unsafe { clear_gradients(self.problem, keys) },
            BwdTask::Tile(tile) => tile,
        };
        let forward = &self.problem.forward;
        let (d, dv) = (forward.head_dim, forward.value_dim);
        let memory = self.scratch.floats.as_mut_ptr();
        let block = memory.wrapping_add(QueryPanel::len(d, dv));
        let p = block.wrapping_add(KvBlock::len(d, dv));
        let ds = p.wrapping_add(KEYS * MAX_ROWS);
        let run = TileRun {
            problem: self.problem,
            plan: self.plan,
            tile,
            group: forward.num_q_heads / forward.num_kv_heads,
            deltas: self.deltas,
            block: KvBlock::new::<S>(block, d, dv),
            p,
            ds,
            ds_interleaved: if S::ELEMENTS_PER_LANE == 1 { ds } else { ds.wrapping_add(KEYS * MAX_ROWS) },
            dq: ds.wrapping_add(2 * KEYS * MAX_ROWS),
            scale_and_cap: ScaleAndCap::new(f64::from(forward.score.softmax_scale), forward.score.softcap),
        };
        // SAFETY: the contract of the type; panel, block, p, both forms of ds and dq lie one after the other in the
        // scratch, as its length has them.
        unsafe { run.run(simd, QueryPanel::new(memory, d, dv)) };
    }
}

/// A tile, and the memory to compute it in.
struct TileRun<'a> {
    problem: &'a FlashAttnVarlenBwd<'a>,
    plan: &'a BwdPlan,
    tile: &'a BwdTile,
    /// Query heads per KV head.
    group: usize,
    deltas: *const f32,
    block: KvBlock,
    /// `[KEYS][lanes]`, of which bf16 pairs take half.
    p: *mut f32,
    /// As p.
    ds: *mut f32,
    /// `[KEYS / E][lanes]`, a lane holds the dS of E keys; `ds` where E, [`Simd::ELEMENTS_PER_LANE`], is 1.
    ds_interleaved: *mut f32,
    /// `[D][lanes]` of each micro-panel of the tile.
    dq: *mut f32,
    scale_and_cap: ScaleAndCap,
}

impl TileRun<'_> {
    /// Lanes of the micro-panel that begins at row `first`.
    #[inline(always)]
    fn width<S: Simd>(&self, first: usize) -> usize {
        if self.tile.rows(self.group) - first > S::LANES { 2 * S::LANES } else { S::LANES }
    }

    /// Compute the tile's gradients.
    ///
    /// # Safety
    /// As [`RunBwdTask`]; the memory is the scratch's.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, simd: S, mut panel: QueryPanel) {
        let Self { problem, plan, tile, block, .. } = *self;
        let (rows, gradients) = (tile.rows(self.group), tile.gradients);
        // SAFETY: dq has room for all micro-panels of the tile. A block has at most KEYS keys and a micro-panel at most
        // two vectors of rows, and both are loaded before `block_step` reads them. No other tile computes dk and dv of
        // these keys for this head, or dq of these queries.
        unsafe {
            if gradients.dq() {
                self.dq.write_bytes(0, rows.next_multiple_of(S::LANES) * problem.forward.head_dim);
            }
            for start in tile.keys.clone().step_by(KEYS) {
                let keys = start..(start + KEYS).min(tile.keys.end);
                block.load(simd, problem, (plan, tile), keys.clone());
                for first in (0..rows).step_by(2 * S::LANES) {
                    let width = self.width::<S>(first);
                    let visible = visible_keys(problem, (plan, tile), &(first..(first + width).min(rows)), &keys);
                    if visible.is_empty() {
                        continue;
                    }
                    panel.load(simd, problem, (plan, tile), self.deltas, (first, width));
                    match (width > S::LANES, S::MR) {
                        (true, 4) => self.block_step::<S, 2, 4>(simd, &panel, first, start, visible),
                        (true, _) => self.block_step::<S, 2, 8>(simd, &panel, first, start, visible),
                        (false, 4) => self.block_step::<S, 1, 4>(simd, &panel, first, start, visible),
                        (false, _) => self.block_step::<S, 1, 8>(simd, &panel, first, start, visible),
                    }
                }
                if gradients.dk_dv() {
                    block.store_gradients(simd, problem, (plan, tile), keys);
                }
            }
            if gradients.dq() {
                self.store_dq(simd);
            }
        }
    }

    /// The five products of the block, whose first key has position `start`, and the micro-panel, whose first row is
    /// `first`.
    ///
    /// # Safety
    /// As [`RunBwdTask`]; block and panel are loaded, and `visible` are keys of the block.
    #[inline(always)]
    unsafe fn block_step<S: Simd, const NV: usize, const MR: usize>(
        &self,
        simd: S,
        panel: &QueryPanel,
        first: usize,
        start: usize,
        visible: Range<usize>,
    ) {
        let forward = &self.problem.forward;
        let Self { block, p, ds, ds_interleaved, scale_and_cap, .. } = *self;
        let (d, dv) = (forward.head_dim, forward.value_dim);
        // Whole micro-kernels; P and dS of the additional keys are 0.
        let keys = visible.start / MR * MR..visible.end.next_multiple_of(MR);
        // Elements of a row and of a column that share a lane. MR is a multiple of it.
        let e = S::ELEMENTS_PER_LANE;
        let (lanes_of_keys, depth) = (visible.start / e..visible.end.div_ceil(e), panel.rows.div_ceil(e));
        // SAFETY: MR divides KEYS, so the keys are rows of the block, and P and dS have vectors for them. The panel has
        // `rows` rows and NV vectors, and dq its `[D][NV]` vectors from row `first` on.
        unsafe {
            dot_products::<S, NV, MR>(simd, (block.k, d / e), panel.q_columns, &keys, p);
            dot_products::<S, NV, MR>(simd, (block.v, dv / e), panel.dout_columns, &keys, ds);
            simd.vectorize(SoftmaxBwd::<NV> {
                p,
                ds,
                ds_interleaved,
                keys: keys.clone(),
                first: start,
                lanes: &panel.lanes,
                scale_and_cap,
                after_cap: false,
            });
            if self.tile.gradients.dk_dv() {
                accumulate_dk_dv::<S, NV, MR>(simd, p, (panel.dout, depth), &keys, (block.dv, dv));
                accumulate_dk_dv::<S, NV, MR>(simd, ds, (panel.q, depth), &keys, (block.dk, d));
            }
            if self.tile.gradients.dq() {
                let dq = self.dq.add(first * d);
                accumulate_dq::<S, NV, MR>(simd, (block.k_interleaved, d), ds_interleaved, &lanes_of_keys, dq);
            }
        }
    }

    /// Store dq of the tile's rows.
    ///
    /// # Safety
    /// As [`RunBwdTask`]; the accumulators dq are complete.
    #[inline(always)]
    unsafe fn store_dq<S: Simd>(&self, simd: S) {
        let Self { problem, plan, tile, group, .. } = *self;
        let (forward, d) = (&problem.forward, problem.forward.head_dim);
        let mut row_of_dq = [0.0f32; MAX_HEAD_DIM as usize];
        for row in 0..tile.rows(group) {
            let t = plan.sequences[tile.sequence].first_row + tile.queries.start + row / group;
            let first = row / (2 * S::LANES) * (2 * S::LANES);
            let width = self.width::<S>(first);
            // SAFETY: the row is lane `row - first` of the micro-panel that begins at `first`; (t, h) is a row of the
            // dense [Tq, Hq, D].
            unsafe {
                let from = self.dq.add(first * d + row - first);
                for (c, x) in row_of_dq[..d].iter_mut().enumerate() {
                    *x = from.add(c * width).read();
                }
                scale_row(simd, row_of_dq.as_mut_ptr(), d, forward.score.softmax_scale);
                let h = tile.kv_head * group + row % group;
                let at = (t * forward.num_q_heads + h) * d * problem.dq.dtype.size();
                narrow_row(simd, problem.dq.dtype, row_of_dq.as_ptr(), problem.dq.data.add(at), d);
            }
        }
    }
}

/// Those of the keys that at least one of the tile's rows attends to, relative to the first key.
#[inline(always)]
pub(super) fn visible_keys(
    problem: &FlashAttnVarlenBwd,
    (plan, tile): (&BwdPlan, &BwdTile),
    rows: &Range<usize>,
    keys: &Range<usize>,
) -> Range<usize> {
    let group = problem.forward.num_q_heads / problem.forward.num_kv_heads;
    let first = tile.queries.start;
    let queries = first + rows.start / group..first + (rows.end - 1) / group + 1;
    let sequence = &plan.sequences[tile.sequence];
    let visible = sequence.visible_to_any(&queries, Window::of(&problem.forward.score));
    let (start, end) = (visible.start.max(keys.start), visible.end.min(keys.end));
    if start < end { start - keys.start..end - keys.start } else { 0..0 }
}

/// `to[j][row] = rows[j] . columns[..][row]` for `keys` j, whole groups of MR.
///
/// # Safety
/// `rows` are rows of `d` lanes of a block; `columns` is `[d][NV]` vectors, `to` has NV vectors for each key.
#[inline(always)]
pub(super) unsafe fn dot_products<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    (rows, d): (*const f32, usize),
    columns: *const f32,
    keys: &Range<usize>,
    to: *mut f32,
) {
    let (width, stride) = (NV * S::LANES, row_stride(d));
    for j in keys.clone().step_by(MR) {
        // SAFETY: the rows j to j + MR, the `[d][NV]` columns and the vectors of `to` are those that the caller
        // guarantees.
        unsafe {
            let scalars = BroadcastOperand { from: rows.add(j * stride), row_stride: stride, depth_stride: 1 };
            let vectors = VectorOperand { from: columns, depth_stride: width };
            let sums = micro_kernel::<S, NV, MR>(simd, scalars, vectors, d, [[simd.splat(0.0); NV]; MR]);
            store_rows(simd, to.add(j * width), width, sums);
        }
    }
}

/// `dq[c][row] += sum over keys of k[j][c] * ds[j][row]`, where j counts lanes of keys.
///
/// # Safety
/// `k` are interleaved rows of `d` lanes of a block, `ds` has NV vectors for each, `dq` is `[d][NV]` vectors.
#[inline(always)]
unsafe fn accumulate_dq<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    (k, d): (*const f32, usize),
    ds: *const f32,
    keys: &Range<usize>,
    dq: *mut f32,
) {
    let (width, stride) = (NV * S::LANES, row_stride(d));
    for c in (0..d).step_by(MR) {
        // SAFETY: MR divides d, so the keys' rows and dq have elements c to c + MR; ds has NV vectors for each key.
        unsafe {
            let from = k.add(keys.start * stride + c);
            let scalars = BroadcastOperand { from, row_stride: 1, depth_stride: stride };
            let vectors = VectorOperand { from: ds.add(keys.start * width), depth_stride: width };
            let dq = dq.add(c * width);
            let sums = load_rows::<S, NV, MR>(simd, dq, width);
            store_rows(simd, dq, width, micro_kernel(simd, scalars, vectors, keys.len(), sums));
        }
    }
}

/// `to[j][c] += sum over rows of weights[j][row] * rows[row][c]` for `keys` j, whole groups of MR: dV with P and dout,
/// dK with dS and q. Here `row` counts lanes of rows.
///
/// # Safety
/// `weights` has NV vectors for each key; `rows` are `count` interleaved rows of `d` lanes of a panel, and `to` is rows
/// of a block.
#[inline(always)]
unsafe fn accumulate_dk_dv<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    weights: *const f32,
    (rows, count): (*const f32, usize),
    keys: &Range<usize>,
    (to, d): (*mut f32, usize),
) {
    let (width, stride) = (NV * S::LANES, row_stride(d));
    for j in keys.clone().step_by(MR) {
        // SAFETY: the weights and rows of keys j to j + MR are those that the caller guarantees. Rows are padded to
        // whole vectors, and a second vector is taken only if more than one vector of columns is left.
        unsafe {
            let scalars = BroadcastOperand { from: weights.add(j * width), row_stride: width, depth_stride: 1 };
            let mut c = 0;
            while c < d {
                let vectors = VectorOperand { from: rows.add(c), depth_stride: stride };
                let to = to.add(j * stride + c);
                if d - c > S::LANES {
                    let sums = load_rows::<S, 2, MR>(simd, to, stride);
                    store_rows(simd, to, stride, micro_kernel(simd, scalars, vectors, count, sums));
                } else {
                    let sums = load_rows::<S, 1, MR>(simd, to, stride);
                    store_rows(simd, to, stride, micro_kernel(simd, scalars, vectors, count, sums));
                }
                c += 2 * S::LANES;
            }
        }
    }
}
