//! What there is to do: the rows of a sequence that read one KV head, whole or cut.

use crate::cpu::attention::sequences::{Sequence, Window, gaps, sequences};
use crate::error::{Result, push, with_room};
use crate::problem::attention::Attention;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::ops::Range;

/// Keys of a block.
pub(super) const KEYS: usize = 128;
/// Query rows (queries x heads of a group) of an item that is cut by queries.
const ROWS: usize = 256;
/// The most elements of dq that an item keeps as f32.
const MOST_DQ: usize = 1 << 22;
/// Keys without a gradient that one task clears.
const CLEAR_KEYS: usize = 256;

/// Which gradients an item gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    All,
    /// dq
    Queries,
    /// dk and dv
    Keys,
}

impl Wants {
    pub(super) fn queries(self) -> bool {
        self != Self::Keys
    }
    pub(super) fn keys(self) -> bool {
        self != Self::Queries
    }
    /// Products for each pair of a row and a key.
    fn products(self) -> u64 {
        match self {
            Self::All => 5,
            Self::Queries => 3,
            Self::Keys => 4,
        }
    }
}

/// Queries of one sequence that read one KV head, and the keys that they meet. What it gives to its queries is complete if
/// it wants that, and so for keys.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// Index into [`Plan::sequences`]
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) queries: Range<usize>,
    /// Each of them is seen by a query of the sequence.
    pub(super) keys: Range<usize>,
    pub(super) wants: Wants,
}

impl Item {
    /// Query rows, each KV head being read by `group` query heads.
    pub(super) fn rows(&self, group: usize) -> usize {
        self.queries.len() * group
    }

    /// For ordering and balance only.
    fn cost(&self, group: usize) -> u64 {
        let (rows, keys) = (self.rows(group) as u64, self.keys.len() as u64);
        self.wants.products() * (rows + 16) * (keys + 16)
    }
}

/// One index of the parallel loop.
#[derive(Clone, Debug)]
pub(super) enum Task {
    Item(Item),
    /// Keys that no query sees.
    Clear(Range<usize>),
}

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) sequences: Vec<Sequence>,
    /// Largest first
    pub(super) tasks: Vec<Task>,
    /// Elements of the largest dq that an item keeps
    pub(super) dq_len: usize,
    /// The sum of the items' costs
    pub(super) cost: u64,
}

impl Plan {
    /// For vectors of so many lanes.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    ///
    /// # Safety
    /// The problem's metadata is readable.
    pub(super) unsafe fn new(problem: &FlashAttnVarlenBwd, lanes: usize, threads: usize) -> Result<Self> {
        let forward = &problem.forward;
        // SAFETY: the caller's word.
        let sequences = unsafe { sequences(forward) }?;
        let mut plan = Self { sequences, tasks: Vec::new(), dq_len: 0, cost: 0 };
        plan.schedule(forward, lanes, threads)?;
        let window = Window::of(&forward.score);
        let seen = plan.sequences.iter().map(|s| {
            let seen = s.visible_to_any(&(0..s.len_q), window);
            let first = s.keys.first_row();
            first + seen.start..first + seen.end
        });
        for keys in gaps(seen, problem.num_keys, CLEAR_KEYS) {
            push(&mut plan.tasks, Task::Clear(keys))?;
        }
        Ok(plan)
    }

    /// Whether row `t` is a query of a sequence.
    pub(super) fn is_query(&self, t: usize) -> bool {
        // Rows are in order: of the sequences that begin at or before this row, it can only be the last one's.
        let after = self.sequences.partition_point(|sequence| sequence.first_row <= t);
        after > 0 && self.sequences[after - 1].rows().contains(&t)
    }

    /// Put the items into `tasks`.
    fn schedule(&mut self, forward: &Attention, lanes: usize, threads: usize) -> Result {
        let group = forward.num_q_heads / forward.num_kv_heads;
        let window = Window::of(&forward.score);
        let whole = |index: usize, sequence: &Sequence, kv_head: usize| {
            let queries = 0..sequence.len_q;
            let keys = sequence.visible_to_any(&queries, window);
            Item { sequence: index, kv_head, queries, keys, wants: Wants::All }
        };
        let sequences = || self.sequences.iter().enumerate().filter(|(_, s)| s.len_q > 0);
        let items = || sequences().flat_map(|(i, s)| (0..forward.num_kv_heads).map(move |h| whole(i, s, h)));
        self.cost = items().map(|item| item.cost(group)).sum();
        // With fair shares at most a quarter of a thread's work, the last task to end is not long alone.
        let fair = self.cost / (4 * threads as u64);
        let dq_len = |item: &Item| item.rows(group).next_multiple_of(lanes) * forward.head_dim;
        let mut order: Vec<Item> = Vec::new();
        for item in items() {
            if (threads == 1 || item.cost(group) <= fair) && dq_len(&item) <= MOST_DQ {
                push(&mut order, item)?;
            } else {
                cut(&item, &self.sequences[item.sequence], window, group, &mut order)?;
            }
        }
        self.dq_len = order.iter().filter(|item| item.wants.queries()).map(dq_len).max().unwrap_or(0);
        // A stable sort would take memory.
        order.sort_unstable_by_key(|item| (std::cmp::Reverse(item.cost(group)), item.sequence, item.kv_head));
        self.tasks = with_room(order.len())?;
        self.tasks.extend(order.into_iter().map(Task::Item));
        Ok(())
    }
}

/// Cut an item by its queries, and once more by its keys.
fn cut(item: &Item, sequence: &Sequence, window: Window, group: usize, items: &mut Vec<Item>) -> Result {
    for first in item.queries.clone().step_by((ROWS / group).max(1)) {
        let queries = first..(first + (ROWS / group).max(1)).min(item.queries.end);
        let keys = sequence.visible_to_any(&queries, window);
        push(items, Item { queries, keys, wants: Wants::Queries, ..item.clone() })?;
    }
    for first in item.keys.clone().step_by(KEYS) {
        let keys = first..(first + KEYS).min(item.keys.end);
        push(items, Item { keys, wants: Wants::Keys, ..item.clone() })?;
    }
    Ok(())
}
