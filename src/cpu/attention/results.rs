//! What a call writes: the rows of the sequences, and those of no sequence.

use super::plan::{Item, Plan};
use super::score::scale_of_head;
use super::state::{RowPlace, State};
use crate::cpu::element_rows::narrow_row;
use crate::cpu::simd::Simd;
use crate::problem::MAX_HEAD_DIM;
use crate::problem::attention::Attention;
use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// What becomes of a row's state: factor of o, lse. `m` is in base 2; the sink, if there is one, is a natural logit.
fn normalise((m, l): (f32, f32), sink: Option<f32>) -> (f64, f64) {
    let (m, l) = (f64::from(m), f64::from(l));
    let Some(sink) = sink.map(f64::from) else { return (1.0 / l, m * LN_2 + l.ln()) };
    // In units of the larger of both columns: l is at least 1 in units of 2^m.
    let sink_2 = sink * LOG2_E;
    let top = m.max(sink_2);
    let (keep, add) = ((m - top).exp2(), (sink_2 - top).exp2());
    let sum = l * keep + add;
    (keep / sum, top * LN_2 + sum.ln())
}

/// Results of a call.
#[derive(Clone, Copy)]
pub(super) struct Results<'a> {
    problem: &'a Attention<'a>,
}

impl<'a> Results<'a> {
    pub(super) fn of(problem: &'a Attention<'a>) -> Self {
        Self { problem }
    }

    /// Rows of no sequence: o = 0, lse = -inf.
    ///
    /// # Safety
    /// The problem's results are writable; no other task writes these rows.
    pub(super) unsafe fn clear(self, rows: Range<usize>) {
        let problem = self.problem;
        let row_len = problem.num_q_heads * problem.value_dim * problem.out.dtype.size();
        // SAFETY: rows of the dense [Tq, Hq, Dv]; zero bytes are 0.0 in every dtype.
        unsafe { problem.out.data.add(rows.start * row_len).write_bytes(0, rows.len() * row_len) };
        for row in rows {
            for head in 0..problem.num_q_heads {
                // SAFETY: one of the rows of this function's contract, head < Hq.
                unsafe { self.write_lse(row, head, f32::NEG_INFINITY) };
            }
        }
    }

    /// # Safety
    /// As `clear`; the row and the head are the problem's.
    unsafe fn write_lse(self, row: usize, head: usize, value: f32) {
        if let Some(lse) = self.problem.lse {
            // SAFETY: element (head, row) of the dense [Hq, Tq].
            unsafe { lse.add(head * self.problem.num_rows + row).write(value) }
        }
    }

    /// The rows of an item, from the state of all its KV heads.
    ///
    /// # Safety
    /// As `clear`; the problem's sinks and scales are readable, the state is the item's, complete.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(self, simd: S, plan: &Plan, item: &Item, state: *mut f32) {
        let problem = self.problem;
        let (group, dv) = (problem.num_q_heads / problem.num_kv_heads, problem.value_dim);
        let mut row_of_o = [0.0f32; MAX_HEAD_DIM as usize];
        for (index, kv_head) in item.heads.clone().enumerate() {
            let state = State::of_head(item, state, index);
            // SAFETY: a KV head of the problem.
            let v_scale = f64::from(unsafe { scale_of_head(problem.v_scale, kv_head) });
            for row in 0..item.queries.len() * group {
                let (t, h) = plan.query_of_row(item, kv_head, row, group);
                // SAFETY: sink of head < Hq; a row of the item; element (t, h, 0) of the dense [Tq, Hq, Dv].
                unsafe {
                    let sink = problem.score.sinks.map(|sinks| sinks.add(h).read());
                    let (m, l) = state.of_row(item.arrangement, row);
                    let lse = if l == 0.0 {
                        row_of_o[..dv].fill(0.0);
                        sink.unwrap_or(f32::NEG_INFINITY)
                    } else {
                        let (factor, lse) = normalise((m, l), sink);
                        let place = RowPlace::new::<S>(item.arrangement, item.lanes, dv, row);
                        place.read(state.o, row_of_o.as_mut_ptr(), dv);
                        let factor = (factor * v_scale) as f32;
                        row_of_o[..dv].iter_mut().for_each(|x| *x *= factor);
                        lse as f32
                    };
                    let out = (t * problem.num_q_heads + h) * dv * problem.out.dtype.size();
                    narrow_row(simd, problem.out.dtype, row_of_o.as_ptr(), problem.out.data.add(out), dv);
                    self.write_lse(t, h, lse);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_takes_its_share_however_large_or_small_it_is() {
        // Two keys of score 3: l = 2 in units of e^3.
        let m = (3.0 * LOG2_E) as f32;
        for sink in [-1e30f32, -100.0, 0.0, 3.0, 5.0, 80.0] {
            let (factor, lse) = normalise((m, 2.0), Some(sink));
            let (weight, sum) = (f64::from(sink - 3.0).exp(), 2.0 + f64::from(sink - 3.0).exp());
            assert!((factor * sum - 1.0).abs() < 1e-6, "{sink}: {factor}");
            let expected = if weight.is_finite() { 3.0 + sum.ln() } else { f64::from(sink) };
            assert!((lse - expected).abs() < 1e-6, "{sink}: {lse}");
        }
        assert_eq!(normalise((m, 2.0), Some(f32::NEG_INFINITY)), normalise((m, 2.0), None));
    }
}
