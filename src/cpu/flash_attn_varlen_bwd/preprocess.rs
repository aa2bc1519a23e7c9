//! The preprocessing pass, as in FlashAttention-2: delta of each query row, and the gradients of the sinks.

use super::plan::BwdPlan;
use crate::cpu::element_rows::widen_row;
use crate::cpu::simd::{MAX_LANES, Simd, SimdKernel};
use crate::problem::MAX_HEAD_DIM;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// Rows of a chunk, which one task preprocesses.
const ROWS: usize = 64;

/// The number of chunks of `rows` rows.
pub(super) fn num_chunks(rows: usize) -> usize {
    rows.div_ceil(ROWS)
}

/// The address of row t of head h.
pub(super) fn row_of(tensor: &Tensor, t: usize, h: usize) -> *mut u8 {
    let at = t as i64 * tensor.stride(0) + h as i64 * tensor.stride(1);
    tensor.data.wrapping_offset(at as isize * tensor.dtype.size() as isize)
}

/// For the rows of a chunk: `delta = out . dout - dlse` of all heads, their terms of the gradients of the sinks, and 0
/// for the dq of rows that belong to no sequence.
///
/// # Safety
/// The problem's views are valid host memory; the plan and both arrays were made for it. Nothing else accesses these
/// rows of dq and of `deltas`, or `sinks`.
pub(super) struct Preprocess<'a> {
    problem: &'a FlashAttnVarlenBwd<'a>,
    plan: &'a BwdPlan,
    rows: Range<usize>,
    /// `[Tq, Hq]`
    deltas: *mut f32,
    /// `[Hq]`, the sums of this chunk.
    sinks: *mut f32,
}

impl<'a> Preprocess<'a> {
    pub(super) fn new(
        problem: &'a FlashAttnVarlenBwd<'a>,
        plan: &'a BwdPlan,
        chunk: usize,
        deltas: *mut f32,
        sinks: *mut f32,
    ) -> Self {
        let rows = chunk * ROWS..((chunk + 1) * ROWS).min(problem.forward.num_rows);
        Self { problem, plan, rows, deltas, sinks }
    }
}

impl SimdKernel for Preprocess<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { problem, plan, .. } = self;
        let (forward, heads) = (&problem.forward, problem.forward.num_q_heads);
        let mut sinks = vec![0.0f64; heads];
        for t in self.rows {
            if !plan.is_query(t) {
                let bytes = heads * forward.head_dim * problem.dq.dtype.size();
                // SAFETY: t < Tq, a row of the dense [Tq, Hq, D]; zero bytes are 0.0 in every dtype.
                unsafe { problem.dq.data.add(t * bytes).write_bytes(0, bytes) };
                continue;
            }
            for (h, dsink) in sinks.iter_mut().enumerate() {
                // SAFETY: t < Tq and h < Hq; dlse is a dense [Hq, Tq], deltas are [Tq, Hq], the sinks' logits [Hq].
                unsafe {
                    let dlse = problem.dlse.map_or(0.0, |dlse| dlse.add(h * forward.num_rows + t).read());
                    let delta = out_dot_dout(simd, problem, t, h) - dlse;
                    self.deltas.add(t * heads + h).write(delta);
                    let Some(logits) = forward.score.sinks else { continue };
                    *dsink -= sink_probability(logits.add(h).read(), lse_of(problem, t, h)) * f64::from(delta);
                }
            }
        }
        for (h, sum) in sinks.into_iter().enumerate() {
            // SAFETY: h < Hq, and the sums of this chunk are [Hq].
            unsafe { self.sinks.add(h).write(sum as f32) };
        }
    }
}

/// # Safety
/// The problem's lse is readable; t < Tq and h < Hq.
pub(super) unsafe fn lse_of(problem: &FlashAttnVarlenBwd, t: usize, h: usize) -> f32 {
    let forward = &problem.forward;
    // SAFETY: (h, t) is an element of the dense [Hq, Tq].
    forward.lse.map_or(f32::NEG_INFINITY, |lse| unsafe { lse.add(h * forward.num_rows + t).read() })
}

/// The probability of the sink in a row with this lse. A sink of -inf has none, even if the lse is -inf too.
fn sink_probability(sink: f32, lse: f32) -> f64 {
    if sink == f32::NEG_INFINITY { 0.0 } else { (f64::from(sink) - f64::from(lse)).exp() }
}

/// `out . dout` of row t of head h.
///
/// # Safety
/// The problem's views are valid host memory; t < Tq and h < Hq.
#[inline(always)]
unsafe fn out_dot_dout<S: Simd>(simd: S, problem: &FlashAttnVarlenBwd, t: usize, h: usize) -> f32 {
    const ROW: usize = MAX_HEAD_DIM as usize;
    let (out, dout, dv) = (&problem.forward.out, &problem.dout, problem.forward.value_dim);
    // Zeros fill the last vector.
    let (mut a, mut b, mut lanes) = ([0.0f32; ROW], [0.0f32; ROW], [0.0f32; MAX_LANES]);
    // SAFETY: rows of Dv <= MAX_HEAD_DIM elements. LANES divides MAX_HEAD_DIM, so whole vectors stay within the arrays.
    unsafe {
        widen_row(simd, out.dtype, row_of(out, t, h), a.as_mut_ptr(), dv);
        widen_row(simd, dout.dtype, row_of(dout, t, h), b.as_mut_ptr(), dv);
        let mut sum = simd.splat(0.0);
        for i in (0..dv).step_by(S::LANES) {
            sum = simd.fma(simd.load(a.as_ptr().add(i)), simd.load(b.as_ptr().add(i)), sum);
        }
        simd.store(lanes.as_mut_ptr(), sum);
    }
    lanes.iter().sum()
}

/// Write `dsinks`, if the call has this result: the sums of the chunks, `[chunks, Hq]`, added in their order.
///
/// # Safety
/// The sums are readable, the result writable.
pub(super) unsafe fn write_sinks(problem: &FlashAttnVarlenBwd, sums: *const f32, chunks: usize) {
    let Some(dsinks) = problem.dsinks else { return };
    let heads = problem.forward.num_q_heads;
    for h in 0..heads {
        // SAFETY: chunk < chunks and h < Hq: elements of the sums and of the result [Hq].
        unsafe {
            let chunk_sum = |chunk: usize| f64::from(sums.add(chunk * heads + h).read());
            dsinks.add(h).write((0..chunks).map(chunk_sum).sum::<f64>() as f32);
        }
    }
}
