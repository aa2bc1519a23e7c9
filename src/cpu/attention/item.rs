//! One item of the plan: its queries are laid out, its keys visited block by block, its results written.

use super::block_step::{BlockStep, Buffers, RowKernel};
use super::few_rows::FewRows;
use super::keys::{Ahead, BLOCK, Cache, KeyBlock};
use super::lanes::Lanes;
use super::many_rows::ManyRows;
use super::plan::{Arrangement, Item, Merge, Plan, Task};
use super::results::Results;
use super::score::ScoreForm;
use super::sources::{Bf16Pairs, CodePairs, SingleCodes, Singles};
use super::state::{RowPlace, State};
use crate::cpu::aligned::AlignedBuffer;
use crate::cpu::element_rows::{narrow_row, widen_row};
use crate::cpu::simd::{MAX_LANES, Simd, SimdKernel, prefetch_row};
use crate::error::Result;
use crate::problem::MAX_HEAD_DIM;
use crate::problem::attention::Attention;
use crate::tensor::DType;
use half::{bf16, f16};

/// A thread's memory for the whole call, sized for the largest item.
pub(super) struct Scratch {
    floats: AlignedBuffer,
    q_len: usize,
    state_len: usize,
    lanes: Lanes,
}

impl Scratch {
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(super) fn new(plan: &Plan, problem: &Attention) -> Result<Self> {
        let largest = |f: fn(&Item) -> usize| plan.items.iter().map(f).max().unwrap_or(0);
        let q_len = largest(|item| item.heads.len() * item.q_len);
        let state_len = largest(Item::state_len);
        let buffers = BLOCK * (MAX_PANEL + problem.head_dim + problem.value_dim.next_multiple_of(MAX_LANES));
        let floats = AlignedBuffer::zeros(q_len + 2 * state_len + buffers)?;
        Ok(Self { floats, q_len, state_len, lanes: Lanes::default() })
    }

    /// Behind the queries of all heads stand the states of two pieces, then the buffers.
    fn buffers(&mut self, d: usize) -> Buffers {
        let scores = self.floats.as_mut_ptr().wrapping_add(self.q_len + 2 * self.state_len);
        let k = scores.wrapping_add(BLOCK * MAX_PANEL);
        Buffers { scores, k, v: k.wrapping_add(BLOCK * d) }
    }
}

/// How many query rows before its turn a row is asked for.
const QUERIES_AHEAD: usize = 8;
/// The most lanes of a panel.
const MAX_PANEL: usize = 32;

/// A task of the plan, for [`crate::cpu::simd::Isa::dispatch`].
///
/// # Safety
/// The problem's views are valid host memory, its results not accessed by others; plan and scratch were made for it, with
/// the lanes of the instruction set that runs this; `partials` has [`Plan::partials_len`] elements. Each task runs once, a
/// merge after its tasks.
pub(super) struct RunTask<'a> {
    problem: &'a Attention<'a>,
    cache: Cache,
    plan: &'a Plan,
    scratch: &'a mut Scratch,
    partials: *mut f32,
    job: Job<'a>,
}

/// What a [`RunTask`] does.
#[derive(Clone, Copy)]
pub(super) enum Job<'a> {
    Task(&'a Task),
    Merge(Merge),
}

impl<'a> RunTask<'a> {
    pub(super) fn new(
        problem: &'a Attention<'a>,
        plan: &'a Plan,
        scratch: &'a mut Scratch,
        partials: *mut f32,
        job: Job<'a>,
    ) -> Self {
        Self { problem, cache: Cache::new(problem), plan, scratch, partials, job }
    }
}

impl SimdKernel for RunTask<'_> {
    type Output = ();

    /// Compute the states of the pieces that are the job's, merge them in order, write the results.
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self, simd: S) {
        let (item, pieces) = match self.job {
            // SAFETY: results are writable, and no sequence has these rows.
            Job::Task(Task::Clear(rows)) => return unsafe { Results::of(self.problem).clear(rows.clone()) },
            Job::Task(&Task::Whole { item }) => (item, None),
            Job::Task(&Task::Piece { item, piece, .. }) => (item, Some(piece)),
            Job::Merge(merge) => (merge.item, None),
        };
        let item = &self.plan.items[item];
        let pieces = pieces.map_or(0..item.pieces(), |piece| piece..piece + 1);
        let own = self.scratch.floats.as_mut_ptr().wrapping_add(self.scratch.q_len);
        let total = match self.job {
            Job::Task(&Task::Piece { offset, .. }) | Job::Merge(Merge { offset, .. }) => {
                self.partials.wrapping_add(offset)
            }
            Job::Task(_) => own,
        };
        let attends = matches!(self.job, Job::Task(_));
        // SAFETY: what the type requires. The item is the plan's; each state is one of the scratch's two, or the item's own
        // in the partial results, which no other task accesses meanwhile; `total` holds all pieces in the end, unless the
        // task is one of them.
        unsafe {
            if attends {
                self.place_queries(simd, item);
            }
            if pieces.is_empty() {
                reset(item, total);
            }
            for piece in pieces.clone() {
                let state = match piece - pieces.start {
                    0 => total,
                    _ if attends => own.wrapping_add(self.scratch.state_len),
                    further => total.wrapping_add(further * item.state_len()),
                };
                if attends {
                    reset(item, state);
                    self.attend_piece(simd, item, piece, state);
                }
                if piece > pieces.start {
                    self.merge(simd, item, total, state);
                }
            }
            if !matches!(self.job, Job::Task(Task::Piece { .. })) {
                Results::of(self.problem).write(simd, self.plan, item, total);
            }
        }
    }
}

impl RunTask<'_> {
    /// The queries where the kernel wants them, and what their lanes need to know.
    ///
    /// # Safety
    /// As [`RunTask`]; the item is the plan's.
    #[inline(always)]
    unsafe fn place_queries<S: Simd>(&mut self, simd: S, item: &Item) {
        let (problem, d) = (self.problem, self.problem.head_dim);
        let group = problem.num_q_heads / problem.num_kv_heads;
        // SAFETY: slopes are views of the problem, and the sequence is the item's.
        unsafe { self.scratch.lanes.set::<S>(problem, item, (item.sequence, &self.plan.sequences[item.sequence])) };
        let mut widened = [0.0f32; MAX_HEAD_DIM as usize];
        let mut pairs = [0.0f32; MAX_HEAD_DIM as usize / 2];
        let query = problem.q;
        let rows = item.queries.len() * group;
        for (index, kv_head) in item.heads.clone().enumerate() {
            let row_at = |row: usize| {
                let (t, h) = self.plan.query_of_row(item, kv_head, row, group);
                let at = t as i64 * query.stride(0) + h as i64 * query.stride(1);
                query.data.wrapping_offset(at as isize * query.dtype.size() as isize)
            };
            // SAFETY: q has room for all heads of the item; `query` has row t, head h.
            unsafe {
                let q = self.scratch.floats.as_mut_ptr().add(index * item.q_len);
                q.write_bytes(0, item.q_len);
                for row in 0..rows {
                    // Rows of one head may lie far apart, and a row is done before the next has come.
                    prefetch_row(row_at((row + QUERIES_AHEAD).min(rows - 1)), d * query.dtype.size());
                    let from = row_at(row);
                    widen_row(simd, query.dtype, from, widened.as_mut_ptr(), d);
                    if S::ELEMENTS_PER_LANE == 2 {
                        // Exact, see `multiplies_bf16`.
                        narrow_row(simd, DType::BF16, widened.as_ptr(), pairs.as_mut_ptr().cast(), d);
                    }
                    let words = if S::ELEMENTS_PER_LANE == 2 { pairs.as_ptr() } else { widened.as_ptr() };
                    let place = RowPlace::new::<S>(item.arrangement, item.lanes, d / S::ELEMENTS_PER_LANE, row);
                    place.write(q, words, d / S::ELEMENTS_PER_LANE);
                }
            }
        }
    }

    /// Bring the state of all heads up to date with the keys of one piece. (Each kernel is compiled into the one place
    /// where it is named.)
    ///
    /// # Safety
    /// As [`RunTask`]; the item is the plan's and has this piece, its queries are placed, and `state` is a state of it.
    #[inline(always)]
    unsafe fn attend_piece<S: Simd>(&mut self, simd: S, item: &Item, piece: usize, state: *mut f32) {
        // SAFETY: this function's contract; the kernel belongs to the item's arrangement.
        unsafe {
            match item.arrangement {
                Arrangement::RowPerLane => self.attend::<S, ManyRows>(simd, item, piece, state),
                Arrangement::VectorPerRow(1) => self.few_rows::<S, 1>(simd, item, piece, state),
                Arrangement::VectorPerRow(2) => self.few_rows::<S, 2>(simd, item, piece, state),
                Arrangement::VectorPerRow(4) => self.few_rows::<S, 4>(simd, item, piece, state),
                Arrangement::VectorPerRow(_) => self.few_rows::<S, 8>(simd, item, piece, state),
            }
        }
    }

    /// # Safety
    /// As `attend_piece`; the item has ROWS padded rows.
    #[inline(always)]
    unsafe fn few_rows<S: Simd, const ROWS: usize>(&mut self, simd: S, item: &Item, piece: usize, state: *mut f32) {
        // SAFETY: this function's contract; each source is one of rows of the cache's type.
        unsafe {
            match self.problem.kv_dtype {
                DType::BF16 if S::ELEMENTS_PER_LANE == 2 => {
                    self.attend::<S, FewRows<Bf16Pairs, ROWS>>(simd, item, piece, state);
                }
                _ if S::ELEMENTS_PER_LANE == 2 => {
                    self.attend::<S, FewRows<CodePairs<S>, ROWS>>(simd, item, piece, state);
                }
                DType::F16 => self.attend::<S, FewRows<Singles<f16>, ROWS>>(simd, item, piece, state),
                DType::BF16 => self.attend::<S, FewRows<Singles<bf16>, ROWS>>(simd, item, piece, state),
                DType::F32 => self.attend::<S, FewRows<Singles<f32>, ROWS>>(simd, item, piece, state),
                _ => self.attend::<S, FewRows<SingleCodes, ROWS>>(simd, item, piece, state),
            }
        }
    }

    /// # Safety
    /// As `attend_piece`; the kernel is one for the item's arrangement and the cache's type.
    #[inline(always)]
    unsafe fn attend<S: Simd, K: RowKernel<S>>(&mut self, simd: S, item: &Item, piece: usize, state: *mut f32) {
        let (problem, cache) = (self.problem, &self.cache);
        let sequence = &self.plan.sequences[item.sequence];
        let q = self.scratch.floats.as_mut_ptr();
        let buffers = self.scratch.buffers(problem.head_dim);
        let keys = item.piece(piece);
        let mut blocks = [KeyBlock::empty(), KeyBlock::empty()];
        let [block, next] = &mut blocks;
        let (mut block, mut next) = (block, next);
        let block_at = |first: usize| first.min(keys.end)..(first + K::KEYS).min(keys.end);
        // SAFETY: keys of the sequence, at most BLOCK of them; their pages' ids are a view of the problem.
        unsafe { block.find(cache, sequence, block_at(keys.start)) };
        while block.len > 0 {
            // SAFETY: the keys after those, likewise of the sequence.
            unsafe { next.find(cache, sequence, block_at(block.first + K::KEYS)) };
            let mut ahead = Ahead::new(cache, next, item.heads.clone());
            for (head, kv_head) in item.heads.clone().enumerate() {
                // SAFETY: page ids are clamped, so that the rows are the cache's; scales are views of the problem; queries,
                // state, lanes and buffers are sized for the item.
                unsafe {
                    let block_step = BlockStep {
                        rows: block.of_head(cache, kv_head),
                        q: q.wrapping_add(head * item.q_len),
                        state: State::of_head(item, state, head),
                        lanes: &self.scratch.lanes,
                        head,
                        form: ScoreForm::of_head(problem, kv_head),
                        kv_dtype: problem.kv_dtype,
                        d: problem.head_dim,
                        dv: problem.value_dim,
                    };
                    K::attend(simd, block_step, &mut ahead, buffers);
                }
            }
            std::mem::swap(&mut block, &mut next);
        }
    }

    /// # Safety
    /// `total` and `part` are states of the item.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&self, simd: S, item: &Item, total: *mut f32, part: *mut f32) {
        for head in 0..item.heads.len() {
            let (total, part) = (State::of_head(item, total, head), State::of_head(item, part, head));
            // SAFETY: both are states of this item's head.
            unsafe { total.merge(simd, part, item.arrangement, self.problem.value_dim) };
        }
    }
}

/// No key seen, for any KV head.
///
/// # Safety
/// `state` has [`Item::state_len`] writable elements.
unsafe fn reset(item: &Item, state: *mut f32) {
    for head in 0..item.heads.len() {
        // SAFETY: the state of one of the item's heads.
        unsafe { State::of_head(item, state, head).reset(item) };
    }
}
