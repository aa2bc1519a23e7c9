//! Cache updates on CUDA: bring the old cache over where the result is another buffer, then write the new rows.

use super::cache_rows::{self, bring_over};
use super::launch::launch as launch_kernel;
use super::params::cache_rows::{CacheUpdateParams, NewRows, RowSharing, UPDATE_HEADS};
use super::params::slots::SlotMapping;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::ops::kv_cache_update::KvCacheUpdate;
use crate::stream::Stream;

const KERNEL: &str = "kv_cache_update";
const KERNEL_SM80: &str = "kv_cache_update_sm80";

fn variant(problem: &KvCacheUpdate) -> Result<usize> {
    cache_rows::variant([KERNEL, KERNEL_SM80], problem.key.rows.dtype)
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &KvCacheUpdate) -> Result {
    module::function(variant(problem)?).map(|_| ())
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the caches writable.
pub(crate) unsafe fn launch(problem: &KvCacheUpdate, stream: Stream) -> Result {
    // SAFETY: this function's contract.
    unsafe { bring_over(problem, stream) }?;
    let slot_mapping = SlotMapping::new(problem);
    let num_rows = problem.slot_mapping.len();
    if num_rows == 0 || slot_mapping.is_empty() {
        return Ok(());
    }
    let variant = variant(problem)?;
    let key = NewRows::new(&problem.key, problem.cache_dtype, UPDATE_HEADS as u32);
    let value = NewRows::new(&problem.value, problem.cache_dtype, UPDATE_HEADS as u32);
    let (sharing, shape) = RowSharing::new(num_rows, &[&key.sharing, &value.sharing])?;
    log::call(KERNEL, (variant, problem.cache_dtype, shape), || {
        format!("{} into {} with {shape:?}", variants::VARIANTS[variant].name, problem.cache_dtype)
    });
    let params = CacheUpdateParams { key, value, slot_mapping, sharing };
    // SAFETY: `CacheUpdateParams` is the kernel's parameter; the caller vouches for the memory.
    unsafe { launch_kernel(module::function(variant)?, shape, stream, &params) }
}
