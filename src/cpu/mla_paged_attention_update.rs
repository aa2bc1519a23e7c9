//! Update of a latent cache followed by attention over it, on the CPU.

use super::{attention, kv_cache_update};
use crate::error::Result;
use crate::pool::Pool;
use crate::problem::mla_paged_attention_update::MlaPagedAttentionUpdate;

/// Write the new latent rows into the cache, then compute attention.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, the results writable and not otherwise accessed.
pub(crate) unsafe fn run(problem: &MlaPagedAttentionUpdate, pool: &dyn Pool) -> Result {
    // SAFETY: the caller guarantees valid views and exclusive results. All tasks of the update have ended when
    // attention reads the cache. Keys and values of the update are different columns.
    unsafe {
        problem.with_cache_update(|update| kv_cache_update::run(update, pool))?;
        attention::run(&problem.attention, pool)
    }
}
