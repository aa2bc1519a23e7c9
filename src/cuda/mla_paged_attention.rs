//! `mla_paged_attention` on CUDA: the launches of attention over a latent cache.

use super::attention::LaunchPlan;
use crate::error::Result;
use crate::problem::attention::Attention;
use crate::stream::Stream;

/// Loads the kernels that [`launch`] enqueues.
pub(crate) fn prepare(problem: &Attention) -> Result {
    LaunchPlan::of_latent(problem)?.load()
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernels' run; `out`, `lse` and the
/// workspace are writable.
pub(crate) unsafe fn launch(problem: &Attention, stream: Stream) -> Result {
    // SAFETY: this function has the same contract.
    unsafe { LaunchPlan::of_latent(problem)?.launch(stream) }
}
