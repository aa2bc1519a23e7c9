//! `kv_cache_update` on CUDA: copies the old cache if the result is another buffer, then stores the new rows.

use super::cache_rows::{self, copy_unaliased_caches};
use super::kernel_launch::{Launch, Parameter};
use super::params::cache_rows::{CacheUpdateParams, NewRows, RowPartition, UPDATE_HEADS_PER_THREAD};
use super::params::slots::SlotMapping;
use super::token_scale_update;
use crate::error::Result;
use crate::problem::kv_cache_update::KvCacheUpdate;
use crate::stream::Stream;

const KERNEL: &str = "kv_cache_update";
const KERNEL_SM80: &str = "kv_cache_update_sm80";

/// The launch; `None` if there is no row or no slot.
fn plan(problem: &KvCacheUpdate) -> Result<Option<Launch<CacheUpdateParams>>> {
    let slot_mapping = SlotMapping::new(problem);
    let num_rows = problem.slot_mapping.len();
    if num_rows == 0 || slot_mapping.is_empty() {
        return Ok(None);
    }
    let variant = cache_rows::variant([KERNEL, KERNEL_SM80], problem.key.rows.dtype)?;
    let key = NewRows::new(&problem.key, problem.cache_dtype, UPDATE_HEADS_PER_THREAD as u32);
    let value = NewRows::new(&problem.value, problem.cache_dtype, UPDATE_HEADS_PER_THREAD as u32);
    let (partition, config) = RowPartition::new(num_rows, &[&key.heads, &value.heads])?;
    Ok(Some(Launch::new(KERNEL, variant, config, CacheUpdateParams { key, value, slot_mapping, partition })))
}

/// Loads the kernel that [`launch`] enqueues.
pub(crate) fn prepare(problem: &KvCacheUpdate) -> Result {
    match &problem.scale_cache {
        None => plan(problem)?.iter().try_for_each(Launch::load),
        Some(scales) => token_scale_update::plan(problem, scales)?.iter().try_for_each(Launch::load),
    }
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the caches writable.
pub(crate) unsafe fn launch(problem: &KvCacheUpdate, stream: Stream) -> Result {
    // SAFETY: the plans are of this problem and have their kernels' parameters; this function has the same contract.
    unsafe {
        match &problem.scale_cache {
            None => enqueue(problem, plan(problem)?.as_ref(), stream),
            Some(scales) => enqueue(problem, token_scale_update::plan(problem, scales)?.as_ref(), stream),
        }
    }
}

/// Copies the caches that are not updated in place, then enqueues the update.
///
/// # Safety
/// As [`launch`]; the plan is of this problem, with its kernel's parameter.
unsafe fn enqueue<P: Parameter>(problem: &KvCacheUpdate, plan: Option<&Launch<P>>, stream: Stream) -> Result {
    // SAFETY: the caller guarantees the memory and the parameter.
    unsafe {
        copy_unaliased_caches(problem, stream)?;
        plan.map_or(Ok(()), |launch| launch.enqueue(stream))
    }
}
