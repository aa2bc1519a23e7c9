//! One item of the plan: its queries are laid out, its keys visited block by block, its results written.

use super::few_rows::FewRows;
use super::keys::{Ahead, BLOCK, HeadRows, KeyBlock};
use super::many_rows::ManyRows;
use super::plan::{Arrangement, Item, Merge, Plan, Sequence, Task};
use super::softmax::ScoreForm;
use crate::cpu::aligned::Aligned;
use crate::cpu::element::{Element, narrow, widen};
use crate::cpu::simd::{Simd, Vectorised};
use crate::ops::paged_attention::{MAX_HEAD_DIM, PagedAttention};
use std::marker::PhantomData;
use std::ops::Range;

/// Softmax state of the rows of one KV head after some keys: o is not yet divided by l, m is in base 2.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) o: *mut f32,
    pub(super) m: *mut f32,
    pub(super) l: *mut f32,
    pub(super) lanes: usize,
}

impl State {
    /// The state of the item's `head`-th KV head in `all`, which has [`Item::state_len`] elements: for each head o,
    /// then m, then l.
    fn of_head(item: &Item, all: *mut f32, head: usize) -> Self {
        let o = all.wrapping_add(head * item.head_state_len());
        let m = o.wrapping_add(item.o_len);
        Self { o, m, l: m.wrapping_add(item.lanes), lanes: item.lanes }
    }
}

/// Keys that each lane sees, as positions in the sequence. Lanes without a row repeat the last row's.
#[derive(Default)]
pub(super) struct Ranges {
    /// First visible key, less the lane's place within a step of keys
    low: Vec<i32>,
    /// End of the visible keys, likewise
    high: Vec<i32>,
}

impl Ranges {
    /// Of the `len` keys from position `first` on, those that some lane sees, relative to `first`.
    #[inline(always)]
    pub(super) fn seen_by_any(&self, lanes: &Range<usize>, first: usize, len: usize) -> Range<usize> {
        let (mut low, mut high) = (i32::MAX, 0);
        for lane in lanes.clone() {
            if self.low[lane] < self.high[lane] {
                (low, high) = (low.min(self.low[lane]), high.max(self.high[lane]));
            }
        }
        let relative = |x: i32| (i64::from(x) - first as i64).clamp(0, len as i64) as usize;
        relative(low)..relative(high)
    }

    /// Every lane sees all of `keys`, which are relative to `first`.
    #[inline(always)]
    pub(super) fn seen_by_all(&self, lanes: &Range<usize>, first: usize, keys: &Range<usize>) -> bool {
        let (start, end) = ((first + keys.start) as i64, (first + keys.end) as i64);
        lanes.clone().all(|lane| i64::from(self.low[lane]) <= start && end <= i64::from(self.high[lane]))
    }

    /// (low, high) of the vector of lanes from `lane` on, relative to `first` and clamped to what a block can tell.
    #[inline(always)]
    pub(super) fn relative<S: Simd>(&self, simd: S, lane: usize, first: usize) -> (S::V, S::V) {
        const LIMIT: i64 = 2 * BLOCK as i64;
        let vector = |positions: &[i32]| {
            let mut out = [0.0f32; crate::cpu::simd::MAX_LANES];
            for (out, x) in out.iter_mut().zip(&positions[lane..lane + S::LANES]) {
                *out = (i64::from(*x) - first as i64).clamp(-LIMIT, LIMIT) as f32;
            }
            // SAFETY: LANES <= MAX_LANES.
            unsafe { simd.load(out.as_ptr()) }
        };
        (vector(&self.low), vector(&self.high))
    }
}

/// A block of keys meets the queries of one KV head.
pub(super) struct Visit<'a, T> {
    pub(super) rows: HeadRows<'a, T>,
    pub(super) q: *const f32,
    pub(super) state: State,
    pub(super) ranges: &'a Ranges,
    pub(super) form: ScoreForm,
    /// D, a multiple of 8, at most 256
    pub(super) d: usize,
}

/// Where a block's intermediate results stand.
pub(super) struct Buffers {
    /// `[BLOCK]` steps of a panel's lanes
    pub(super) scores: *mut f32,
    /// Widened K, `[BLOCK][D]`
    pub(super) k: *mut f32,
    /// Widened V, `[D / TILE][BLOCK][TILE]`
    pub(super) v: *mut f32,
}

/// How rows lie in vectors; every layout is one KV head's.
pub(super) trait RowKernel<S: Simd, T: Element> {
    /// Keys that it takes at a time, at most [`BLOCK`].
    const BLOCK: usize;
    /// The query row that a lane belongs to.
    fn row_of_lane(lane: usize) -> usize;
    /// The lane's key, among those of one step of the softmax.
    fn key_of_lane(lane: usize) -> usize;
    /// Put a query row of d elements into place.
    ///
    /// # Safety
    /// `q` has [`Item::o_len`] elements, `from` has `d`, `row` is one of the item's.
    unsafe fn place_query(q: *mut f32, lanes: usize, d: usize, row: usize, from: *const f32);
    /// The reverse for o.
    ///
    /// # Safety
    /// As `place_query`.
    unsafe fn take_output(o: *const f32, lanes: usize, d: usize, row: usize, to: *mut f32);
    /// l of a row.
    ///
    /// # Safety
    /// `l` has `lanes` elements.
    unsafe fn sum_of_row(l: *const f32, lanes: usize, row: usize) -> f32;
    /// Bring the state up to date with a block of keys; ask for the rows of `ahead` meanwhile.
    ///
    /// # Safety
    /// The rows are readable; q, state and buffers are the item's.
    unsafe fn attend(simd: S, visit: Visit<T>, ahead: &mut Ahead<T>, buffers: &mut Buffers);
    /// Add a later piece's state to `total`.
    ///
    /// # Safety
    /// Both are states of the same item.
    unsafe fn merge(simd: S, total: State, part: State, d: usize);
}

/// A thread's memory for the whole call, sized for the largest item.
pub(super) struct Scratch {
    floats: Aligned,
    q_len: usize,
    state_len: usize,
    ranges: Ranges,
}

impl Scratch {
    pub(super) fn new(plan: &Plan, d: usize) -> Self {
        let largest = |f: fn(&Item) -> usize| plan.items.iter().map(f).max().unwrap_or(0);
        let q_len = largest(|item| item.heads.len() * item.o_len);
        let state_len = largest(Item::state_len);
        Self {
            floats: Aligned::zeros(q_len + 2 * state_len + BLOCK * (2 * d + 32)),
            q_len,
            state_len,
            ranges: Ranges::default(),
        }
    }
}

/// A task of the plan, for [`crate::cpu::simd::Isa::run`].
pub(super) struct RunTask<'a, T> {
    problem: &'a PagedAttention<'a>,
    plan: &'a Plan,
    scratch: &'a mut Scratch,
    partials: *mut f32,
    job: Job<'a>,
    element: PhantomData<T>,
}

impl<'a, T: Element> RunTask<'a, T> {
    /// # Safety
    /// The problem's views are valid host memory of element type `T`, its results not accessed by others; plan and
    /// scratch were made for it, with the lanes of the instruction set that will run this; `partials` has
    /// [`Plan::partials_len`] elements. Each task runs once, a merge after its tasks.
    pub(super) unsafe fn new(
        problem: &'a PagedAttention<'a>,
        plan: &'a Plan,
        scratch: &'a mut Scratch,
        partials: *mut f32,
        job: Job<'a>,
    ) -> Self {
        Self { problem, plan, scratch, partials, job, element: PhantomData }
    }
}

/// What a [`RunTask`] does.
pub(super) enum Job<'a> {
    Task(&'a Task),
    Merge(Merge),
}

impl<T: Element> Vectorised for RunTask<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let item = match self.job {
            Job::Task(Task::Clear(rows)) => return self.clear(rows.clone()),
            Job::Task(Task::Whole { item } | Task::Piece { item, .. }) => *item,
            Job::Merge(merge) => merge.item,
        };
        let item = &self.plan.items[item];
        match item.arrangement {
            Arrangement::RowPerLane => self.with_kernel::<S, ManyRows>(simd, item),
            Arrangement::VectorPerRow(1) => self.with_kernel::<S, FewRows<1>>(simd, item),
            Arrangement::VectorPerRow(2) => self.with_kernel::<S, FewRows<2>>(simd, item),
            Arrangement::VectorPerRow(4) => self.with_kernel::<S, FewRows<4>>(simd, item),
            Arrangement::VectorPerRow(_) => self.with_kernel::<S, FewRows<8>>(simd, item),
        }
    }
}

impl<T: Element> RunTask<'_, T> {
    /// Rows of no sequence: o = 0, lse = -inf.
    fn clear(&self, rows: Range<usize>) {
        let problem = self.problem;
        let row_len = problem.num_q_heads * problem.head_dim;
        let out = problem.out.data.cast::<T>();
        // SAFETY: rows of the dense [T, Hq, D], which no other task writes; zero bytes are 0.0 in every dtype.
        unsafe { out.add(rows.start * row_len).write_bytes(0, rows.len() * row_len) };
        for row in rows {
            for head in 0..problem.num_q_heads {
                self.write_lse(row, head, f32::NEG_INFINITY);
            }
        }
    }

    fn write_lse(&self, row: usize, head: usize, value: f32) {
        if let Some(lse) = self.problem.lse {
            // SAFETY: element (head, row) of the dense [Hq, T].
            unsafe { lse.add(head * self.problem.num_rows + row).write(value) }
        }
    }

    /// Compute the states of the pieces that are the job's, merge them in order, write the results. (Each kernel is
    /// compiled into the one place where it is called.)
    #[inline(always)]
    fn with_kernel<S: Simd, K: RowKernel<S, T>>(&mut self, simd: S, item: &Item) {
        let state_len = self.scratch.state_len;
        let own = self.scratch.floats.as_mut_ptr().wrapping_add(self.scratch.q_len);
        // The pieces, and where the first one's state stands.
        let (pieces, total) = match self.job {
            Job::Task(Task::Clear(_)) => return,
            Job::Task(Task::Whole { .. }) => (0..item.pieces(), own),
            Job::Task(&Task::Piece { piece, offset, .. }) => (piece..piece + 1, self.partials.wrapping_add(offset)),
            Job::Merge(Merge { offset, .. }) => (0..item.pieces(), self.partials.wrapping_add(offset)),
        };
        let attends = matches!(self.job, Job::Task(_));
        if attends {
            self.place_queries::<S, K>(simd, item);
        }
        if pieces.is_empty() {
            reset(item, total);
        }
        for piece in pieces.clone() {
            let state = match piece - pieces.start {
                0 => total,
                _ if attends => own.wrapping_add(state_len),
                further => total.wrapping_add(further * item.state_len()),
            };
            if attends {
                self.attend_piece::<S, K>(simd, item, piece, state);
            }
            if piece > pieces.start {
                self.merge::<S, K>(simd, item, total, state);
            }
        }
        if !matches!(self.job, Job::Task(Task::Piece { .. })) {
            self.finish::<S, K>(simd, item, total);
        }
    }

    /// Query heads of a KV head.
    fn group(&self) -> usize {
        self.problem.num_q_heads / self.problem.num_kv_heads
    }

    /// (row of the query, query head) of an item's row for one of its KV heads.
    fn query_of_row(&self, item: &Item, kv_head: usize, row: usize) -> (usize, usize) {
        let group = self.group();
        let sequence = &self.plan.sequences[item.sequence];
        (sequence.first_row + item.queries.start + row / group, kv_head * group + row % group)
    }

    /// The queries in the kernel's layout, and which keys each lane sees.
    #[inline(always)]
    fn place_queries<S: Simd, K: RowKernel<S, T>>(&mut self, simd: S, item: &Item) {
        let (group, d) = (self.group(), self.problem.head_dim);
        let rows = item.queries.len() * group;
        let sequence: &Sequence = &self.plan.sequences[item.sequence];
        self.scratch.ranges.low.clear();
        self.scratch.ranges.high.clear();
        for lane in 0..item.lanes {
            let row = K::row_of_lane(lane).min(rows - 1);
            let visible = sequence.visible(item.queries.start + row / group, self.problem.window_left);
            let key = K::key_of_lane(lane) as i32;
            self.scratch.ranges.low.push(visible.start as i32 - key);
            self.scratch.ranges.high.push(visible.end as i32 - key);
        }
        let mut widened = [0.0f32; MAX_HEAD_DIM as usize];
        let query = self.problem.query;
        for (index, kv_head) in item.heads.clone().enumerate() {
            // SAFETY: q has room for all heads of the item; `query` has row t, head h.
            unsafe {
                let q = self.scratch.floats.as_mut_ptr().add(index * item.o_len);
                q.write_bytes(0, item.o_len);
                for row in 0..rows {
                    let (t, h) = self.query_of_row(item, kv_head, row);
                    let at = t as i64 * query.stride(0) + h as i64 * query.stride(1);
                    let from = query.data.cast_const().cast::<T>().offset(at as isize);
                    widen(simd, from, widened.as_mut_ptr(), d);
                    K::place_query(q, item.lanes, d, row, widened.as_ptr());
                }
            }
        }
    }

    /// The state of all heads after the keys of one piece.
    #[inline(always)]
    fn attend_piece<S: Simd, K: RowKernel<S, T>>(&mut self, simd: S, item: &Item, piece: usize, state: *mut f32) {
        let d = self.problem.head_dim;
        let form = ScoreForm::new(self.problem.scale, self.problem.soft_cap);
        let sequence = &self.plan.sequences[item.sequence];
        let q = self.scratch.floats.as_mut_ptr();
        let scores = q.wrapping_add(self.scratch.q_len + 2 * self.scratch.state_len);
        let k = scores.wrapping_add(BLOCK * 32);
        let mut buffers = Buffers { scores, k, v: k.wrapping_add(BLOCK * d) };
        reset(item, state);
        let keys = item.piece(piece);
        let (mut block, mut next) = (KeyBlock::<T>::empty(), KeyBlock::<T>::empty());
        let block_at = |first: usize| first.min(keys.end)..(first + K::BLOCK).min(keys.end);
        // SAFETY: keys of the sequence, at most BLOCK of them.
        unsafe { block.find(self.problem, sequence, block_at(keys.start)) };
        while block.len > 0 {
            // SAFETY: as above.
            unsafe { next.find(self.problem, sequence, block_at(block.first + K::BLOCK)) };
            let mut ahead = Ahead::new(self.problem, &next, item.heads.clone());
            for (index, head) in item.heads.clone().enumerate() {
                let visit = Visit {
                    rows: block.of_head(self.problem, head),
                    q: q.wrapping_add(index * item.o_len),
                    state: State::of_head(item, state, index),
                    ranges: &self.scratch.ranges,
                    form,
                    d,
                };
                // SAFETY: the rows are the cache's, as the problem has checked; the rest is sized for the item.
                unsafe { K::attend(simd, visit, &mut ahead, &mut buffers) };
            }
            std::mem::swap(&mut block, &mut next);
        }
    }

    #[inline(always)]
    fn merge<S: Simd, K: RowKernel<S, T>>(&self, simd: S, item: &Item, total: *mut f32, part: *mut f32) {
        for head in 0..item.heads.len() {
            let (total, part) = (State::of_head(item, total, head), State::of_head(item, part, head));
            // SAFETY: both are states of this item's head.
            unsafe { K::merge(simd, total, part, self.problem.head_dim) };
        }
    }

    /// Divide by l and write out and lse, for the rows that are the sequence's own.
    #[inline(always)]
    fn finish<S: Simd, K: RowKernel<S, T>>(&self, simd: S, item: &Item, state: *mut f32) {
        let (problem, d) = (self.problem, self.problem.head_dim);
        let mut row_of_o = [0.0f32; MAX_HEAD_DIM as usize];
        for (index, kv_head) in item.heads.clone().enumerate() {
            let state = State::of_head(item, state, index);
            for row in 0..item.queries.len() * self.group() {
                let (t, h) = self.query_of_row(item, kv_head, row);
                if self.plan.owner[t] != item.sequence as u32 {
                    continue;
                }
                // SAFETY: a row of the item; element (t, h, 0) of the dense [T, Hq, D], which no other task writes.
                unsafe {
                    let (m, l) = (state.m.add(row).read(), K::sum_of_row(state.l, state.lanes, row));
                    let seen = l != 0.0;
                    if seen {
                        K::take_output(state.o, state.lanes, d, row, row_of_o.as_mut_ptr());
                    }
                    let factor = if seen { 1.0 / l } else { 0.0 };
                    for x in &mut row_of_o[..d] {
                        *x = if seen { *x * factor } else { 0.0 };
                    }
                    let out = problem.out.data.cast::<T>().add((t * problem.num_q_heads + h) * d);
                    narrow(simd, row_of_o.as_ptr(), out, d);
                    let lse = f64::from(m) * std::f64::consts::LN_2 + f64::from(l).ln();
                    self.write_lse(t, h, if seen { lse as f32 } else { f32::NEG_INFINITY });
                }
            }
        }
    }
}

/// No key seen.
fn reset(item: &Item, state: *mut f32) {
    for head in 0..item.heads.len() {
        let state = State::of_head(item, state, head);
        // SAFETY: the state has these elements.
        unsafe {
            state.o.write_bytes(0, item.o_len);
            state.l.write_bytes(0, item.lanes);
            std::slice::from_raw_parts_mut(state.m, item.lanes).fill(f32::NEG_INFINITY);
        }
    }
}
