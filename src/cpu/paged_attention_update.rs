//! Cache update followed by attention over the updated cache, on the CPU.

use super::{attention, kv_cache_update};
use crate::error::Result;
use crate::pool::Pool;
use crate::problem::paged_attention_update::PagedAttentionUpdate;

/// Write the new K and V rows into the cache, then compute attention.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &PagedAttentionUpdate, pool: &dyn Pool) -> Result {
    // SAFETY: the caller guarantees valid views and exclusive results. All tasks of the update have ended when
    // attention reads the cache.
    unsafe {
        kv_cache_update::run(&problem.update, pool)?;
        attention::run(&problem.attention, pool)
    }
}
