//! The gradient of the bias: dS, summed over the sequences and heads that share an element. A task computes some rows of the
//! bias, of one of its sequences and of one KV head or of all, and visits what shares them in order: the sums are the same for
//! any number of threads, and need no memory but a task's own rows.

use super::kv_block::KvBlock;
use super::plan::{BwdPlan, BwdTile, Gradients, KEYS};
use super::query_panel::{MAX_ROWS, QueryPanel};
use super::softmax_bwd::SoftmaxBwd;
use super::task::{dot_products, visible_keys};
use crate::cpu::aligned::AlignedBuffer;
use crate::cpu::attention::score::ScaleAndCap;
use crate::cpu::attention::sequences::Window;
use crate::cpu::element_rows::narrow_row;
use crate::cpu::simd::{Simd, SimdKernel};
use crate::error::Result;
use crate::problem::attention::Bias;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// The tasks of a call.
#[derive(Clone, Copy)]
pub(super) struct BiasGradient<'a> {
    problem: &'a FlashAttnVarlenBwd<'a>,
    plan: &'a BwdPlan,
    bias: Bias,
    dbias: Tensor<'a>,
    /// Query heads per KV head.
    group: usize,
}

// SAFETY: the struct consists of addresses and numbers; each access through it states why it is allowed.
unsafe impl Sync for BiasGradient<'_> {}

impl<'a> BiasGradient<'a> {
    /// `None` if the call has no such result.
    pub(super) fn new(problem: &'a FlashAttnVarlenBwd<'a>, plan: &'a BwdPlan) -> Option<Self> {
        let (forward, dbias) = (&problem.forward, problem.dbias?);
        let group = forward.num_q_heads / forward.num_kv_heads;
        Some(Self { problem, plan, bias: forward.score.bias?, dbias, group })
    }

    /// Query rows of the bias that a task has.
    fn queries(&self) -> usize {
        (MAX_ROWS / self.group).max(1)
    }

    /// Heads of the bias that a task has: those of a KV head.
    fn heads(&self) -> usize {
        if self.bias.heads == 1 { 1 } else { self.group }
    }

    fn chunks(&self) -> usize {
        self.bias.rows.div_ceil(self.queries())
    }

    pub(super) fn num_tasks(&self) -> usize {
        self.bias.seqs * (self.bias.heads / self.heads()) * self.chunks()
    }

    /// Memory of one thread: a query panel, a block of keys, P and dS, then the sums of a task.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(super) fn scratch(&self) -> Result<AlignedBuffer> {
        AlignedBuffer::zeros(self.sums_offset() + self.sums_len())
    }

    fn sums_offset(&self) -> usize {
        let (d, dv) = (self.problem.forward.head_dim, self.problem.forward.value_dim);
        QueryPanel::len(d, dv) + KvBlock::len(d, dv) + 2 * KEYS * MAX_ROWS
    }

    fn sums_len(&self) -> usize {
        self.heads() * self.queries() * self.bias.keys
    }
}

/// A task of [`BiasGradient`], for [`crate::cpu::simd::Isa::dispatch`].
///
/// # Safety
/// The problem's views are valid host memory, and nothing else accesses `dbias`. The plan and the `[Tq, Hq]` deltas were made
/// for the problem, and the scratch by [`BiasGradient::scratch`]. [`Simd::ELEMENTS_PER_LANE`] is 1. Each task runs once.
pub(super) struct RunBiasTask<'a> {
    pub(super) of: BiasGradient<'a>,
    pub(super) scratch: &'a mut AlignedBuffer,
    pub(super) deltas: *const f32,
    pub(super) task: usize,
}

impl SimdKernel for RunBiasTask<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let BiasGradient { problem, plan, bias, dbias, group } = self.of;
        let forward = &problem.forward;
        let (chunks, units) = (self.of.chunks(), bias.heads / self.of.heads());
        let (chunk, unit, b) = (self.task % chunks, self.task / chunks % units, self.task / (chunks * units));
        let first = chunk * self.of.queries();
        let rows = first..(first + self.of.queries()).min(bias.rows);
        let sequences = if bias.seqs == 1 { 0..plan.sequences.len() } else { b..(b + 1).min(plan.sequences.len()) };
        let kv_heads = if bias.heads == 1 { 0..forward.num_kv_heads } else { unit..unit + 1 };
        let memory = self.scratch.as_mut_ptr();
        let (d, dv) = (forward.head_dim, forward.value_dim);
        let block = memory.wrapping_add(QueryPanel::len(d, dv));
        let p = block.wrapping_add(KvBlock::len(d, dv));
        let sums = memory.wrapping_add(self.of.sums_offset());
        let mut run = BiasTile {
            of: self.of,
            tile: BwdTile { sequence: 0, kv_head: 0, queries: 0..0, keys: 0..0, gradients: Gradients::DkDv },
            rows: rows.clone(),
            deltas: self.deltas,
            block: KvBlock::new::<S>(block, d, dv),
            p,
            ds: p.wrapping_add(KEYS * MAX_ROWS),
            sums,
        };
        // SAFETY: the scratch has the panel, the block, P, dS and the sums one after the other. The rows that are stored
        // are some of the dense result, which no other task has.
        unsafe {
            sums.write_bytes(0, self.of.sums_len());
            for (sequence, kv_head) in sequences.flat_map(|s| kv_heads.clone().map(move |h| (s, h))) {
                let of = &plan.sequences[sequence];
                let queries = rows.start..rows.end.min(of.len_q);
                if queries.is_empty() {
                    continue;
                }
                let keys = of.visible_to_any(&queries, Window::of(&forward.score));
                let keys = keys.start.min(bias.keys)..keys.end.min(bias.keys);
                run.tile = BwdTile { sequence, kv_head, queries, keys, gradients: Gradients::DkDv };
                run.add(simd, QueryPanel::new(memory, d, dv));
            }
            for (h, i) in (0..self.of.heads()).flat_map(|h| rows.clone().map(move |i| (h, i))) {
                let row = (b * bias.heads + unit * group * usize::from(bias.heads > 1) + h) * bias.rows + i;
                let to = dbias.data.add(row * bias.keys * dbias.dtype.size());
                narrow_row(simd, dbias.dtype, run.sums_of(h, i).cast_const(), to, bias.keys);
            }
        }
    }
}

/// The rows of a task, of one sequence and KV head.
struct BiasTile<'a> {
    of: BiasGradient<'a>,
    tile: BwdTile,
    rows: Range<usize>,
    deltas: *const f32,
    block: KvBlock,
    /// `[KEYS][lanes]`
    p: *mut f32,
    /// As p.
    ds: *mut f32,
    /// `[heads][queries][keys]`
    sums: *mut f32,
}

impl BiasTile<'_> {
    /// The sums of row i of the bias and head `h` of the task's.
    fn sums_of(&self, h: usize, i: usize) -> *mut f32 {
        self.sums.wrapping_add((h * self.of.queries() + i - self.rows.start) * self.of.bias.keys)
    }

    /// Add dS of the tile to the sums.
    ///
    /// # Safety
    /// As [`RunBiasTask`]; the memory is the scratch's.
    #[inline(always)]
    unsafe fn add<S: Simd>(&self, simd: S, mut panel: QueryPanel) {
        let BiasGradient { problem, plan, group, .. } = self.of;
        let rows = self.tile.rows(group);
        for start in self.tile.keys.clone().step_by(KEYS) {
            let keys = start..(start + KEYS).min(self.tile.keys.end);
            // SAFETY: the keys are at most KEYS of the tile's, and a micro-panel has at most two vectors of its rows.
            unsafe {
                self.block.load(simd, problem, (plan, &self.tile), keys.clone());
                for first in (0..rows).step_by(2 * S::LANES) {
                    let width = if rows - first > S::LANES { 2 * S::LANES } else { S::LANES };
                    let of_panel = first..(first + width).min(rows);
                    let visible = visible_keys(problem, (plan, &self.tile), &of_panel, &keys);
                    if visible.is_empty() {
                        continue;
                    }
                    panel.load(simd, problem, (plan, &self.tile), self.deltas, (first, width));
                    match (width > S::LANES, S::MR) {
                        (true, 4) => self.block_step::<S, 2, 4>(simd, &panel, start, &visible),
                        (true, _) => self.block_step::<S, 2, 8>(simd, &panel, start, &visible),
                        (false, 4) => self.block_step::<S, 1, 4>(simd, &panel, start, &visible),
                        (false, _) => self.block_step::<S, 1, 8>(simd, &panel, start, &visible),
                    }
                    self.add_columns(&of_panel, start, &visible, width);
                }
            }
        }
    }

    /// dS of the block, whose first key has position `start`, and the micro-panel.
    ///
    /// # Safety
    /// As [`RunBiasTask`]; block and panel are loaded, and `visible` are keys of the block.
    #[inline(always)]
    unsafe fn block_step<S: Simd, const NV: usize, const MR: usize>(
        &self,
        simd: S,
        panel: &QueryPanel,
        start: usize,
        visible: &Range<usize>,
    ) {
        let (forward, Self { block, p, ds, .. }) = (&self.of.problem.forward, self);
        // Whole micro-kernels; P and dS of the additional keys are 0.
        let keys = visible.start / MR * MR..visible.end.next_multiple_of(MR);
        // SAFETY: MR divides KEYS, so the keys are rows of the block, and P and dS have vectors for them.
        unsafe {
            dot_products::<S, NV, MR>(simd, (block.k, forward.head_dim), panel.q_columns, &keys, *p);
            dot_products::<S, NV, MR>(simd, (block.v, forward.value_dim), panel.dout_columns, &keys, *ds);
            simd.vectorize(SoftmaxBwd::<NV> {
                p: *p,
                ds: *ds,
                ds_interleaved: *ds,
                keys,
                first: start,
                lanes: &panel.lanes,
                scale_and_cap: ScaleAndCap::new(f64::from(forward.score.softmax_scale), forward.score.softcap),
                after_cap: true,
            });
        }
    }

    /// Add dS of a micro-panel of the tile's rows `of_panel`, `width` lanes, to the sums.
    ///
    /// # Safety
    /// As [`RunBiasTask`]; dS has been computed for these keys of the block.
    #[inline(always)]
    unsafe fn add_columns(&self, of_panel: &Range<usize>, start: usize, visible: &Range<usize>, width: usize) {
        let BiasGradient { bias, group, .. } = self.of;
        for (lane, row) in of_panel.clone().enumerate() {
            let head = if bias.heads == 1 { 0 } else { row % group };
            let sums = self.sums_of(head, self.tile.queries.start + row / group);
            for j in visible.clone() {
                // SAFETY: key start + j is one of the tile's, which are below the keys of the bias; dS has `width` lanes for
                // each key of the block.
                unsafe { *sums.add(start + j) += self.ds.add(j * width + lane).read() };
            }
        }
    }
}
