//! Cache update and attention in one call on the CPU, one after the other.

use super::{attention, kv_cache_update};
use crate::error::Result;
use crate::pool::Pool;
use crate::problem::paged_attention_update::PagedAttentionUpdate;

/// Write the new rows, then attend.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &PagedAttentionUpdate, pool: &dyn Pool) -> Result {
    // SAFETY: the caller's word; no task of the update is left when attention reads the cache.
    unsafe {
        kv_cache_update::run(&problem.update, pool)?;
        attention::run(&problem.attention, pool)
    }
}
