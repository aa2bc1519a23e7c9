//! Mask and bias per lane: which keys the query of a lane attends to, and its ALiBi slope.

use super::block_rows::BLOCK;
use super::plan::WorkTile;
use super::row_trees::RowTree;
use super::sequences::{Sequence, Window};
use crate::cpu::score_bias::{BiasRow, bias_of_lanes};
use crate::cpu::simd::{MAX_LANES, Simd};
use crate::problem::attention::Attention;
use std::ops::Range;

/// What mask and bias need to know of each lane of a work tile, in positions of the sequence. Padding lanes repeat the
/// last query row.
///
/// In the GEMV layout a lane belongs to a (key, row) pair. Its key comes `key_offset` keys after that of lane 0, which
/// all positions here have subtracted, so that one key position per step serves all lanes.
#[derive(Default)]
pub(super) struct FwdLanes {
    /// First visible key, less the lane's key offset.
    low: Vec<i32>,
    /// End of the visible keys, less the lane's key offset.
    high: Vec<i32>,
    /// Position of the query, less the lane's key offset.
    position: Vec<i32>,
    /// `[KV heads of the work tile][lanes]`, empty without ALiBi.
    slopes: Vec<f32>,
    /// The tree of the sequence.
    tree: RowTree,
    /// Query and key offset of each lane, empty without a tree.
    queries: Vec<(usize, usize)>,
    /// `[KV heads of the work tile][lanes]`, empty without a bias of pairs of rows and keys.
    bias_rows: Vec<BiasRow>,
    /// The lane's key offset.
    key_offset: Vec<i32>,
}

impl FwdLanes {
    /// Make these the lanes of `tile`.
    ///
    /// # Safety
    /// The problem's slopes and bias are readable for as long as the lanes are used; the tile is one of the sequence `index`.
    pub(super) unsafe fn set<S: Simd>(
        &mut self,
        problem: &Attention,
        tile: &WorkTile,
        (index, sequence): (usize, &Sequence),
    ) {
        let group = problem.num_q_heads / problem.num_kv_heads;
        let rows = tile.queries.len() * group;
        let window = Window::of(&problem.score);
        let row_of_lane = |lane| tile.layout.row_of_lane(lane).min(rows - 1);
        self.low.clear();
        self.high.clear();
        self.position.clear();
        self.slopes.clear();
        self.queries.clear();
        self.tree = sequence.tree;
        self.bias_rows.clear();
        self.key_offset.clear();
        for lane in 0..tile.lanes {
            let query = tile.queries.start + row_of_lane(lane) / group;
            let visible = sequence.visible(query, window);
            let key_offset = tile.layout.key_offset_of_lane(lane, S::ELEMENTS_PER_LANE) as i32;
            self.low.push(visible.start as i32 - key_offset);
            self.high.push(visible.end as i32 - key_offset);
            self.position.push(sequence.position(query) as i32 - key_offset);
            if self.tree.exists() {
                self.queries.push((query, key_offset as usize));
            }
            self.key_offset.push(key_offset);
        }
        if let Some(bias) = &problem.score.bias {
            for kv_head in tile.heads.clone() {
                self.bias_rows.extend((0..tile.lanes).map(row_of_lane).map(|row| {
                    BiasRow::of(bias, index, kv_head * group + row % group, tile.queries.start + row / group)
                }));
            }
        }
        let Some(alibi) = problem.score.alibi else { return };
        let first = if alibi.per_sequence { index * problem.num_q_heads } else { 0 };
        for kv_head in tile.heads.clone() {
            for lane in 0..tile.lanes {
                let head = kv_head * group + row_of_lane(lane) % group;
                // SAFETY: the slopes are [Hq], or [B, Hq] if each sequence has its own; head < Hq and index < B.
                self.slopes.push(unsafe { alibi.slopes.add(first + head).read() });
            }
        }
    }

    /// Those of the `len` keys from position `first` on that at least one lane attends to, relative to `first`.
    #[inline(always)]
    pub(super) fn visible_to_any(&self, lanes: &Range<usize>, first: usize, len: usize) -> Range<usize> {
        let (mut low, mut high) = (i32::MAX, 0);
        for lane in lanes.clone() {
            if self.low[lane] < self.high[lane] {
                (low, high) = (low.min(self.low[lane]), high.max(self.high[lane]));
            }
        }
        let relative = |x: i32| (i64::from(x) - first as i64).clamp(0, len as i64) as usize;
        relative(low)..relative(high)
    }

    /// Whether every lane attends to all of `keys`, which are relative to `first`.
    #[inline(always)]
    pub(super) fn visible_to_all(&self, lanes: &Range<usize>, first: usize, keys: &Range<usize>) -> bool {
        let (start, end) = ((first + keys.start) as i64, (first + keys.end) as i64);
        let is_in_range = |lane: usize| i64::from(self.low[lane]) <= start && end <= i64::from(self.high[lane]);
        lanes.clone().all(is_in_range) && self.tree.is_past(first + keys.end)
    }

    /// (low, high) of a vector of lanes, relative to `first`: a lane attends to key j of the block that begins there if
    /// `low <= j < high`.
    #[inline(always)]
    pub(super) fn visible_bounds<S: Simd>(&self, simd: S, lane: usize, first: usize) -> (S::V, S::V) {
        // Beyond a block the distance makes no difference; clamping keeps the numbers exact in f32.
        const LIMIT: i64 = 2 * BLOCK as i64;
        let clamped = |x: i64| x.clamp(-LIMIT, LIMIT);
        (relative(simd, &self.low[lane..], first, clamped), relative(simd, &self.high[lane..], first, clamped))
    }

    /// Whether the tree may hide keys before `end`.
    #[inline(always)]
    pub(super) fn has_tree_before(&self, end: usize) -> bool {
        !self.tree.is_past(end)
    }

    /// Whether the tree hides from a lane its key of the step at key `key` of the sequence.
    #[inline(always)]
    pub(super) fn is_hidden_by_tree(&self, lane: usize, key: usize) -> bool {
        let (query, key_offset) = self.queries[lane];
        !self.tree.shows(query, key + key_offset)
    }

    /// The rows of the bias of a vector of lanes, for KV head number `head` of the work tile; `None` without a bias.
    #[inline(always)]
    pub(super) fn bias_rows<S: Simd>(&self, _: S, head: usize, lane: usize) -> Option<LaneBias<'_>> {
        let rows = self.bias_rows.get(head * self.low.len() + lane..)?.get(..S::LANES)?;
        Some(LaneBias { rows, key_offset: &self.key_offset[lane..lane + S::LANES] })
    }

    /// (position relative to `first`, slope) of a vector of lanes, for KV head number `head` of the work tile; `None`
    /// without ALiBi.
    #[inline(always)]
    pub(super) fn bias<S: Simd>(&self, simd: S, head: usize, lane: usize, first: usize) -> Option<(S::V, S::V)> {
        let slopes = self.slopes.get(head * self.low.len() + lane..)?.get(..S::LANES)?;
        // SAFETY: the slice has LANES slopes.
        let slope = unsafe { simd.load(slopes.as_ptr()) };
        Some((relative(simd, &self.position[lane..], first, |x| x), slope))
    }
}

/// The bias of a vector of lanes.
#[derive(Clone, Copy)]
pub(super) struct LaneBias<'a> {
    rows: &'a [BiasRow],
    key_offset: &'a [i32],
}

impl LaneBias<'_> {
    /// The biases where the key of lane 0 is `key`.
    ///
    /// # Safety
    /// The bias is readable.
    #[inline(always)]
    pub(super) unsafe fn at<S: Simd>(self, simd: S, key: usize) -> S::V {
        // SAFETY: the caller guarantees readable rows.
        unsafe { bias_of_lanes(simd, self.rows, |lane| key + self.key_offset[lane] as usize) }
    }
}

/// The first LANES of `positions` as a vector, relative to `first`.
#[inline(always)]
fn relative<S: Simd>(simd: S, positions: &[i32], first: usize, limit: impl Fn(i64) -> i64) -> S::V {
    let mut out = [0.0f32; MAX_LANES];
    for (out, x) in out.iter_mut().zip(&positions[..S::LANES]) {
        *out = limit(i64::from(*x) - first as i64) as f32;
    }
    // SAFETY: the array has MAX_LANES elements, and LANES <= MAX_LANES.
    unsafe { simd.load(out.as_ptr()) }
}
