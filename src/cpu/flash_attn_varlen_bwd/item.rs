//! One item of the plan: its keys block by block, each of which meets the item's rows panel by panel.

use super::block::{Block, clear, scale_row};
use super::panel::{MAX_ROWS, Panel, row_stride};
use super::plan::{Item, KEYS, Plan, Task};
use super::weights::{Form, Weigh};
use crate::cpu::aligned::AlignedBuffer;
use crate::cpu::attention::sequences::Window;
use crate::cpu::element_rows::narrow_row;
use crate::cpu::micro_kernel::{Scalars, Vectors, load_rows, store_rows, tile};
use crate::cpu::simd::{Simd, SimdKernel};
use crate::error::Result;
use crate::problem::MAX_HEAD_DIM;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::ops::Range;

/// A thread's memory for the whole call, sized for the largest item.
pub(super) struct Scratch {
    /// A panel, a block, two arrays `[KEYS][lanes]`, then dq
    floats: AlignedBuffer,
}

impl Scratch {
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(super) fn new(plan: &Plan, problem: &FlashAttnVarlenBwd) -> Result<Self> {
        let (d, dv) = (problem.forward.head_dim, problem.forward.value_dim);
        let len = Panel::len(d, dv) + Block::len(d, dv) + 2 * KEYS * MAX_ROWS + plan.dq_len;
        Ok(Self { floats: AlignedBuffer::zeros(len)? })
    }
}

/// A task of the plan, for [`crate::cpu::simd::Isa::dispatch`].
///
/// # Safety
/// The problem's views are valid host memory, its results not accessed by others; plan, scratch and deltas were made for
/// it, with the lanes of the instruction set that runs this. Each task runs once.
pub(super) struct RunTask<'a> {
    problem: &'a FlashAttnVarlenBwd<'a>,
    plan: &'a Plan,
    scratch: &'a mut Scratch,
    /// `[Tq, Hq]`
    deltas: *const f32,
    task: &'a Task,
}

impl<'a> RunTask<'a> {
    pub(super) fn new(
        problem: &'a FlashAttnVarlenBwd<'a>,
        plan: &'a Plan,
        scratch: &'a mut Scratch,
        deltas: *const f32,
        task: &'a Task,
    ) -> Self {
        Self { problem, plan, scratch, deltas, task }
    }
}

impl SimdKernel for RunTask<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let item = match self.task {
            // SAFETY: dk and dv are writable, and no item has these keys.
            Task::Clear(keys) => return unsafe { clear(self.problem, keys) },
            Task::Item(item) => item,
        };
        let forward = &self.problem.forward;
        let (d, dv) = (forward.head_dim, forward.value_dim);
        let memory = self.scratch.floats.as_mut_ptr();
        let block = memory.wrapping_add(Panel::len(d, dv));
        let p = block.wrapping_add(Block::len(d, dv));
        let ds = p.wrapping_add(KEYS * MAX_ROWS);
        let work = Work {
            problem: self.problem,
            plan: self.plan,
            item,
            group: forward.num_q_heads / forward.num_kv_heads,
            deltas: self.deltas,
            block: Block::new(block, d, dv),
            p,
            ds,
            dq: ds.wrapping_add(KEYS * MAX_ROWS),
            form: Form::of(&forward.score),
        };
        // SAFETY: what the type requires; panel, block, p, ds and dq lie one after the other in the scratch.
        unsafe { work.run(simd, Panel::new(memory, d, dv)) };
    }
}

/// An item and the memory to compute it in.
struct Work<'a> {
    problem: &'a FlashAttnVarlenBwd<'a>,
    plan: &'a Plan,
    item: &'a Item,
    /// Query heads of a KV head
    group: usize,
    deltas: *const f32,
    block: Block,
    /// `[KEYS][lanes]`, as is `ds`
    p: *mut f32,
    ds: *mut f32,
    /// `[D][lanes]` for each panel
    dq: *mut f32,
    form: Form,
}

impl Work<'_> {
    /// Lanes of the panel that begins at row `first`.
    #[inline(always)]
    fn width<S: Simd>(&self, first: usize) -> usize {
        if self.item.rows(self.group) - first > S::LANES { 2 * S::LANES } else { S::LANES }
    }

    /// # Safety
    /// As [`RunTask`].
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, simd: S, mut panel: Panel) {
        let Self { problem, plan, item, block, .. } = *self;
        let (rows, wants) = (item.rows(self.group), item.wants);
        // SAFETY: dq has room for all panels of the item; keys come in blocks of at most KEYS, rows in panels of at most two
        // vectors, and both are loaded when they meet. Only this item writes these keys of its head, or these queries.
        unsafe {
            if wants.queries() {
                self.dq.write_bytes(0, rows.next_multiple_of(S::LANES) * problem.forward.head_dim);
            }
            for start in item.keys.clone().step_by(KEYS) {
                let keys = start..(start + KEYS).min(item.keys.end);
                block.load(simd, problem, (plan, item), keys.clone());
                for first in (0..rows).step_by(2 * S::LANES) {
                    let width = self.width::<S>(first);
                    let seen = self.seen(&(first..(first + width).min(rows)), &keys);
                    if seen.is_empty() {
                        continue;
                    }
                    panel.load(simd, problem, (plan, item), self.deltas, (first, width));
                    match (width > S::LANES, S::MR) {
                        (true, 4) => self.meet::<S, 2, 4>(simd, &panel, first, start, seen),
                        (true, _) => self.meet::<S, 2, 8>(simd, &panel, first, start, seen),
                        (false, 4) => self.meet::<S, 1, 4>(simd, &panel, first, start, seen),
                        (false, _) => self.meet::<S, 1, 8>(simd, &panel, first, start, seen),
                    }
                }
                if wants.keys() {
                    block.write(simd, problem, (plan, item), keys);
                }
            }
            if wants.queries() {
                self.write_queries(simd);
            }
        }
    }

    /// Of the keys, those that some of the rows see, relative to the first of them.
    #[inline(always)]
    fn seen(&self, rows: &Range<usize>, keys: &Range<usize>) -> Range<usize> {
        let first = self.item.queries.start;
        let queries = first + rows.start / self.group..first + (rows.end - 1) / self.group + 1;
        let sequence = &self.plan.sequences[self.item.sequence];
        let visible = sequence.visible_to_any(&queries, Window::of(&self.problem.forward.score));
        let (start, end) = (visible.start.max(keys.start), visible.end.min(keys.end));
        if start < end { start - keys.start..end - keys.start } else { 0..0 }
    }

    /// The block, whose first key is at position `start`, meets the panel, whose first row is `first`.
    ///
    /// # Safety
    /// As [`RunTask`]; block and panel are loaded.
    #[inline(always)]
    unsafe fn meet<S: Simd, const NV: usize, const MR: usize>(
        &self,
        simd: S,
        panel: &Panel,
        first: usize,
        start: usize,
        seen: Range<usize>,
    ) {
        let forward = &self.problem.forward;
        let Self { block, p, ds, .. } = *self;
        let (d, dv) = (forward.head_dim, forward.value_dim);
        // Whole tiles; what is not seen gets weights of 0.
        let keys = seen.start / MR * MR..seen.end.next_multiple_of(MR);
        // SAFETY: KEYS is a multiple of MR; what follows stays within block, panel and the panel's dq.
        unsafe {
            products::<S, NV, MR>(simd, (block.k, d), panel.q_columns, &keys, p);
            products::<S, NV, MR>(simd, (block.v, dv), panel.dout_columns, &keys, ds);
            let (lanes, form) = (&panel.lanes, self.form);
            simd.vectorize(Weigh::<NV> { p, ds, keys: keys.clone(), first: start, lanes, form });
            if self.item.wants.keys() {
                add_to_keys::<S, NV, MR>(simd, p, (panel.dout, panel.rows), &keys, (block.dv, dv));
                add_to_keys::<S, NV, MR>(simd, ds, (panel.q, panel.rows), &keys, (block.dk, d));
            }
            if self.item.wants.queries() {
                add_to_queries::<S, NV, MR>(simd, (block.k, d), ds, &seen, self.dq.add(first * d));
            }
        }
    }

    /// Write the dq of the rows.
    ///
    /// # Safety
    /// As [`RunTask`].
    #[inline(always)]
    unsafe fn write_queries<S: Simd>(&self, simd: S) {
        let Self { problem, plan, item, group, .. } = *self;
        let (forward, d) = (&problem.forward, problem.forward.head_dim);
        let mut row_of_dq = [0.0f32; MAX_HEAD_DIM as usize];
        for row in 0..item.rows(group) {
            let t = plan.sequences[item.sequence].first_row + item.queries.start + row / group;
            let first = row / (2 * S::LANES) * (2 * S::LANES);
            let width = self.width::<S>(first);
            // SAFETY: lane `row - first` of the panel; row (t, h) of the dense [Tq, Hq, D].
            unsafe {
                let from = self.dq.add(first * d + row - first);
                for (c, x) in row_of_dq[..d].iter_mut().enumerate() {
                    *x = from.add(c * width).read();
                }
                scale_row(simd, row_of_dq.as_mut_ptr(), d, forward.score.softmax_scale);
                let h = item.kv_head * group + row % group;
                let at = (t * forward.num_q_heads + h) * d * problem.dq.dtype.size();
                narrow_row(simd, problem.dq.dtype, row_of_dq.as_ptr(), problem.dq.data.add(at), d);
            }
        }
    }
}

/// `to[j][row] = rows[j] . columns[..][row]` for whole tiles of keys j.
///
/// # Safety
/// `rows` are those of a block, of `d` elements; `columns` is `[d][NV]` vectors, `to` has room for all keys.
#[inline(always)]
unsafe fn products<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    (rows, d): (*const f32, usize),
    columns: *const f32,
    keys: &Range<usize>,
    to: *mut f32,
) {
    let (width, stride) = (NV * S::LANES, row_stride(d));
    for j in keys.clone().step_by(MR) {
        // SAFETY: rows j to j + MR of the block, the `[d][NV]` columns, and as many places in `to`.
        unsafe {
            let scalars = Scalars { from: rows.add(j * stride), row: stride, step: 1 };
            let zeros = [[simd.splat(0.0); NV]; MR];
            let sums = tile::<S, NV, MR>(simd, scalars, Vectors { from: columns, step: width }, d, zeros);
            store_rows(simd, to.add(j * width), width, sums);
        }
    }
}

/// `dq[c][row] += sum over keys of k[j][c] * ds[j][row]`
///
/// # Safety
/// `k` are a block's rows of `d` elements, `ds` has NV vectors for each key, `dq` is `[d][NV]` vectors.
#[inline(always)]
unsafe fn add_to_queries<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    (k, d): (*const f32, usize),
    ds: *const f32,
    keys: &Range<usize>,
    dq: *mut f32,
) {
    let (width, stride) = (NV * S::LANES, row_stride(d));
    for c in (0..d).step_by(MR) {
        // SAFETY: elements c to c + MR of the keys' rows and of dq, as MR divides d; a weight for each key.
        unsafe {
            let scalars = Scalars { from: k.add(keys.start * stride + c), row: 1, step: stride };
            let vectors = Vectors { from: ds.add(keys.start * width), step: width };
            let dq = dq.add(c * width);
            let sums = load_rows::<S, NV, MR>(simd, dq, width);
            store_rows(simd, dq, width, tile(simd, scalars, vectors, keys.len(), sums));
        }
    }
}

/// `to[j][c] += sum over rows of weights[j][row] * rows[row][c]` for whole tiles of keys j, where a key's weights are NV
/// vectors.
///
/// # Safety
/// `weights` has all keys; `rows` are `count` rows of a panel, of `d` elements, `to` those of a block.
#[inline(always)]
unsafe fn add_to_keys<S: Simd, const NV: usize, const MR: usize>(
    simd: S,
    weights: *const f32,
    (rows, count): (*const f32, usize),
    keys: &Range<usize>,
    (to, d): (*mut f32, usize),
) {
    let (width, stride) = (NV * S::LANES, row_stride(d));
    for j in keys.clone().step_by(MR) {
        // SAFETY: weights and rows of keys j to j + MR, of a block of whole tiles; all rows are whole vectors long.
        unsafe {
            let scalars = Scalars { from: weights.add(j * width), row: width, step: 1 };
            let mut c = 0;
            while c < d {
                let (vectors, to) = (Vectors { from: rows.add(c), step: stride }, to.add(j * stride + c));
                if d - c > S::LANES {
                    let sums = load_rows::<S, 2, MR>(simd, to, stride);
                    store_rows(simd, to, stride, tile(simd, scalars, vectors, count, sums));
                } else {
                    let sums = load_rows::<S, 1, MR>(simd, to, stride);
                    store_rows(simd, to, stride, tile(simd, scalars, vectors, count, sums));
                }
                c += 2 * S::LANES;
            }
        }
    }
}
