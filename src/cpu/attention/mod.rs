//! Attention on the CPU: blocked, with an online softmax, straight from the pages or rows.
//!
//! The metadata is read and clamped once (`sequences`); the query rows of a sequence, for a KV head or for all, make an
//! item (`plan`), whose keys are visited in blocks (`item`, `keys`) by one of two kernels: `many_rows` for prefill,
//! `few_rows` for decode. Between their products stand the edits of the scores (`score`, `lanes`) and the softmax
//! (`softmax`, `state`). Work depends on the keys that are visible, and memory on neither the context nor the cache.
//!
//! Results are the same bits whatever the number of threads, and a sequence's rows have the same bits whatever else is
//! in the batch, asked for or not: how a sequence is cut, and in which order its pieces are merged, follows from its
//! own lengths and static sizes. Another instruction set may give other bits.

mod block_step;
mod few_rows;
mod item;
mod keys;
mod lanes;
mod many_rows;
mod plan;
mod results;
mod score;
pub(super) mod sequences;
mod softmax;
mod sources;
mod stage;
mod state;

#[cfg(test)]
mod tests;

use super::aligned::{AlignedBuffer, SharedBuffer, try_parallel_for};
use super::simd::Isa;
use crate::error::Result;
use crate::log;
use crate::pool::{Pool, SingleThread};
use crate::problem::attention::Attention;
use crate::tensor::DType;
use item::{Job, RunTask, Scratch};
use plan::Plan;

/// Multiplications below which a call is not worth a second thread.
pub(super) const MIN_PARALLEL_WORK: u64 = 1 << 19;

/// Compute `out` and, if wanted, `softmax_lse`.
///
/// # Errors
/// `INTERNAL` if a task panicked, `RESOURCE_EXHAUSTED` without memory for what is kept meanwhile.
///
/// # Safety
/// The problem's views are valid host memory, `out` and `lse` writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &Attention, pool: &dyn Pool) -> Result {
    // SAFETY: the caller's word.
    unsafe { run_with(Isa::best(), problem, pool) }
}

/// [`run`] with the instruction set chosen.
///
/// # Safety
/// As [`run`].
unsafe fn run_with(isa: Isa, problem: &Attention, pool: &dyn Pool) -> Result {
    if problem.num_rows == 0 {
        return Ok(());
    }
    let isa = if multiplies_bf16(problem.q.dtype, problem.out.dtype) { isa } else { isa.without_bf16_pairs() };
    let sizes = [problem.num_rows, problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.value_dim];
    log::call("attention", (isa, problem.q.dtype, problem.kv_dtype, sizes), || {
        let (threads, q, kv) = (pool.num_threads(), problem.q.dtype, problem.kv_dtype);
        format!("{isa:?} on {threads} threads, {q} over {kv}, [Tq, Hq, Hkv, D, Dv] = {sizes:?}")
    });
    // SAFETY: the caller's word.
    let plan = unsafe { Plan::new(problem, isa.vector_shape(), pool.num_threads().max(1)) }?;
    let work = plan.cost * problem.head_dim as u64 + problem.out.len() as u64;
    let pool = if work < MIN_PARALLEL_WORK { &SingleThread } else { pool };
    let mut partials = AlignedBuffer::zeros(plan.partials_len)?;
    let shared = SharedBuffer::new(&mut partials);
    let run = |scratch: &mut Scratch, job: Job| {
        // SAFETY: the views are valid by this function's contract; all else was made above for this problem and `isa`. Each
        // index comes once, and the tasks have ended when the merges begin.
        unsafe { isa.dispatch(RunTask::new(problem, &plan, scratch, shared.as_mut_ptr(), job)) };
    };
    let scratch = || Scratch::new(&plan, problem);
    try_parallel_for(pool, plan.tasks.len(), scratch, |scratch, index| run(scratch, Job::Task(&plan.tasks[index])))?;
    try_parallel_for(pool, plan.merges.len(), scratch, |scratch, index| run(scratch, Job::Merge(plan.merges[index])))
}

/// Products of bf16 are wanted, where the CPU has them: q, K and V are exact in bf16, and the accuracy that the output's
/// type asks for allows p to be rounded to it. Of f16, as the type of q or of the output, one of the two is not true.
///
/// A dot product of pairs rounds after each of its two additions, the products themselves being exact, so that a sum in
/// this order differs from one in f32 by nothing but the order. It takes bf16 and sums below 2^-126 for 0: an absolute
/// error of less than D * 2^-126 * max|k| in a score, of less than `len_k` * 2^-126 in o, both far below the 1e-5 that
/// `docs/semantics.md#error-bounds` allows. Rounding p to bf16 is an error of 2^-9 p in each term of o, as in a
/// computation in bf16 throughout; l, and so the lse, is summed before.
fn multiplies_bf16(q: DType, out: DType) -> bool {
    [DType::BF16, DType::F8E4M3FN].contains(&q) && out != DType::F16
}
