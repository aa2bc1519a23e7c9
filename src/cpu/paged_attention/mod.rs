//! Paged attention on the CPU: blocked, with an online softmax, straight from the pages.
//!
//! The metadata is read and clamped once (`plan`); the query rows of a sequence, for a KV head or for all, make an item
//! (`item`), whose keys are visited in blocks (`keys`) by one of two kernels: `many_rows` for prefill, `few_rows` for
//! decode. Work depends on the keys that are visible, and memory on neither the context nor the cache.
//!
//! Results are the same bits whatever the number of threads, and a sequence's rows have the same bits whatever else is
//! in the batch, asked for or not: how a sequence is cut, and in which order its pieces are merged, follows from its
//! own lengths and static sizes. Another instruction set may give other bits.

mod few_rows;
mod item;
mod keys;
mod many_rows;
mod plan;
mod softmax;

#[cfg(test)]
mod tests;

use super::aligned::Aligned;
use super::element::Element;
use super::simd::Isa;
use crate::error::Result;
use crate::log;
use crate::ops::paged_attention::PagedAttention;
use crate::pool::{Pool, SingleThread, parallel_for};
use crate::tensor::DType;
use half::{bf16, f16};
use item::{Job, RunTask, Scratch};
use plan::Plan;

/// Multiplications below which a call is not worth a second thread.
const WORTH_SHARING: u64 = 1 << 19;

/// Compute `out` and, if wanted, `softmax_lse`.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, `out` and `lse` writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &PagedAttention, pool: &dyn Pool) -> Result {
    // SAFETY: the caller's word.
    unsafe { run_with(Isa::best(), problem, pool) }
}

/// [`run`] with the instruction set chosen.
///
/// # Safety
/// As [`run`].
unsafe fn run_with(isa: Isa, problem: &PagedAttention, pool: &dyn Pool) -> Result {
    // SAFETY: the caller's word; the problem has checked the dtypes.
    unsafe {
        match problem.query.dtype {
            DType::F16 => attend::<f16>(isa, problem, pool),
            DType::BF16 => attend::<bf16>(isa, problem, pool),
            _ => attend::<f32>(isa, problem, pool),
        }
    }
}

/// # Safety
/// As [`run`], with `T` the element type.
unsafe fn attend<T: Element>(isa: Isa, problem: &PagedAttention, pool: &dyn Pool) -> Result {
    if problem.num_rows == 0 {
        return Ok(());
    }
    let shape = [problem.num_rows, problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.page_size];
    log::call("paged_attention", (isa, problem.query.dtype, shape), || {
        format!("{isa:?} on {} threads with [T, Hq, Hkv, D, page_size] = {shape:?}", pool.num_threads())
    });
    // SAFETY: the caller's word.
    let plan = unsafe { Plan::new(problem, isa.lanes(), pool.num_threads()) };
    let work = plan.cost * problem.head_dim as u64 + problem.out.len() as u64;
    let pool = if work < WORTH_SHARING { &SingleThread } else { pool };
    let mut partials = Aligned::zeros(plan.partials_len);
    let shared = Shared(partials.as_mut_ptr());
    let run = |scratch: &mut Scratch, job: Job| {
        // SAFETY: the caller's word; all of it was made above for this problem, and each index comes once.
        isa.run(unsafe { RunTask::<T>::new(problem, &plan, scratch, shared.address(), job) });
    };
    let scratch = || Scratch::new(&plan, problem.head_dim);
    parallel_for(pool, plan.tasks.len(), scratch, |scratch, index| run(scratch, Job::Task(&plan.tasks[index])))?;
    parallel_for(pool, plan.merges.len(), scratch, |scratch, index| run(scratch, Job::Merge(plan.merges[index])))
}

/// Memory of which every task writes a part of its own.
struct Shared(*mut f32);

// SAFETY: see the type.
unsafe impl Sync for Shared {}

impl Shared {
    fn address(&self) -> *mut f32 {
        self.0
    }
}
