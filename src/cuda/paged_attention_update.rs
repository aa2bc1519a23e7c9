//! Cache update and attention in one call on CUDA: one launch where decode stores what it decodes over, else the launches
//! of both on one stream.
//!
//! No launch here may begin before the one in front of it has ended: attention reads what the update writes.

use super::{attention, cache_rows, kv_cache_update};
use crate::error::Result;
use crate::problem::paged_attention_update::PagedAttentionUpdate;
use crate::stream::Stream;

/// Load the kernels that [`launch`] takes.
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
    // What attention refuses must not have changed the cache.
    plan.load()?;
    // SAFETY: this function's contract.
    unsafe {
        if plan.stores_update() {
            cache_rows::bring_over(&problem.update, stream)?;
        } else {
            kv_cache_update::launch(&problem.update, stream)?;
        }
        plan.launch(stream)
    }
}
