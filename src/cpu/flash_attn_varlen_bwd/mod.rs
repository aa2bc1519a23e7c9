//! Gradients of attention on the CPU, blocked as in FlashAttention-2 (Dao 2023): p is recomputed from the lse.
//!
//! - `preprocess` computes delta = out . dout - dlse of each row, and the gradients of the sinks.
//! - `plan` cuts the work into tiles: the query rows of a sequence that read one KV head, and the keys that they attend
//!   to.
//! - `task` steps through a tile's keys block by block (`kv_block`), and for each block through the tile's rows, a
//!   micro-panel (`query_panel`) at a time. Two products give the scores and dP = dout . V; `softmax_bwd` turns them
//!   into P and dS; three more products add to dQ, dK and dV. `packing` lays out the operands, as f32 or as bf16 pairs.
//!
//! `bias_gradient` computes the scores once more where the gradient of a bias is asked for.
//!
//! A tile that is too large for one thread is cut twice, by queries for dQ and by keys for dK and dV, and its scores
//! are computed twice.
//!
//! Each sum has one order, that of keys or of rows, whichever thread computes it: results have the same bits for any
//! number of threads. Another instruction set may give other bits.

mod bias_gradient;
mod kv_block;
mod packing;
mod plan;
mod preprocess;
mod query_panel;
mod softmax_bwd;
mod task;

use super::aligned::{AlignedBuffer, SharedBuffer, try_parallel_for};
use super::attention::{MIN_PARALLEL_WORK, may_multiply_bf16};
use super::simd::Isa;
use crate::error::Result;
use crate::log;
use crate::pool::{Pool, SingleThread, parallel_for};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use bias_gradient::{BiasGradient, RunBiasTask};
use plan::BwdPlan;
use preprocess::Preprocess;
use task::{BwdScratch, RunBwdTask};

/// Compute the gradients.
///
/// # Errors
/// `INTERNAL` if a task panicked, `RESOURCE_EXHAUSTED` if there is no memory for the plan, the scratch or delta.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &FlashAttnVarlenBwd, pool: &dyn Pool) -> Result {
    let forward = &problem.forward;
    // As attention does: f32 results are for sums, and P and dS rounded to bf16 would be their largest error. If q is bf16, K, V
    // and dout are too.
    let isa = Isa::for_products(may_multiply_bf16(forward.q.dtype, problem.dq.dtype));
    let (threads, dtype) = (pool.num_threads().max(1), forward.q.dtype);
    let sizes = [forward.num_rows, forward.num_q_heads, forward.num_kv_heads, forward.head_dim, forward.value_dim];
    log::call("gradients of attention", (isa, dtype, sizes), || {
        format!("{isa:?} on {threads} threads, {dtype}, [Tq, Hq, Hkv, D, Dv] = {sizes:?}")
    });
    // SAFETY: the metadata are views of the problem, which are valid host memory.
    let plan = unsafe { BwdPlan::new(problem, isa.vector_shape().0, threads) }?;
    let work = plan.cost * forward.head_dim as u64 + (problem.dq.len() + problem.dk.len() + problem.dv.len()) as u64;
    let pool = if work < MIN_PARALLEL_WORK { &SingleThread } else { pool };

    let chunks = preprocess::num_chunks(forward.num_rows);
    let (mut deltas, mut sinks) = (
        AlignedBuffer::zeros(problem.dq.len() / forward.head_dim)?,
        AlignedBuffer::zeros(chunks * forward.num_q_heads)?,
    );
    let (deltas, chunk_sinks) = (SharedBuffer::new(&mut deltas), SharedBuffer::new(&mut sinks));
    let preprocess_chunk = |(): &mut (), index: usize| {
        let sinks = chunk_sinks.as_mut_ptr().wrapping_add(index * forward.num_q_heads);
        // SAFETY: the views are valid; both arrays were made for this problem, and the loop below takes each chunk
        // once.
        unsafe { isa.dispatch(Preprocess::new(problem, &plan, index, deltas.as_mut_ptr(), sinks)) };
    };
    parallel_for(pool, chunks, || (), preprocess_chunk)?;
    // SAFETY: the tasks have ended and have written the sums of all chunks; dsinks are a view of the problem.
    unsafe { preprocess::write_sinks(problem, chunk_sinks.as_mut_ptr(), chunks) };

    let scratch = || BwdScratch::new(&plan, problem);
    try_parallel_for(pool, plan.tasks.len(), scratch, |scratch, index| {
        let deltas = deltas.as_mut_ptr();
        // SAFETY: the views are valid; plan, scratch and deltas were made for this problem, and the loop takes each
        // task once.
        unsafe { isa.dispatch(RunBwdTask::new(problem, &plan, scratch, deltas, &plan.tasks[index])) };
    })?;
    let Some(of) = BiasGradient::new(problem, &plan) else { return Ok(()) };
    let isa = isa.without_bf16_pairs();
    try_parallel_for(
        pool,
        of.num_tasks(),
        || of.scratch(),
        |scratch, task| {
            let deltas = deltas.as_mut_ptr();
            // SAFETY: as above; no other task accesses these rows of dbias.
            unsafe { isa.dispatch(RunBiasTask { of, scratch, deltas, task }) };
        },
    )
}
