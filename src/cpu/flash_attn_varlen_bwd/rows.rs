//! What each query row needs beside its operands, and what the rows are to the sinks.

use super::plan::Plan;
use crate::cpu::element_rows::widen_row;
use crate::cpu::simd::{MAX_LANES, Simd, SimdKernel};
use crate::problem::MAX_HEAD_DIM;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::Tensor;
use std::ops::Range;

/// Rows that one task sums up.
const ROWS: usize = 64;

/// How many tasks sum up so many rows.
pub(super) fn chunks(rows: usize) -> usize {
    rows.div_ceil(ROWS)
}

/// The address of row t of head h.
pub(super) fn row_of(tensor: &Tensor, t: usize, h: usize) -> *mut u8 {
    let at = t as i64 * tensor.stride(0) + h as i64 * tensor.stride(1);
    tensor.data.wrapping_offset(at as isize * tensor.dtype.size() as isize)
}

/// The rows of a chunk: `delta = out . dout - dlse` for all heads, what they add to the gradients of the sinks, and 0 for
/// the dq of those that belong to no sequence.
///
/// # Safety
/// The problem's views are valid host memory; the plan was made for it, the arrays have room, and these rows of dq and of
/// `deltas`, and `sinks`, are not otherwise accessed.
pub(super) struct SumUp<'a> {
    problem: &'a FlashAttnVarlenBwd<'a>,
    plan: &'a Plan,
    rows: Range<usize>,
    /// `[Tq, Hq]`
    deltas: *mut f32,
    /// `[Hq]`, the chunk's own
    sinks: *mut f32,
}

impl<'a> SumUp<'a> {
    pub(super) fn new(
        problem: &'a FlashAttnVarlenBwd<'a>,
        plan: &'a Plan,
        chunk: usize,
        deltas: *mut f32,
        sinks: *mut f32,
    ) -> Self {
        let rows = chunk * ROWS..((chunk + 1) * ROWS).min(problem.forward.num_rows);
        Self { problem, plan, rows, deltas, sinks }
    }
}

impl SimdKernel for SumUp<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { problem, plan, .. } = self;
        let (forward, heads) = (&problem.forward, problem.forward.num_q_heads);
        let mut sinks = vec![0.0f64; heads];
        for t in self.rows {
            if !plan.is_query(t) {
                let bytes = heads * forward.head_dim * problem.dq.dtype.size();
                // SAFETY: row t of the dense [Tq, Hq, D]; zero bytes are 0.0 in every dtype.
                unsafe { problem.dq.data.add(t * bytes).write_bytes(0, bytes) };
                continue;
            }
            for (h, of_sink) in sinks.iter_mut().enumerate() {
                // SAFETY: row t and head h are the problem's; dlse is a dense [Hq, Tq], deltas [Tq, Hq], the logits [Hq].
                unsafe {
                    let dlse = problem.dlse.map_or(0.0, |dlse| dlse.add(h * forward.num_rows + t).read());
                    let delta = product_of_outputs(simd, problem, t, h) - dlse;
                    self.deltas.add(t * heads + h).write(delta);
                    let Some(logits) = forward.score.sinks else { continue };
                    *of_sink -= share_of_sink(logits.add(h).read(), lse_of(problem, t, h)) * f64::from(delta);
                }
            }
        }
        for (h, sum) in sinks.into_iter().enumerate() {
            // SAFETY: head h < Hq of the chunk's own sums.
            unsafe { self.sinks.add(h).write(sum as f32) };
        }
    }
}

/// # Safety
/// As [`SumUp`]; the row and the head are the problem's.
pub(super) unsafe fn lse_of(problem: &FlashAttnVarlenBwd, t: usize, h: usize) -> f32 {
    let forward = &problem.forward;
    // SAFETY: element (h, t) of the dense [Hq, Tq].
    forward.lse.map_or(f32::NEG_INFINITY, |lse| unsafe { lse.add(h * forward.num_rows + t).read() })
}

/// The weight of a sink, which is none at -inf, whatever the row sees.
fn share_of_sink(sink: f32, lse: f32) -> f64 {
    if sink == f32::NEG_INFINITY { 0.0 } else { (f64::from(sink) - f64::from(lse)).exp() }
}

/// `out . dout` of a row of a head.
///
/// # Safety
/// As [`lse_of`].
#[inline(always)]
unsafe fn product_of_outputs<S: Simd>(simd: S, problem: &FlashAttnVarlenBwd, t: usize, h: usize) -> f32 {
    const ROW: usize = MAX_HEAD_DIM as usize;
    let (out, dout, dv) = (&problem.forward.out, &problem.dout, problem.forward.value_dim);
    // Zeros fill the last vector.
    let (mut a, mut b, mut lanes) = ([0.0f32; ROW], [0.0f32; ROW], [0.0f32; MAX_LANES]);
    // SAFETY: rows of Dv <= MAX_HEAD_DIM elements; whole vectors of the buffers, whose length all LANES divide.
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

/// `dsinks`, if wanted, from the sums of the chunks `[chunks, Hq]`, in their order.
///
/// # Safety
/// The array is readable, the result writable.
pub(super) unsafe fn write_sinks(problem: &FlashAttnVarlenBwd, sums: *const f32, chunks: usize) {
    let Some(dsinks) = problem.dsinks else { return };
    let heads = problem.forward.num_q_heads;
    for h in 0..heads {
        // SAFETY: element (chunk, h) of the sums, element h of the result.
        unsafe {
            let of_chunk = |chunk: usize| f64::from(sums.add(chunk * heads + h).read());
            dsinks.add(h).write((0..chunks).map(of_chunk).sum::<f64>() as f32);
        }
    }
}
