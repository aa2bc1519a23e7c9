//! Gradients of attention on CUDA.

use crate::error::{Error, Result};
use crate::ops::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::stream::Stream;

/// Load the kernels that [`launch`] takes.
pub(crate) fn prepare(_problem: &FlashAttnVarlenBwd) -> Result {
    Err(Error::unimplemented("gradients are not there yet"))
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernels' run, the results writable.
pub(crate) unsafe fn launch(problem: &FlashAttnVarlenBwd, _stream: Stream) -> Result {
    prepare(problem)
}
