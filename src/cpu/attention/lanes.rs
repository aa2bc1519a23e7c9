//! What a lane needs to know of its query: which keys it sees, and what is added to their scores.

use super::keys::BLOCK;
use super::plan::Item;
use super::sequences::{Sequence, Window};
use crate::cpu::simd::{MAX_LANES, Simd};
use crate::problem::attention::Attention;
use std::ops::Range;

/// Of each lane of an item, in positions of the sequence. Lanes without a row repeat the last row's.
#[derive(Default)]
pub(super) struct Lanes {
    /// First visible key, less the lane's place within a step of keys
    low: Vec<i32>,
    /// End of the visible keys, likewise
    high: Vec<i32>,
    /// Position of the query, likewise
    position: Vec<i32>,
    /// `[KV heads of the item][lanes]`, none without a bias
    slopes: Vec<f32>,
}

impl Lanes {
    /// Make these the lanes of `item`.
    ///
    /// # Safety
    /// The problem's slopes are readable; the item is one of the sequence `index`.
    pub(super) unsafe fn set<S: Simd>(
        &mut self,
        problem: &Attention,
        item: &Item,
        (index, sequence): (usize, &Sequence),
    ) {
        let group = problem.num_q_heads / problem.num_kv_heads;
        let rows = item.queries.len() * group;
        let window = Window::of(&problem.score);
        let row_of_lane = |lane| item.arrangement.row_of_lane(lane).min(rows - 1);
        self.low.clear();
        self.high.clear();
        self.position.clear();
        self.slopes.clear();
        for lane in 0..item.lanes {
            let query = item.queries.start + row_of_lane(lane) / group;
            let visible = sequence.visible(query, window);
            let key = item.arrangement.key_of_lane(lane, S::ELEMENTS_PER_LANE) as i32;
            self.low.push(visible.start as i32 - key);
            self.high.push(visible.end as i32 - key);
            self.position.push(sequence.position(query) as i32 - key);
        }
        let Some(alibi) = problem.score.alibi else { return };
        let first = if alibi.per_sequence { index * problem.num_q_heads } else { 0 };
        for kv_head in item.heads.clone() {
            for lane in 0..item.lanes {
                let head = kv_head * group + row_of_lane(lane) % group;
                // SAFETY: slope of head < Hq, of sequence < B where each has its own.
                self.slopes.push(unsafe { alibi.slopes.add(first + head).read() });
            }
        }
    }

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

    /// (low, high) of a vector of lanes, relative to `first`: a lane sees key j of the block there if
    /// `low <= j < high`.
    #[inline(always)]
    pub(super) fn visible<S: Simd>(&self, simd: S, lane: usize, first: usize) -> (S::V, S::V) {
        // Clamped to what a block can tell, where f32 are exact.
        const LIMIT: i64 = 2 * BLOCK as i64;
        let clamped = |x: i64| x.clamp(-LIMIT, LIMIT);
        (relative(simd, &self.low[lane..], first, clamped), relative(simd, &self.high[lane..], first, clamped))
    }

    /// (position relative to `first`, slope) of a vector of lanes, for the item's `head`-th KV head.
    #[inline(always)]
    pub(super) fn bias<S: Simd>(&self, simd: S, head: usize, lane: usize, first: usize) -> Option<(S::V, S::V)> {
        let slopes = self.slopes.get(head * self.low.len() + lane..)?.get(..S::LANES)?;
        // SAFETY: LANES slopes.
        let slope = unsafe { simd.load(slopes.as_ptr()) };
        Some((relative(simd, &self.position[lane..], first, |x| x), slope))
    }
}

/// A vector of positions, relative to `first`.
#[inline(always)]
fn relative<S: Simd>(simd: S, positions: &[i32], first: usize, limit: impl Fn(i64) -> i64) -> S::V {
    let mut out = [0.0f32; MAX_LANES];
    for (out, x) in out.iter_mut().zip(&positions[..S::LANES]) {
        *out = limit(i64::from(*x) - first as i64) as f32;
    }
    // SAFETY: LANES <= MAX_LANES.
    unsafe { simd.load(out.as_ptr()) }
}
