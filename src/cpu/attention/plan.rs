//! The work of a call: query rows cut into work tiles, long work tiles cut by keys into KV splits.
//!
//! The tiles and splits of a sequence depend on its own lengths and on static sizes only. The number of threads decides
//! whether the splits of a tile are computed by several threads or by one, which gives the same bits.

use super::sequences::{Sequence, Window, gaps, sequences};
use crate::error::{Result, push};
use crate::problem::attention::Attention;
use std::ops::Range;

/// Query rows (queries x query heads of a group) of a tile of the GEMM path.
const ROWS: usize = 256;
/// A sequence with at most this many rows per KV head is one tile for all KV heads, so that the cache is read in the
/// order of its memory.
const ALL_HEADS_ROWS: usize = 32;
/// K and V elements of a KV split: enough work to pay for merging its partial result.
const SPLIT_ELEMENTS: usize = 1 << 19;
/// Maximum KV splits of a tile, so that the partial results do not grow with the context.
const MAX_SPLITS: usize = 32;
/// Every KV split but the last has a multiple of this many keys.
const SPLIT_ALIGNMENT: usize = 128;
/// Padding rows that one task clears.
const CLEAR_ROWS: usize = 64;

/// Which dimension of the queries lies along the lanes of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueryLayout {
    /// A lane per query row: the GEMM path (`gemm`).
    RowsInLanes,
    /// Lanes along the head dimension, for this many query rows, padded to a power of two: the GEMV path (`gemv`).
    HeadDimInLanes(usize),
}

/// A work tile: queries of one sequence for one KV head or for all.
#[derive(Clone, Debug)]
pub(super) struct WorkTile {
    /// Index into [`FwdPlan::sequences`].
    pub(super) sequence: usize,
    pub(super) queries: Range<usize>,
    /// KV heads.
    pub(super) heads: Range<usize>,
    /// All keys that at least one of the queries attends to.
    pub(super) keys: Range<usize>,
    pub(super) layout: QueryLayout,
    /// Elements of m, and of l, per KV head.
    pub(super) lanes: usize,
    /// f32-sized lanes of packed q per KV head.
    pub(super) q_len: usize,
    /// Elements of o per KV head.
    pub(super) o_len: usize,
    /// Keys of a KV split.
    split_len: usize,
}

impl WorkTile {
    pub(super) fn num_splits(&self) -> usize {
        self.keys.len().div_ceil(self.split_len)
    }

    /// The keys of a KV split.
    pub(super) fn split(&self, index: usize) -> Range<usize> {
        let first = self.keys.start + index * self.split_len;
        first..(first + self.split_len).min(self.keys.end)
    }

    /// Whether reading K and V is a large part of the tile's time.
    pub(super) fn has_few_rows(&self) -> bool {
        self.lanes <= ALL_HEADS_ROWS
    }

    /// Elements of (o, m, l) for one KV head.
    pub(super) fn head_state_len(&self) -> usize {
        self.o_len + 2 * self.lanes
    }

    /// Elements of (o, m, l) for all KV heads of the tile.
    pub(super) fn state_len(&self) -> usize {
        self.heads.len() * self.head_state_len()
    }

    /// An estimate, for ordering tasks and balancing threads.
    fn cost(&self) -> u64 {
        self.heads.len() as u64 * (self.keys.len() as u64 + 16) * (self.lanes as u64 + 16)
    }
}

/// One index of the first parallel loop.
#[derive(Clone, Debug)]
pub(super) enum FwdTask {
    /// All KV splits of `tiles[tile]`, then the output.
    Tile { tile: usize },
    /// One KV split; its state goes to `partials[offset..]`.
    Split { tile: usize, split: usize, offset: usize },
    /// Rows that belong to no sequence.
    Clear(Range<usize>),
}

impl FwdTask {
    /// (tile, split): a total order of the tasks, which breaks ties of their costs.
    fn order(&self) -> (usize, usize) {
        match *self {
            Self::Tile { tile } => (tile, 0),
            Self::Split { tile, split, .. } => (tile, split),
            Self::Clear(_) => (usize::MAX, 0),
        }
    }
}

/// One index of the second parallel loop: merge the states of all KV splits of a tile, which lie one after the other
/// from `partials[offset]` on, and store the output.
#[derive(Clone, Copy, Debug)]
pub(super) struct Combine {
    pub(super) tile: usize,
    pub(super) offset: usize,
}

/// The work of a call to attention.
#[derive(Debug)]
pub(super) struct FwdPlan {
    pub(super) sequences: Vec<Sequence>,
    pub(super) tiles: Vec<WorkTile>,
    /// Most expensive first.
    pub(super) tasks: Vec<FwdTask>,
    /// Run after the tasks.
    pub(super) combines: Vec<Combine>,
    /// Elements of all partial results.
    pub(super) partials_len: usize,
    /// The sum of the tiles' costs.
    pub(super) cost: u64,
}

impl FwdPlan {
    /// The plan for vectors of `shape`: (lanes, elements per lane while they are multiplied).
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    ///
    /// # Safety
    /// The problem's metadata is readable.
    pub(super) unsafe fn new(problem: &Attention, shape: (usize, usize), threads: usize) -> Result<Self> {
        // SAFETY: the caller guarantees that the metadata is readable.
        let sequences = unsafe { sequences(problem) }?;
        let mut tiles = Vec::new();
        for (index, sequence) in sequences.iter().enumerate() {
            push_tiles(problem, index, sequence, shape, &mut tiles)?;
        }
        let mut plan = Self { sequences, tiles, tasks: Vec::new(), combines: Vec::new(), partials_len: 0, cost: 0 };
        plan.schedule(problem.num_rows, threads)?;
        Ok(plan)
    }

    /// (row of q, query head) of row `row` of a tile for one of its KV heads, where `group` query heads share a KV
    /// head.
    pub(super) fn query_of_row(&self, tile: &WorkTile, kv_head: usize, row: usize, group: usize) -> (usize, usize) {
        let first = self.sequences[tile.sequence].first_row + tile.queries.start;
        (first + row / group, kv_head * group + row % group)
    }

    /// Fill `tasks` and `combines` from `sequences` and `tiles`.
    fn schedule(&mut self, rows: usize, threads: usize) -> Result {
        self.cost = self.tiles.iter().map(WorkTile::cost).sum();
        // Tasks of at most a quarter of a thread's share: the last one to end then runs alone only for a short time.
        let fair = self.cost / (4 * threads as u64);
        for (tile, it) in self.tiles.iter().enumerate() {
            if threads == 1 || it.num_splits() < 2 || it.cost() <= fair {
                push(&mut self.tasks, FwdTask::Tile { tile })?;
                continue;
            }
            push(&mut self.combines, Combine { tile, offset: self.partials_len })?;
            for split in 0..it.num_splits() {
                push(&mut self.tasks, FwdTask::Split { tile, split, offset: self.partials_len })?;
                self.partials_len += it.state_len();
            }
        }
        let tiles = &self.tiles;
        let cost = |task: &FwdTask| match *task {
            FwdTask::Tile { tile } => tiles[tile].cost(),
            FwdTask::Split { tile, .. } => tiles[tile].cost() / tiles[tile].num_splits() as u64,
            FwdTask::Clear(_) => 0,
        };
        // A stable sort would allocate.
        self.tasks.sort_unstable_by_key(|task| (std::cmp::Reverse(cost(task)), task.order()));
        for rows in gaps(self.sequences.iter().map(Sequence::rows), rows, CLEAR_ROWS) {
            push(&mut self.tasks, FwdTask::Clear(rows))?;
        }
        Ok(())
    }
}

/// Cut a sequence into work tiles.
fn push_tiles(
    problem: &Attention,
    index: usize,
    sequence: &Sequence,
    (lanes, elements_per_lane): (usize, usize),
    tiles: &mut Vec<WorkTile>,
) -> Result {
    let (heads, d, dv) = (problem.num_kv_heads, problem.head_dim, problem.value_dim);
    let group = problem.num_q_heads / heads;
    let rows = sequence.len_q * group;
    if rows == 0 {
        return Ok(());
    }
    let window = Window::of(&problem.score);
    let tile_heads = if rows <= ALL_HEADS_ROWS.max(lanes / 2) { heads } else { 1 };
    let tile_queries = if tile_heads > 1 { sequence.len_q } else { (ROWS / group).max(1) };
    for first in (0..sequence.len_q).step_by(tile_queries) {
        let queries = first..(first + tile_queries).min(sequence.len_q);
        let rows = queries.len() * group;
        let layout = if rows <= lanes / 2 {
            QueryLayout::HeadDimInLanes(rows.next_power_of_two())
        } else {
            QueryLayout::RowsInLanes
        };
        let (tile_lanes, q_len, o_len) = match layout {
            QueryLayout::RowsInLanes => {
                let padded = rows.next_multiple_of(lanes);
                (padded, padded * d / elements_per_lane, padded * dv)
            }
            QueryLayout::HeadDimInLanes(padded) => {
                let row_len = (d / elements_per_lane).next_multiple_of(lanes);
                (lanes, padded * row_len, padded * dv.next_multiple_of(lanes))
            }
        };
        let keys = sequence.visible_to_any(&queries, window);
        // At least 1, also if there is no key, or if the heads of one token have more than SPLIT_ELEMENTS.
        let split_len = (SPLIT_ELEMENTS / (tile_heads * (d + dv))).max(keys.len().div_ceil(MAX_SPLITS)).max(1);
        for head in (0..heads).step_by(tile_heads) {
            let tile = WorkTile {
                sequence: index,
                queries: queries.clone(),
                heads: head..head + tile_heads,
                keys: keys.clone(),
                layout,
                lanes: tile_lanes,
                q_len,
                o_len,
                split_len: split_len.next_multiple_of(SPLIT_ALIGNMENT),
            };
            push(tiles, tile)?;
        }
    }
    Ok(())
}
