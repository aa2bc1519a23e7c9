//! Cache updates on CUDA: bring the old cache over where the result is another buffer, then write the new rows.

use super::cache_rows::{self, RowParams, RowSharing, SlotParams, bring_over};
use super::launch::launch as launch_kernel;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::ops::kv_cache_update::KvCacheUpdate;
use crate::stream::Stream;

const KERNEL: &str = "kv_cache_update";
const KERNEL_SM80: &str = "kv_cache_update_sm80";

/// Heads in a share of a row: `kHeads` of the kernel.
const HEADS: u32 = 4;

/// `CacheUpdateParams` of `kernels/kv_cache_update.cu`.
#[repr(C)]
struct Params {
    key: RowParams,
    value: RowParams,
    slot_mapping: SlotParams,
    sharing: RowSharing,
}

// The kernel asserts the same number.
const _: () = assert!(size_of::<Params>() == 256);

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
    let slot_mapping = SlotParams::new(problem);
    let num_rows = problem.slot_mapping.len();
    if num_rows == 0 || slot_mapping.is_empty() {
        return Ok(());
    }
    let variant = variant(problem)?;
    let key = RowParams::new(&problem.key, problem.cache_dtype, HEADS);
    let value = RowParams::new(&problem.value, problem.cache_dtype, HEADS);
    let (sharing, shape) = RowSharing::new(num_rows, &[&key.sharing, &value.sharing])?;
    log::call(KERNEL, (variant, problem.cache_dtype, shape), || {
        format!("{} into {} with {shape:?}", variants::VARIANTS[variant].name, problem.cache_dtype)
    });
    let params = Params { key, value, slot_mapping, sharing };
    // SAFETY: `Params` is the kernel's parameter; the caller vouches for the memory.
    unsafe { launch_kernel(module::function(variant)?, shape, stream, &params) }
}
