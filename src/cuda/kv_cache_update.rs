//! Cache updates on CUDA: bring the old cache over where the result is another buffer, then write the new rows.

use super::cache_rows::{self, bring_over};
use super::kernel::Launch;
use super::params::cache_rows::{CacheUpdateParams, NewRows, RowSharing, UPDATE_HEADS};
use super::params::slots::SlotMapping;
use crate::error::Result;
use crate::problem::kv_cache_update::KvCacheUpdate;
use crate::stream::Stream;

const KERNEL: &str = "kv_cache_update";
const KERNEL_SM80: &str = "kv_cache_update_sm80";

/// `None` where no row can have a slot.
fn plan(problem: &KvCacheUpdate) -> Result<Option<Launch<CacheUpdateParams>>> {
    let slot_mapping = SlotMapping::new(problem);
    let num_rows = problem.slot_mapping.len();
    if num_rows == 0 || slot_mapping.is_empty() {
        return Ok(None);
    }
    let variant = cache_rows::variant([KERNEL, KERNEL_SM80], problem.key.rows.dtype)?;
    let key = NewRows::new(&problem.key, problem.cache_dtype, UPDATE_HEADS as u32);
    let value = NewRows::new(&problem.value, problem.cache_dtype, UPDATE_HEADS as u32);
    let (sharing, shape) = RowSharing::new(num_rows, &[&key.sharing, &value.sharing])?;
    Ok(Some(Launch::new(KERNEL, variant, shape, CacheUpdateParams { key, value, slot_mapping, sharing })))
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &KvCacheUpdate) -> Result {
    plan(problem)?.iter().try_for_each(Launch::load)
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the caches writable.
pub(crate) unsafe fn launch(problem: &KvCacheUpdate, stream: Stream) -> Result {
    let plan = plan(problem)?;
    // SAFETY: this function's contract.
    unsafe { bring_over(problem, stream) }?;
    // SAFETY: `CacheUpdateParams` is the kernel's parameter; the caller vouches for the memory.
    plan.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
}
