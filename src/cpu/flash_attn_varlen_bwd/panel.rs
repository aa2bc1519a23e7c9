//! A panel of query rows: as rows and, transposed, with a lane for each.

use super::plan::{Item, KEYS, Plan};
use super::rows::{lse_of, row_of};
use crate::cpu::attention::sequences::Window;
use crate::cpu::element_rows::widen_row;
use crate::cpu::simd::{MAX_LANES, Simd};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// The most rows of a panel: two vectors.
pub(super) const MAX_ROWS: usize = 2 * MAX_LANES;

/// From a row of `d` elements to the next: whole vectors, and one more, so that rows do not fall into the same few sets
/// of the cache.
pub(super) fn row_stride(d: usize) -> usize {
    d.next_multiple_of(MAX_LANES) + MAX_LANES
}

/// What is known of each lane; lanes without a row see nothing.
pub(super) struct Lanes {
    /// Visible keys, in positions of the sequence
    low: [i32; MAX_ROWS],
    high: [i32; MAX_ROWS],
    /// Position of the query
    position: [i32; MAX_ROWS],
    slope: [f32; MAX_ROWS],
    /// The lse, negated
    minus_lse: [f32; MAX_ROWS],
    delta: [f32; MAX_ROWS],
    /// Lanes in use, whole vectors.
    width: usize,
    /// There are slopes.
    pub(super) biased: bool,
}

/// [`Lanes`] of one vector, positions relative to a block's first key.
#[derive(Clone, Copy)]
pub(super) struct OfLanes<V> {
    pub(super) low: V,
    pub(super) high: V,
    pub(super) position: V,
    pub(super) slope: V,
    pub(super) minus_lse: V,
    pub(super) delta: V,
}

impl Lanes {
    fn unseeing(width: usize, biased: bool) -> Self {
        let (none, zero) = ([0; MAX_ROWS], [0.0; MAX_ROWS]);
        let minus_lse = [f32::NEG_INFINITY; MAX_ROWS];
        Self { low: none, high: none, position: none, slope: zero, minus_lse, delta: zero, width, biased }
    }

    /// Every lane sees all of `keys`, which are relative to `first`.
    #[inline(always)]
    pub(super) fn all_see(&self, first: usize, keys: &Range<usize>) -> bool {
        let (start, end) = ((first + keys.start) as i64, (first + keys.end) as i64);
        (0..self.width).all(|lane| i64::from(self.low[lane]) <= start && end <= i64::from(self.high[lane]))
    }

    #[inline(always)]
    pub(super) fn vector<S: Simd>(&self, simd: S, v: usize, first: usize) -> OfLanes<S::V> {
        // Clamped to what a block can tell, where f32 are exact.
        const LIMIT: i64 = 2 * KEYS as i64;
        let mut relative = [[0.0f32; MAX_LANES]; 3];
        for lane in 0..S::LANES {
            let of = |x: &[i32; MAX_ROWS]| i64::from(x[v * S::LANES + lane]) - first as i64;
            relative[0][lane] = of(&self.low).clamp(-LIMIT, LIMIT) as f32;
            relative[1][lane] = of(&self.high).clamp(-LIMIT, LIMIT) as f32;
            relative[2][lane] = of(&self.position) as f32;
        }
        // SAFETY: LANES <= MAX_LANES elements; vector v of at most two.
        unsafe {
            let [low, high, position] = [0, 1, 2].map(|i: usize| simd.load(relative[i].as_ptr()));
            let [slope, minus_lse, delta] = [0, 1, 2].map(|i: usize| {
                let all = [&self.slope, &self.minus_lse, &self.delta][i];
                simd.load(all.as_ptr().add(v * S::LANES))
            });
            OfLanes { low, high, position, slope, minus_lse, delta }
        }
    }
}

/// Where a panel's rows stand, and what is known of them.
pub(super) struct Panel {
    /// `[D][lanes]`
    pub(super) q_columns: *mut f32,
    /// `[Dv][lanes]`
    pub(super) dout_columns: *mut f32,
    /// Rows, [`row_stride`] apart
    pub(super) q: *mut f32,
    pub(super) dout: *mut f32,
    pub(super) rows: usize,
    pub(super) lanes: Lanes,
}

impl Panel {
    /// f32 that a panel takes.
    pub(super) fn len(d: usize, dv: usize) -> usize {
        MAX_ROWS * (d + dv + row_stride(d) + row_stride(dv))
    }

    /// In memory of [`Panel::len`] elements.
    pub(super) fn new(memory: *mut f32, d: usize, dv: usize) -> Self {
        let dout_columns = memory.wrapping_add(MAX_ROWS * d);
        let q = dout_columns.wrapping_add(MAX_ROWS * dv);
        let dout = q.wrapping_add(MAX_ROWS * row_stride(d));
        Self { q_columns: memory, dout_columns, q, dout, rows: 0, lanes: Lanes::unseeing(0, false) }
    }

    /// Make these the item's rows from `first` on, as many as fit into `width` lanes.
    ///
    /// # Safety
    /// The problem's views are valid host memory; plan, item and the `[Tq, Hq]` deltas are the problem's; the memory is
    /// the panel's own.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        &mut self,
        simd: S,
        problem: &FlashAttnVarlenBwd,
        (plan, item): (&Plan, &Item),
        deltas: *const f32,
        (first, width): (usize, usize),
    ) {
        let forward = &problem.forward;
        let group = forward.num_q_heads / forward.num_kv_heads;
        let (sequence, window) = (&plan.sequences[item.sequence], Window::of(&forward.score));
        let slopes = forward.score.alibi.map(|alibi| {
            let of_sequence = if alibi.per_sequence { item.sequence * forward.num_q_heads } else { 0 };
            alibi.slopes.wrapping_add(of_sequence)
        });
        self.rows = (item.rows(group) - first).min(width);
        self.lanes = Lanes::unseeing(width, slopes.is_some());
        let place = |row: usize| {
            let query = item.queries.start + (first + row) / group;
            (query, sequence.first_row + query, item.kv_head * group + (first + row) % group)
        };
        for row in 0..self.rows {
            let (query, t, h) = place(row);
            let visible = sequence.visible(query, window);
            self.lanes.low[row] = visible.start as i32;
            self.lanes.high[row] = visible.end as i32;
            self.lanes.position[row] = sequence.position(query) as i32;
            // SAFETY: slope of head < Hq, of sequence < B where each has its own; row t of head h.
            unsafe {
                self.lanes.slope[row] = slopes.map_or(0.0, |slopes| slopes.add(h).read());
                self.lanes.minus_lse[row] = -lse_of(problem, t, h);
                self.lanes.delta[row] = deltas.add(t * forward.num_q_heads + h).read();
            }
        }
        let address = |tensor: &Tensor, row: usize| {
            let (_, t, h) = place(row);
            row_of(tensor, t, h).cast_const()
        };
        // SAFETY: rows of the tensors, as long as the memory has room for.
        unsafe {
            let (q, dout) = (&forward.q, &problem.dout);
            for row in 0..self.rows {
                let to = self.q.add(row * row_stride(forward.head_dim));
                widen_row(simd, q.dtype, address(q, row), to, forward.head_dim);
                let to = self.dout.add(row * row_stride(forward.value_dim));
                widen_row(simd, dout.dtype, address(dout, row), to, forward.value_dim);
            }
            transpose(self.q, self.q_columns, forward.head_dim, (self.rows, width));
            transpose(self.dout, self.dout_columns, forward.value_dim, (self.rows, width));
        }
    }
}

/// `columns[c][row] = rows[row][c]`; lanes past the last row keep what they had, and see nothing.
///
/// # Safety
/// `rows` are [`row_stride`] apart; `columns` has room for `[d][width]`.
#[inline(always)]
unsafe fn transpose(rows: *const f32, columns: *mut f32, d: usize, (count, width): (usize, usize)) {
    // SAFETY: element c < d of row < count, and its place in a column of `width` lanes.
    unsafe {
        for c in 0..d {
            for row in 0..count {
                columns.add(c * width + row).write(rows.add(row * row_stride(d) + c).read());
            }
        }
    }
}
