//! Attention on the CPU: FlashAttention's loop over blocks of keys with an online softmax. K and V are read in place,
//! from pages or from packed rows. `docs/dev/kernels/cpu.md` explains the algorithm with a picture.
//!
//! - `sequences` reads the metadata once and clamps it.
//! - `plan` cuts the query rows of each sequence into work tiles, for one KV head or for all, and long tiles into KV
//!   splits.
//! - `task` runs one task: it lays out the queries, steps through blocks of keys, merges KV splits and stores the
//!   output.
//! - `gemm` (many query rows, as in prefill) and `gemv` (few, as in decode) compute one block step. Both use
//!   `block_rows` (row addresses), `prefetcher`, `kv_loader`, `packing`, `score` and `lanes` (mask and bias), `softmax`
//!   and `softmax_state`.
//! - `epilogue` normalises o and stores it with the lse.
//!
//! The work is proportional to the number of visible keys; the memory depends on neither the context nor the cache
//! size.
//!
//! Results have the same bits for any number of threads, and the rows of a sequence have the same bits whatever else is
//! in the batch, with `batch_invariant` or without: the tiles and KV splits of a sequence, and the order in which
//! splits are merged, follow from its own lengths and from static sizes. Another instruction set may give other bits.

mod block_rows;
mod block_step;
mod epilogue;
mod gemm;
mod gemv;
mod key_scales;
pub(super) mod kv_loader;
mod lanes;
pub(super) mod packing;
mod plan;
mod prefetcher;
mod row_ranges;
mod row_trees;
pub(super) mod score;
pub(super) mod sequences;
mod softmax;
mod softmax_state;
mod task;

#[cfg(test)]
mod tests;

use super::aligned::{AlignedBuffer, SharedBuffer, try_parallel_for};
use super::simd::Isa;
use crate::error::Result;
use crate::log;
use crate::pool::{Pool, SingleThread};
use crate::problem::attention::Attention;
use crate::tensor::DType;
use plan::FwdPlan;
use task::{FwdJob, FwdScratch, RunFwdJob};

/// Multiply-adds below which a second thread costs more than it saves.
pub(super) const MIN_PARALLEL_WORK: u64 = 1 << 19;

/// Compute `out`, and `softmax_lse` if the call has this result.
///
/// # Errors
/// `INTERNAL` if a task panicked, `RESOURCE_EXHAUSTED` if there is no memory for the plan, the scratch or the partials.
///
/// # Safety
/// The problem's views are valid host memory, `out` and `lse` writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &Attention, pool: &dyn Pool) -> Result {
    if problem.num_rows == 0 {
        return Ok(());
    }
    let isa = Isa::for_products(may_multiply_bf16(problem.q.dtype, problem.out.dtype));
    let sizes = [problem.num_rows, problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.value_dim];
    log::call("attention", (isa, problem.q.dtype, problem.kv_dtype, sizes), || {
        let (threads, q, kv) = (pool.num_threads(), problem.q.dtype, problem.kv_dtype);
        format!("{isa:?} on {threads} threads, {q} over {kv}, [Tq, Hq, Hkv, D, Dv] = {sizes:?}")
    });
    // SAFETY: the metadata are views of the problem, which are valid host memory.
    let plan = unsafe { FwdPlan::new(problem, isa.vector_shape(), pool.num_threads().max(1)) }?;
    let work = plan.cost * problem.head_dim as u64 + problem.out.len() as u64;
    let pool = if work < MIN_PARALLEL_WORK { &SingleThread } else { pool };
    let mut partials = AlignedBuffer::zeros(plan.partials_len)?;
    let partials = SharedBuffer::new(&mut partials);
    let run = |scratch: &mut FwdScratch, job: FwdJob| {
        // SAFETY: the views are valid; plan, scratch and partials were made for this problem and `isa`. The loops below
        // take each task and each combine once, and the first loop has ended when the second begins.
        unsafe { isa.dispatch(RunFwdJob::new(problem, &plan, scratch, partials.as_mut_ptr(), job)) };
    };
    let scratch = || FwdScratch::new(&plan, problem);
    let (tasks, combines) = (&plan.tasks, &plan.combines);
    try_parallel_for(pool, tasks.len(), scratch, |scratch, index| run(scratch, FwdJob::Task(&tasks[index])))?;
    try_parallel_for(pool, combines.len(), scratch, |scratch, index| run(scratch, FwdJob::Combine(combines[index])))
}

/// Whether q, K, V and p may be multiplied as bf16 where the CPU can. q, K and V are exact in bf16 if q is bf16 or fp8
/// (K and V then are too), and p may be rounded to bf16 if the output's dtype is no finer than that rounding. An f16
/// operand, or an output of f16 or f32, breaks one of the two conditions.
///
/// `vdpbf16ps` rounds after each of its two additions, the products themselves being exact, so a sum in this order
/// differs from one in f32 only by the order. It flushes subnormal bf16 inputs and f32 sums to 0: an absolute error
/// below D * 2^-126 * max|k| in a score and below `len_k` * 2^-126 in o, both far below the 1e-5 that
/// `docs/semantics.md#error-bounds` allows. Rounding p to bf16 is an error of 2^-9 p in each term of o, as in a
/// computation in bf16 throughout; l, and so the lse, is the sum of p before the rounding.
///
/// The same holds of gradients, with their dtype as `out`, of dout, and of dS, which is rounded as p is.
pub(super) fn may_multiply_bf16(q: DType, out: DType) -> bool {
    [DType::BF16, DType::F8E4M3FN].contains(&q) && out == DType::BF16
}
