//! A micro-panel (BLIS's word) of query rows: q and dout packed for the micro-kernels, once as rows (`packing`) and once
//! transposed, with a lane per row.

use super::packing::{PackRows, row_stride};
use super::plan::{BwdPlan, BwdTile, KEYS};
use super::preprocess::{lse_of, row_of};
use crate::cpu::attention::sequences::Window;
use crate::cpu::score_bias::{BiasRow, bias_of_lanes};
use crate::cpu::simd::{MAX_LANES, Simd};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::ops::Range;

/// Maximum rows of a micro-panel: two vectors.
pub(super) const MAX_ROWS: usize = 2 * MAX_LANES;

/// What mask, bias and softmax need to know of the row of each lane. Padding lanes attend to no key.
pub(super) struct BwdLanes {
    /// First visible key, and the end of the visible keys, in positions of the sequence.
    low: [i32; MAX_ROWS],
    high: [i32; MAX_ROWS],
    /// Position of the query.
    position: [i32; MAX_ROWS],
    slope: [f32; MAX_ROWS],
    bias_rows: [BiasRow; MAX_ROWS],
    minus_lse: [f32; MAX_ROWS],
    delta: [f32; MAX_ROWS],
    /// Lanes in use, whole vectors.
    width: usize,
    /// Whether there are slopes or biases.
    pub(super) has_bias: bool,
    /// Whether there is a bias of pairs of rows and keys.
    pub(super) has_bias_rows: bool,
}

/// One vector of each array of [`BwdLanes`], with positions relative to a block's first key.
#[derive(Clone, Copy)]
pub(super) struct LaneVectors<V> {
    pub(super) low: V,
    pub(super) high: V,
    pub(super) position: V,
    pub(super) slope: V,
    pub(super) minus_lse: V,
    pub(super) delta: V,
}

impl BwdLanes {
    /// Lanes that attend to no key.
    fn padding(width: usize, has_bias: bool) -> Self {
        let (none, zero) = ([0; MAX_ROWS], [0.0; MAX_ROWS]);
        let minus_lse = [f32::NEG_INFINITY; MAX_ROWS];
        Self {
            low: none,
            high: none,
            position: none,
            slope: zero,
            bias_rows: [BiasRow::NONE; MAX_ROWS],
            minus_lse,
            delta: zero,
            width,
            has_bias,
            has_bias_rows: false,
        }
    }

    /// The biases of key `key` of the sequence, of vector `v` of the lanes.
    ///
    /// # Safety
    /// The bias is readable.
    #[inline(always)]
    pub(super) unsafe fn bias<S: Simd>(&self, simd: S, v: usize, key: usize) -> S::V {
        // SAFETY: the caller guarantees readable rows.
        unsafe { bias_of_lanes(simd, &self.bias_rows[v * S::LANES..], |_| key) }
    }

    /// Whether every lane attends to all of `keys`, which are relative to `first`.
    #[inline(always)]
    pub(super) fn visible_to_all(&self, first: usize, keys: &Range<usize>) -> bool {
        let (start, end) = ((first + keys.start) as i64, (first + keys.end) as i64);
        (0..self.width).all(|lane| i64::from(self.low[lane]) <= start && end <= i64::from(self.high[lane]))
    }

    /// Vector `v` of the lanes, for a block whose first key has position `first`.
    #[inline(always)]
    pub(super) fn vectors<S: Simd>(&self, simd: S, v: usize, first: usize) -> LaneVectors<S::V> {
        // Beyond a block the distance makes no difference; clamping keeps the numbers exact in f32.
        const LIMIT: i64 = 2 * KEYS as i64;
        let mut relative = [[0.0f32; MAX_LANES]; 3];
        for lane in 0..S::LANES {
            let of = |x: &[i32; MAX_ROWS]| i64::from(x[v * S::LANES + lane]) - first as i64;
            relative[0][lane] = of(&self.low).clamp(-LIMIT, LIMIT) as f32;
            relative[1][lane] = of(&self.high).clamp(-LIMIT, LIMIT) as f32;
            relative[2][lane] = of(&self.position) as f32;
        }
        // SAFETY: LANES <= MAX_LANES elements of each relative position. v is 0 or 1, and the other arrays have two
        // vectors.
        unsafe {
            let [low, high, position] = [0, 1, 2].map(|i: usize| simd.load(relative[i].as_ptr()));
            let [slope, minus_lse, delta] = [0, 1, 2].map(|i: usize| {
                let all = [&self.slope, &self.minus_lse, &self.delta][i];
                simd.load(all.as_ptr().add(v * S::LANES))
            });
            LaneVectors { low, high, position, slope, minus_lse, delta }
        }
    }
}

/// A micro-panel of query rows. E is [`Simd::ELEMENTS_PER_LANE`].
pub(super) struct QueryPanel {
    /// Transposed q, `[D / E][lanes]`; a lane holds E elements of a row.
    pub(super) q_columns: *mut f32,
    /// Transposed dout, `[Dv / E][lanes]`.
    pub(super) dout_columns: *mut f32,
    /// E rows of q, interleaved, [`row_stride`] apart.
    pub(super) q: *mut f32,
    /// E rows of dout, interleaved, [`row_stride`] apart.
    pub(super) dout: *mut f32,
    pub(super) rows: usize,
    pub(super) lanes: BwdLanes,
}

impl QueryPanel {
    /// f32 of a panel.
    pub(super) fn len(d: usize, dv: usize) -> usize {
        MAX_ROWS * (d + dv + row_stride(d) + row_stride(dv))
    }

    /// A panel in memory of [`QueryPanel::len`] elements.
    pub(super) fn new(memory: *mut f32, d: usize, dv: usize) -> Self {
        let dout_columns = memory.wrapping_add(MAX_ROWS * d);
        let q = dout_columns.wrapping_add(MAX_ROWS * dv);
        let dout = q.wrapping_add(MAX_ROWS * row_stride(d));
        Self { q_columns: memory, dout_columns, q, dout, rows: 0, lanes: BwdLanes::padding(0, false) }
    }

    /// Load the tile's rows from `first` on, as many as fit into `width` lanes.
    ///
    /// # Safety
    /// The problem's views are valid host memory; plan, tile and the `[Tq, Hq]` deltas are the problem's; nothing else
    /// accesses the panel's memory. If E is 2, q and dout are bf16.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        &mut self,
        simd: S,
        problem: &FlashAttnVarlenBwd,
        (plan, tile): (&BwdPlan, &BwdTile),
        deltas: *const f32,
        (first, width): (usize, usize),
    ) {
        let forward = &problem.forward;
        let group = forward.num_q_heads / forward.num_kv_heads;
        let (sequence, window) = (&plan.sequences[tile.sequence], Window::of(&forward.score));
        let slopes = forward.score.alibi.map(|alibi| {
            let sequence_offset = if alibi.per_sequence { tile.sequence * forward.num_q_heads } else { 0 };
            alibi.slopes.wrapping_add(sequence_offset)
        });
        self.rows = (tile.rows(group) - first).min(width);
        let bias = forward.score.bias;
        self.lanes = BwdLanes::padding(width, slopes.is_some() || bias.is_some());
        self.lanes.has_bias_rows = bias.is_some();
        // (query of the sequence, row t, head h) of a row of the panel.
        let indices = |row: usize| {
            let query = tile.queries.start + (first + row) / group;
            (query, sequence.first_row + query, tile.kv_head * group + (first + row) % group)
        };
        for row in 0..self.rows {
            let (query, t, h) = indices(row);
            let visible = sequence.visible(query, window);
            self.lanes.low[row] = visible.start as i32;
            self.lanes.high[row] = visible.end as i32;
            self.lanes.position[row] = sequence.position(query) as i32;
            if let Some(bias) = &bias {
                self.lanes.bias_rows[row] = BiasRow::of(bias, tile.sequence, h, query);
            }
            // SAFETY: t < Tq and h < Hq; the slopes from here on are [Hq], those of the sequence if each has its own.
            unsafe {
                self.lanes.slope[row] = slopes.map_or(0.0, |slopes| slopes.add(h).read());
                // A row that attends to no key, or whose biases are all -inf, has no probability.
                let lse = lse_of(problem, t, h);
                self.lanes.minus_lse[row] = if lse == f32::NEG_INFINITY { lse } else { -lse };
                self.lanes.delta[row] = deltas.add(t * forward.num_q_heads + h).read();
            }
        }
        let (q, dout) = (&forward.q, &problem.dout);
        for (tensor, columns, interleaved, d) in
            [(q, self.q_columns, self.q, forward.head_dim), (dout, self.dout_columns, self.dout, forward.value_dim)]
        {
            let mut from = [std::ptr::null(); MAX_ROWS];
            let from = &mut from[..self.rows];
            for (row, from) in from.iter_mut().enumerate() {
                let (_, t, h) = indices(row);
                *from = row_of(tensor, t, h).cast_const();
            }
            // SAFETY: rows (t, h) of q and dout, of D and Dv elements; the panel has room for MAX_ROWS rows of either
            // form. Two bf16 of a row are a lane as they are; f32 are those of the packed rows.
            unsafe {
                let dtype = tensor.dtype;
                simd.vectorize(PackRows { dtype, from, d, rows: None, interleaved: Some(interleaved) });
                if S::ELEMENTS_PER_LANE == 1 {
                    for (row, from) in from.iter_mut().enumerate() {
                        *from = interleaved.add(row * row_stride(d)).cast_const().cast();
                    }
                }
                transpose(from, columns, d / S::ELEMENTS_PER_LANE, width);
            }
        }
    }
}

/// `columns[c][row] = rows[row][c]` in lanes of 32 bits. Padding lanes keep old numbers, which do not count because they
/// attend to no key.
///
/// # Safety
/// `rows` have `depth` lanes, of any alignment; `columns` has room for `[depth][width]`, and `width` is at least the
/// number of rows.
#[inline(always)]
unsafe fn transpose(rows: &[*const u8], columns: *mut f32, depth: usize, width: usize) {
    for c in 0..depth {
        for (row, from) in rows.iter().enumerate() {
            // SAFETY: c < depth and row < width, so both lanes exist.
            unsafe { columns.add(c * width + row).write(from.cast::<f32>().add(c).read_unaligned()) };
        }
    }
}
