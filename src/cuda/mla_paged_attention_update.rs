//! `mla_paged_attention_update` on CUDA: the launch of the cache update followed by those of attention.
//!
//! The launches rely on stream order, because attention reads what the update writes. Programmatic dependent launch must
//! not be used between them.

use super::attention::LaunchPlan;
use super::kv_cache_update;
use crate::error::Result;
use crate::problem::mla_paged_attention_update::MlaPagedAttentionUpdate;
use crate::stream::Stream;

/// Loads the kernels that [`launch`] enqueues.
pub(crate) fn prepare(problem: &MlaPagedAttentionUpdate) -> Result {
    problem.with_cache_update(kv_cache_update::prepare)?;
    LaunchPlan::of_latent(&problem.attention)?.load()
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernels' run, the results writable.
pub(crate) unsafe fn launch(problem: &MlaPagedAttentionUpdate, stream: Stream) -> Result {
    let plan = LaunchPlan::of_latent(&problem.attention)?;
    // Loading fails for calls that attention refuses, which must leave the cache unchanged.
    plan.load()?;
    // SAFETY: this function has the same contract as those called.
    unsafe {
        problem.with_cache_update(|update| kv_cache_update::launch(update, stream))?;
        plan.launch(stream)
    }
}
