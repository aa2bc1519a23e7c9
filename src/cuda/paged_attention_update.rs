//! `paged_attention_update` on CUDA: a single launch where decode also stores the new tokens, else the launches of the
//! update followed by those of attention.
//!
//! The launches rely on stream order, because attention reads what the update writes. Programmatic dependent launch must
//! not be used between them.

use super::{attention, cache_rows, kv_cache_update};
use crate::error::Result;
use crate::problem::paged_attention_update::PagedAttentionUpdate;
use crate::stream::Stream;

/// Loads the kernels that [`launch`] enqueues.
pub(crate) fn prepare(problem: &PagedAttentionUpdate) -> Result {
    let plan = attention::LaunchPlan::with_update(&problem.attention, &problem.update)?;
    if !plan.stores_update() {
        kv_cache_update::prepare(&problem.update)?;
    }
    plan.load()
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernels' run, the results writable.
pub(crate) unsafe fn launch(problem: &PagedAttentionUpdate, stream: Stream) -> Result {
    let plan = attention::LaunchPlan::with_update(&problem.attention, &problem.update)?;
    // Loading fails for calls that attention refuses, which must leave the cache unchanged.
    plan.load()?;
    // SAFETY: this function has the same contract as those called.
    unsafe {
        if plan.stores_update() {
            cache_rows::copy_unaliased_caches(&problem.update, stream)?;
        } else {
            kv_cache_update::launch(&problem.update, stream)?;
        }
        plan.launch(stream)
    }
}
