//! The work of a call: the rows of each sequence that read one KV head, whole or cut.

use crate::cpu::attention::sequences::{Sequence, Window, gaps, sequences};
use crate::error::{Result, push, with_room};
use crate::problem::attention::Attention;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::ops::Range;

/// Keys of a block.
pub(super) const KEYS: usize = 128;
/// Query rows (queries x query heads of a group) of a tile that is cut by queries.
const ROWS: usize = 256;
/// Maximum elements of dQ that a tile accumulates in f32.
const MAX_DQ: usize = 1 << 22;
/// Keys without a gradient that one task clears.
const CLEAR_KEYS: usize = 256;

/// The gradients that a tile computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gradients {
    All,
    Dq,
    DkDv,
}

impl Gradients {
    pub(super) fn dq(self) -> bool {
        self != Self::DkDv
    }
    pub(super) fn dk_dv(self) -> bool {
        self != Self::Dq
    }
    /// Matrix products per pair of a row and a key.
    fn products(self) -> u64 {
        match self {
            Self::All => 5,
            Self::Dq => 3,
            Self::DkDv => 4,
        }
    }
}

/// A work tile: queries of one sequence that read one KV head, and keys that they attend to. The tile computes its
/// gradients completely: with dQ it has all keys of its queries, with dK and dV all queries of its keys.
#[derive(Clone, Debug)]
pub(super) struct BwdTile {
    /// Index into [`BwdPlan::sequences`].
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) queries: Range<usize>,
    /// At least one query of the sequence attends to each of them.
    pub(super) keys: Range<usize>,
    pub(super) gradients: Gradients,
}

impl BwdTile {
    /// Query rows, where `group` query heads share a KV head.
    pub(super) fn rows(&self, group: usize) -> usize {
        self.queries.len() * group
    }

    /// An estimate, for ordering tasks and balancing threads.
    fn cost(&self, group: usize) -> u64 {
        let (rows, keys) = (self.rows(group) as u64, self.keys.len() as u64);
        self.gradients.products() * (rows + 16) * (keys + 16)
    }
}

/// One index of the parallel loop.
#[derive(Clone, Debug)]
pub(super) enum BwdTask {
    Tile(BwdTile),
    /// Keys that no query attends to.
    Clear(Range<usize>),
}

/// The work of a call.
#[derive(Debug)]
pub(super) struct BwdPlan {
    pub(super) sequences: Vec<Sequence>,
    /// Most expensive first.
    pub(super) tasks: Vec<BwdTask>,
    /// Elements of the largest dQ that a tile accumulates.
    pub(super) dq_len: usize,
    /// The sum of the costs of uncut tiles.
    pub(super) cost: u64,
}

impl BwdPlan {
    /// The plan for vectors of `lanes` f32.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    ///
    /// # Safety
    /// The problem's metadata is readable.
    pub(super) unsafe fn new(problem: &FlashAttnVarlenBwd, lanes: usize, threads: usize) -> Result<Self> {
        let forward = &problem.forward;
        // SAFETY: the caller guarantees that the metadata is readable.
        let sequences = unsafe { sequences(forward) }?;
        let mut plan = Self { sequences, tasks: Vec::new(), dq_len: 0, cost: 0 };
        plan.schedule(forward, lanes, threads)?;
        let window = Window::of(&forward.score);
        let visible = plan.sequences.iter().map(|s| {
            let visible = s.visible_to_any(&(0..s.len_q), window);
            let first = s.keys.first_row();
            first + visible.start..first + visible.end
        });
        for keys in gaps(visible, problem.num_keys, CLEAR_KEYS) {
            push(&mut plan.tasks, BwdTask::Clear(keys))?;
        }
        Ok(plan)
    }

    /// Whether row `t` is a query of a sequence.
    pub(super) fn is_query(&self, t: usize) -> bool {
        // The rows of sequences are in order and disjoint, so only the last sequence that begins at or before t can
        // have t.
        let after = self.sequences.partition_point(|sequence| sequence.first_row <= t);
        after > 0 && self.sequences[after - 1].rows().contains(&t)
    }

    /// Put the tiles into `tasks`.
    fn schedule(&mut self, forward: &Attention, lanes: usize, threads: usize) -> Result {
        let group = forward.num_q_heads / forward.num_kv_heads;
        let window = Window::of(&forward.score);
        let whole = |index: usize, sequence: &Sequence, kv_head: usize| {
            let queries = 0..sequence.len_q;
            let keys = sequence.visible_to_any(&queries, window);
            BwdTile { sequence: index, kv_head, queries, keys, gradients: Gradients::All }
        };
        let sequences = || self.sequences.iter().enumerate().filter(|(_, s)| s.len_q > 0);
        let tiles = || sequences().flat_map(|(i, s)| (0..forward.num_kv_heads).map(move |h| whole(i, s, h)));
        self.cost = tiles().map(|tile| tile.cost(group)).sum();
        // Tasks of at most a quarter of a thread's share: the last one to end then runs alone only for a short time.
        let fair = self.cost / (4 * threads as u64);
        let dq_len = |tile: &BwdTile| tile.rows(group).next_multiple_of(lanes) * forward.head_dim;
        let mut order: Vec<BwdTile> = Vec::new();
        for tile in tiles() {
            if (threads == 1 || tile.cost(group) <= fair) && dq_len(&tile) <= MAX_DQ {
                push(&mut order, tile)?;
            } else {
                cut(&tile, &self.sequences[tile.sequence], window, group, &mut order)?;
            }
        }
        self.dq_len = order.iter().filter(|tile| tile.gradients.dq()).map(dq_len).max().unwrap_or(0);
        // A stable sort would allocate.
        order.sort_unstable_by_key(|tile| (std::cmp::Reverse(tile.cost(group)), tile.sequence, tile.kv_head));
        self.tasks = with_room(order.len())?;
        self.tasks.extend(order.into_iter().map(BwdTask::Tile));
        Ok(())
    }
}

/// Cut a tile by its queries for dQ, and once more by its keys for dK and dV.
fn cut(tile: &BwdTile, sequence: &Sequence, window: Window, group: usize, tiles: &mut Vec<BwdTile>) -> Result {
    for first in tile.queries.clone().step_by((ROWS / group).max(1)) {
        let queries = first..(first + (ROWS / group).max(1)).min(tile.queries.end);
        let keys = sequence.visible_to_any(&queries, window);
        push(tiles, BwdTile { queries, keys, gradients: Gradients::Dq, ..tile.clone() })?;
    }
    for first in tile.keys.clone().step_by(KEYS) {
        let keys = first..(first + KEYS).min(tile.keys.end);
        push(tiles, BwdTile { keys, gradients: Gradients::DkDv, ..tile.clone() })?;
    }
    Ok(())
}
