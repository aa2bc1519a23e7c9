//! The epilogue: stores out and lse of the sequences' rows, and zeros for rows that belong to no sequence.

use super::plan::{FwdPlan, WorkTile};
use super::score::scale_of_head;
use super::softmax_state::{RowElements, SoftmaxState};
use crate::cpu::element_rows::narrow_row;
use crate::cpu::simd::Simd;
use crate::problem::MAX_LATENT_DIM;
use crate::problem::attention::Attention;
use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// (factor that normalises o, lse) of a row with the state (m, l), where m is in base 2 and the sink, if there is one,
/// is a natural logit.
fn finalize((m, l): (f32, f32), sink: Option<f32>) -> (f64, f64) {
    let (m, l) = (f64::from(m), f64::from(l));
    let Some(sink) = sink.map(f64::from) else { return (1.0 / l, m * LN_2 + l.ln()) };
    // The sink is one more column of the softmax. Both terms are taken relative to the larger of m and the sink, so
    // that neither overflows; l is at least 1, as it includes the key whose score is m.
    let sink_2 = sink * LOG2_E;
    let max = m.max(sink_2);
    let (keys_scale, sink_term) = ((m - max).exp2(), (sink_2 - max).exp2());
    let sum = l * keys_scale + sink_term;
    (keys_scale / sum, max * LN_2 + sum.ln())
}

/// Stores the results of a call.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<'a> {
    problem: &'a Attention<'a>,
}

impl<'a> Epilogue<'a> {
    pub(super) fn new(problem: &'a Attention<'a>) -> Self {
        Self { problem }
    }

    /// Rows that belong to no sequence: o = 0, lse = -inf.
    ///
    /// # Safety
    /// The problem's results are writable; no other task writes these rows.
    pub(super) unsafe fn store_zeros(self, rows: Range<usize>) {
        let problem = self.problem;
        let row_len = problem.num_q_heads * problem.value_dim * problem.out.dtype.size();
        // SAFETY: the rows lie in the dense [Tq, Hq, Dv]; zero bytes are 0.0 in every dtype.
        unsafe { problem.out.data.add(rows.start * row_len).write_bytes(0, rows.len() * row_len) };
        for row in rows {
            for head in 0..problem.num_q_heads {
                // SAFETY: the caller says that the rows are writable and not another task's; head < Hq.
                unsafe { self.store_lse(row, head, f32::NEG_INFINITY) };
            }
        }
    }

    /// # Safety
    /// The problem's results are writable; row < Tq, head < Hq, and no other task writes this element.
    unsafe fn store_lse(self, row: usize, head: usize, value: f32) {
        if let Some(lse) = self.problem.lse {
            // SAFETY: (head, row) is an element of the dense [Hq, Tq].
            unsafe { lse.add(head * self.problem.num_rows + row).write(value) }
        }
    }

    /// The rows of a tile, from the states of all its KV heads.
    ///
    /// # Safety
    /// The problem's results are writable, its sinks and scales readable; `state` is the final state of the tile, and
    /// no other task writes the tile's rows.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(self, simd: S, plan: &FwdPlan, tile: &WorkTile, state: *mut f32) {
        let problem = self.problem;
        let (group, dv) = (problem.num_q_heads / problem.num_kv_heads, problem.value_dim);
        let mut row_of_o = [0.0f32; MAX_LATENT_DIM as usize];
        for (index, kv_head) in tile.heads.clone().enumerate() {
            let state = SoftmaxState::of_head(tile, state, index);
            // SAFETY: the tile's heads are below Hkv.
            let v_scale = f64::from(unsafe { scale_of_head(problem.v_scale, kv_head) });
            for row in 0..tile.queries.len() * group {
                let (t, h) = plan.query_of_row(tile, kv_head, row, group);
                // SAFETY: t < Tq and h < Hq, so that the sink and the element (t, h, 0) of the dense [Tq, Hq, Dv]
                // exist; the state has this row.
                unsafe {
                    let sink = problem.score.sinks.map(|sinks| sinks.add(h).read());
                    let (m, l) = state.of_row(tile.layout, row);
                    let lse = if l == 0.0 {
                        row_of_o[..dv].fill(0.0);
                        sink.unwrap_or(f32::NEG_INFINITY)
                    } else {
                        let (factor, lse) = finalize((m, l), sink);
                        let elements = RowElements::new::<S>(tile.layout, tile.lanes, dv, row);
                        elements.gather(state.o, row_of_o.as_mut_ptr(), dv);
                        let factor = (factor * v_scale) as f32;
                        row_of_o[..dv].iter_mut().for_each(|x| *x *= factor);
                        lse as f32
                    };
                    let out = (t * problem.num_q_heads + h) * dv * problem.out.dtype.size();
                    narrow_row(simd, problem.out.dtype, row_of_o.as_ptr(), problem.out.data.add(out), dv);
                    self.store_lse(t, h, lse);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sink_enters_the_softmax_denominator_at_any_magnitude() {
        // Two keys of score 3: l = 2 relative to e^3.
        let m = (3.0 * LOG2_E) as f32;
        for sink in [-1e30f32, -100.0, 0.0, 3.0, 5.0, 80.0] {
            let (factor, lse) = finalize((m, 2.0), Some(sink));
            let (sink_term, sum) = (f64::from(sink - 3.0).exp(), 2.0 + f64::from(sink - 3.0).exp());
            assert!((factor * sum - 1.0).abs() < 1e-6, "{sink}: {factor}");
            let expected = if sink_term.is_finite() { 3.0 + sum.ln() } else { f64::from(sink) };
            assert!((lse - expected).abs() < 1e-6, "{sink}: {lse}");
        }
        assert_eq!(finalize((m, 2.0), Some(f32::NEG_INFINITY)), finalize((m, 2.0), None));
    }
}
