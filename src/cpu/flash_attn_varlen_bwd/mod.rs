//! Gradients of attention on the CPU: blocked, the weights computed anew from the lse (`FlashAttention-2`, Dao 2023).
//!
//! What each row needs beside its operands is summed up first (`rows`). Then the rows of a sequence that read one KV
//! head, an item (`plan`), meet their keys, a block of keys (`block`) with a panel of rows (`panel`) at a time: two
//! products give scores and their counterparts of V, `weights` makes p and ds of them, three more products add to dq,
//! dk and dv (`item`). An item that is too large for one thread is cut twice, by queries for dq and by keys for dk and
//! dv, and its scores are computed twice.
//!
//! Each sum has one order, that of keys or of rows, whichever thread adds it up: results are the same bits whatever the
//! number of threads. Another instruction set may give other bits.

mod block;
mod item;
mod panel;
mod plan;
mod rows;
mod weights;

use super::aligned::{AlignedBuffer, SharedBuffer, try_parallel_for};
use super::attention::MIN_PARALLEL_WORK;
use super::simd::Isa;
use crate::error::Result;
use crate::log;
use crate::pool::{Pool, SingleThread, parallel_for};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use item::{RunTask, Scratch};
use plan::Plan;
use rows::SumUp;

/// Compute the gradients.
///
/// # Errors
/// `INTERNAL` if a task panicked, `RESOURCE_EXHAUSTED` without memory for what is kept meanwhile.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &FlashAttnVarlenBwd, pool: &dyn Pool) -> Result {
    // SAFETY: the caller's word.
    unsafe { run_with(Isa::best().without_bf16_pairs(), problem, pool) }
}

/// [`run`] with the instruction set chosen, one that has an f32 in a lane.
///
/// # Safety
/// As [`run`].
unsafe fn run_with(isa: Isa, problem: &FlashAttnVarlenBwd, pool: &dyn Pool) -> Result {
    let forward = &problem.forward;
    let (threads, dtype) = (pool.num_threads().max(1), forward.q.dtype);
    let sizes = [forward.num_rows, forward.num_q_heads, forward.num_kv_heads, forward.head_dim, forward.value_dim];
    log::call("gradients of attention", (isa, dtype, sizes), || {
        format!("{isa:?} on {threads} threads, {dtype}, [Tq, Hq, Hkv, D, Dv] = {sizes:?}")
    });
    // SAFETY: the caller's word.
    let plan = unsafe { Plan::new(problem, isa.vector_shape().0, threads) }?;
    let work = plan.cost * forward.head_dim as u64 + (problem.dq.len() + problem.dk.len() + problem.dv.len()) as u64;
    let pool = if work < MIN_PARALLEL_WORK { &SingleThread } else { pool };

    let chunks = rows::chunks(forward.num_rows);
    let (mut deltas, mut sinks) =
        (AlignedBuffer::zeros(problem.dq.len() / forward.head_dim)?, AlignedBuffer::zeros(chunks * forward.num_q_heads)?);
    let (deltas_of_all, sinks_of_all) = (SharedBuffer::new(&mut deltas), SharedBuffer::new(&mut sinks));
    let sum_up = |(): &mut (), index: usize| {
        let of_chunk = sinks_of_all.as_mut_ptr().wrapping_add(index * forward.num_q_heads);
        // SAFETY: the views are valid by this function's contract; both arrays were made for this problem, and each index
        // comes once.
        unsafe { isa.dispatch(SumUp::new(problem, &plan, index, deltas_of_all.as_mut_ptr(), of_chunk)) };
    };
    parallel_for(pool, chunks, || (), sum_up)?;
    // SAFETY: the array has the sums of all chunks, whose tasks have ended; dsinks are a view of the problem.
    unsafe { rows::write_sinks(problem, sinks_of_all.as_mut_ptr(), chunks) };

    let scratch = || Scratch::new(&plan, problem);
    try_parallel_for(pool, plan.tasks.len(), scratch, |scratch, index| {
        let deltas = deltas_of_all.as_mut_ptr();
        // SAFETY: the views are valid by this function's contract; plan, scratch and deltas were made for this problem, and
        // each index comes once.
        unsafe { isa.dispatch(RunTask::new(problem, &plan, scratch, deltas, &plan.tasks[index])) };
    })
}
