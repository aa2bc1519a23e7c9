//! What there is to do: query rows cut into items, long items cut by keys.
//!
//! How a sequence is cut depends on that sequence and on static sizes only; what the number of threads decides is
//! whether the pieces of one item are computed by several threads or by one, which gives the same bits.

use super::sequences::{Sequence, Window, gaps, sequences};
use crate::error::{Result, push};
use crate::problem::attention::Attention;
use std::ops::Range;

/// Query rows (queries x heads of a group) of an item with many rows.
const ROWS: usize = 256;
/// Up to this many rows, an item takes all KV heads of its sequence, to read the cache in the order of its memory.
const ALL_HEADS_ROWS: usize = 32;
/// K and V elements of one piece of an item: long enough to pay for merging the piece's result.
const PIECE_ELEMENTS: usize = 1 << 19;
/// The most pieces of an item: what they store does not grow with the context.
const MAX_PIECES: usize = 32;
/// Every piece but the last has a multiple of this many keys.
pub(super) const PIECE_STEP: usize = 128;
/// Rows of no sequence that one task clears.
const CLEAR_ROWS: usize = 64;

/// How the query rows of one KV head lie in vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    /// A lane for each row (`many_rows`).
    RowPerLane,
    /// A vector along the head dimension for each of so many padded rows, a power of two (`few_rows`).
    VectorPerRow(usize),
}

/// Queries of one sequence for some KV heads.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// Index into [`Plan::sequences`]
    pub(super) sequence: usize,
    pub(super) queries: Range<usize>,
    /// KV heads
    pub(super) heads: Range<usize>,
    /// All keys that some of the queries see
    pub(super) keys: Range<usize>,
    pub(super) arrangement: Arrangement,
    /// Elements of m, and of l, for one KV head
    pub(super) lanes: usize,
    /// Words of q for one KV head
    pub(super) q_len: usize,
    /// Elements of o for one KV head
    pub(super) o_len: usize,
    piece_len: usize,
}

impl Item {
    pub(super) fn pieces(&self) -> usize {
        self.keys.len().div_ceil(self.piece_len)
    }

    pub(super) fn piece(&self, index: usize) -> Range<usize> {
        let first = self.keys.start + index * self.piece_len;
        first..(first + self.piece_len).min(self.keys.end)
    }

    /// Elements of (o, m, l) for one KV head.
    pub(super) fn head_state_len(&self) -> usize {
        self.o_len + 2 * self.lanes
    }

    /// Elements of (o, m, l) for all KV heads of the item.
    pub(super) fn state_len(&self) -> usize {
        self.heads.len() * self.head_state_len()
    }

    /// For ordering and balance only.
    fn cost(&self) -> u64 {
        self.heads.len() as u64 * (self.keys.len() as u64 + 16) * (self.lanes as u64 + 16)
    }
}

impl Task {
    /// The item and the piece of it; an order in which each task has its place.
    fn place(&self) -> (usize, usize) {
        match *self {
            Self::Whole { item } => (item, 0),
            Self::Piece { item, piece, .. } => (item, piece),
            Self::Clear(_) => (usize::MAX, 0),
        }
    }
}

/// One index of the parallel loop.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// All pieces of `items[item]`, then its results.
    Whole { item: usize },
    /// One piece; its state goes to `partials[offset..]`.
    Piece { item: usize, piece: usize, offset: usize },
    /// Rows that belong to no sequence.
    Clear(Range<usize>),
}

/// The states of all pieces of an item, which follow one another in the partial results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge {
    pub(super) item: usize,
    pub(super) offset: usize,
}

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) sequences: Vec<Sequence>,
    pub(super) items: Vec<Item>,
    /// Largest first
    pub(super) tasks: Vec<Task>,
    /// To be done after the tasks
    pub(super) merges: Vec<Merge>,
    /// Elements of all partial results
    pub(super) partials_len: usize,
    /// The sum of the items' costs
    pub(super) cost: u64,
}

impl Plan {
    /// For vectors of so many lanes, each of which holds `elements_per_lane` elements while they are multiplied.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    ///
    /// # Safety
    /// The problem's metadata is readable.
    pub(super) unsafe fn new(problem: &Attention, vector: (usize, usize), threads: usize) -> Result<Self> {
        // SAFETY: the caller's word.
        let sequences = unsafe { sequences(problem) }?;
        let mut items = Vec::new();
        for (index, sequence) in sequences.iter().enumerate() {
            cut(problem, index, sequence, vector, &mut items)?;
        }
        let mut plan = Self { sequences, items, tasks: Vec::new(), merges: Vec::new(), partials_len: 0, cost: 0 };
        plan.schedule(problem.num_rows, threads)?;
        Ok(plan)
    }

    /// (row of the query, query head) of an item's row for one of its KV heads, each read by `group` query heads.
    pub(super) fn query_of_row(&self, item: &Item, kv_head: usize, row: usize, group: usize) -> (usize, usize) {
        let first = self.sequences[item.sequence].first_row + item.queries.start;
        (first + row / group, kv_head * group + row % group)
    }

    /// Fill `tasks` and `merges` from `sequences` and `items`.
    fn schedule(&mut self, rows: usize, threads: usize) -> Result {
        self.cost = self.items.iter().map(Item::cost).sum();
        // With fair shares at most a quarter of a thread's work, the last task to end is not long alone.
        let fair = self.cost / (4 * threads as u64);
        for (item, it) in self.items.iter().enumerate() {
            if threads == 1 || it.pieces() < 2 || it.cost() <= fair {
                push(&mut self.tasks, Task::Whole { item })?;
                continue;
            }
            push(&mut self.merges, Merge { item, offset: self.partials_len })?;
            for piece in 0..it.pieces() {
                push(&mut self.tasks, Task::Piece { item, piece, offset: self.partials_len })?;
                self.partials_len += it.state_len();
            }
        }
        let items = &self.items;
        let cost = |task: &Task| match *task {
            Task::Whole { item } => items[item].cost(),
            Task::Piece { item, .. } => items[item].cost() / items[item].pieces() as u64,
            Task::Clear(_) => 0,
        };
        // A stable sort would take memory.
        self.tasks.sort_unstable_by_key(|task| (std::cmp::Reverse(cost(task)), task.place()));
        for rows in gaps(self.sequences.iter().map(Sequence::rows), rows, CLEAR_ROWS) {
            push(&mut self.tasks, Task::Clear(rows))?;
        }
        Ok(())
    }
}

/// Cut a sequence into items.
fn cut(
    problem: &Attention,
    index: usize,
    sequence: &Sequence,
    (lanes, elements_per_lane): (usize, usize),
    items: &mut Vec<Item>,
) -> Result {
    let (heads, d, dv) = (problem.num_kv_heads, problem.head_dim, problem.value_dim);
    let group = problem.num_q_heads / heads;
    let rows = sequence.len_q * group;
    if rows == 0 {
        return Ok(());
    }
    let window = Window::of(&problem.score);
    let together = if rows <= ALL_HEADS_ROWS.max(lanes / 2) { heads } else { 1 };
    let queries_each = if together > 1 { sequence.len_q } else { (ROWS / group).max(1) };
    for first in (0..sequence.len_q).step_by(queries_each) {
        let queries = first..(first + queries_each).min(sequence.len_q);
        let rows = queries.len() * group;
        let arrangement = if rows <= lanes / 2 {
            Arrangement::VectorPerRow(rows.next_power_of_two())
        } else {
            Arrangement::RowPerLane
        };
        let (item_lanes, q_len, o_len) = match arrangement {
            Arrangement::RowPerLane => {
                let padded = rows.next_multiple_of(lanes);
                (padded, padded * d / elements_per_lane, padded * dv)
            }
            Arrangement::VectorPerRow(padded) => {
                (lanes, padded * (d / elements_per_lane).next_multiple_of(lanes), padded * dv.next_multiple_of(lanes))
            }
        };
        let keys = sequence.visible_to_any(&queries, window);
        // At least one step, also where there is no key and a token of all heads is longer than a piece.
        let piece_len = (PIECE_ELEMENTS / (together * (d + dv))).max(keys.len().div_ceil(MAX_PIECES)).max(1);
        for head in (0..heads).step_by(together) {
            let item = Item {
                sequence: index,
                queries: queries.clone(),
                heads: head..head + together,
                keys: keys.clone(),
                arrangement,
                lanes: item_lanes,
                q_len,
                o_len,
                piece_len: piece_len.next_multiple_of(PIECE_STEP),
            };
            push(items, item)?;
        }
    }
    Ok(())
}
