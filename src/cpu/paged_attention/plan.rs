//! What there is to do: the metadata read and clamped once, query rows cut into items, long items cut by keys.
//!
//! How a sequence is cut depends on that sequence and on static sizes only; what the number of threads decides is
//! whether the pieces of one item are computed by several threads or by one, which gives the same bits.

use crate::ops::paged_attention::PagedAttention;
use std::ops::Range;

/// Query rows (queries x heads of a group) of an item with many rows.
const ROWS: usize = 128;
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

/// One of the first `num_seqs` sequences, its metadata clamped as SPEC 2.1 defines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    pub(super) first_row: usize,
    pub(super) len_q: usize,
    pub(super) len_k: usize,
    /// Page ids; entries below `ceil(len_k / page_size)` may be read, and are not to be trusted
    pub(super) pages: *const i32,
}

// SAFETY: an address and numbers.
unsafe impl Send for Sequence {}
// SAFETY: as above.
unsafe impl Sync for Sequence {}

impl Sequence {
    /// Keys that query `i` sees; empty ranges are `0..0`.
    pub(super) fn visible(&self, i: usize, window_left: i64) -> Range<usize> {
        let last = (i + self.len_k) as i64 - self.len_q as i64;
        if last < 0 {
            return 0..0;
        }
        let first = if window_left < 0 { 0 } else { last.saturating_sub(window_left).max(0) };
        first as usize..last as usize + 1
    }

    /// Keys that some of the queries see: their ranges overlap or touch, so there is no gap.
    fn visible_to_any(&self, queries: &Range<usize>, window_left: i64) -> Range<usize> {
        let first_seeing = queries.start.max(self.len_q.saturating_sub(self.len_k));
        if first_seeing >= queries.end {
            return 0..0;
        }
        self.visible(first_seeing, window_left).start..self.visible(queries.end - 1, window_left).end
    }
}

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
    /// Elements of q, and of o, for one KV head
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
    /// `[T]`: the sequence that writes the row, or `u32::MAX`
    pub(super) owner: Vec<u32>,
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
    /// `lanes`: f32 in a vector.
    ///
    /// # Safety
    /// The problem's metadata is readable.
    pub(super) unsafe fn new(problem: &PagedAttention, lanes: usize, threads: usize) -> Self {
        // SAFETY: the caller's word.
        let sequences = unsafe { sequences(problem) };
        let owner = owners(&sequences, problem.num_rows);
        let mut items = Vec::new();
        for (index, sequence) in sequences.iter().enumerate() {
            cut(problem, index, sequence, lanes, &mut items);
        }
        let mut plan =
            Self { sequences, owner, items, tasks: Vec::new(), merges: Vec::new(), partials_len: 0, cost: 0 };
        plan.schedule(threads);
        plan
    }

    /// Fill `tasks` and `merges` from `items` and `owner`.
    fn schedule(&mut self, threads: usize) {
        self.cost = self.items.iter().map(Item::cost).sum();
        // With fair shares at most a quarter of a thread's work, the last task to end is not long alone.
        let fair = self.cost / (4 * threads as u64);
        let mut order: Vec<(u64, Task)> = Vec::with_capacity(self.items.len());
        for (item, it) in self.items.iter().enumerate() {
            if threads == 1 || it.pieces() < 2 || it.cost() <= fair {
                order.push((it.cost(), Task::Whole { item }));
                continue;
            }
            self.merges.push(Merge { item, offset: self.partials_len });
            for piece in 0..it.pieces() {
                order.push((it.cost() / it.pieces() as u64, Task::Piece { item, piece, offset: self.partials_len }));
                self.partials_len += it.state_len();
            }
        }
        order.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
        self.tasks = order.into_iter().map(|(_, task)| task).collect();
        let rows = self.owner.len();
        let mut row = 0;
        while row < rows {
            if self.owner[row] != u32::MAX {
                row += 1;
                continue;
            }
            let last = (row + CLEAR_ROWS).min(rows);
            let end = (row..last).find(|r| self.owner[*r] != u32::MAX).unwrap_or(last);
            self.tasks.push(Task::Clear(row..end));
            row = end;
        }
    }
}

/// The sequences in use.
///
/// # Safety
/// `num_seqs`, and S or S+1 entries of the other arrays, are readable.
unsafe fn sequences(problem: &PagedAttention) -> Vec<Sequence> {
    // SAFETY: one element.
    let wanted = unsafe { problem.num_seqs.read() };
    let n = usize::try_from(wanted).unwrap_or(0).min(problem.max_seqs);
    let capacity = if problem.num_pages == 0 { 0 } else { problem.max_pages * problem.page_size };
    let clamp = |x: i32, low: usize, high: usize| usize::try_from(x).unwrap_or(0).clamp(low, high);
    (0..n)
        .map(|b| {
            // SAFETY: b < S; starts has S+1 entries.
            let (start, end, len_k) = unsafe {
                let starts = problem.query_start_loc.add(b);
                (starts.read(), starts.add(1).read(), problem.context_lens.add(b).read())
            };
            let first_row = clamp(start, 0, problem.num_rows);
            Sequence {
                first_row,
                len_q: clamp(end, first_row, problem.num_rows) - first_row,
                len_k: clamp(len_k, 0, capacity),
                // An address only: nothing is read where there is no key.
                pages: problem.block_tables.wrapping_offset(b as isize * problem.block_table_stride as isize),
            }
        })
        .collect()
}

/// Which sequence writes each row: where starts are out of order, two may claim it, and the last one has it.
fn owners(sequences: &[Sequence], rows: usize) -> Vec<u32> {
    let mut owner = vec![u32::MAX; rows];
    for (index, s) in sequences.iter().enumerate() {
        owner[s.first_row..s.first_row + s.len_q].fill(index as u32);
    }
    owner
}

/// Cut a sequence into items.
fn cut(problem: &PagedAttention, index: usize, sequence: &Sequence, lanes: usize, items: &mut Vec<Item>) {
    let (heads, d) = (problem.num_kv_heads, problem.head_dim);
    let group = problem.num_q_heads / heads;
    let rows = sequence.len_q * group;
    if rows == 0 {
        return;
    }
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
        let (item_lanes, o_len) = match arrangement {
            Arrangement::RowPerLane => (rows.next_multiple_of(lanes), rows.next_multiple_of(lanes) * d),
            Arrangement::VectorPerRow(padded) => (lanes, padded * d.next_multiple_of(lanes)),
        };
        let keys = sequence.visible_to_any(&queries, problem.window_left);
        let piece_len = (PIECE_ELEMENTS / (2 * together * d)).max(keys.len().div_ceil(MAX_PIECES));
        for head in (0..heads).step_by(together) {
            items.push(Item {
                sequence: index,
                queries: queries.clone(),
                heads: head..head + together,
                keys: keys.clone(),
                arrangement,
                lanes: item_lanes,
                o_len,
                piece_len: piece_len.next_multiple_of(PIECE_STEP),
            });
        }
    }
}
