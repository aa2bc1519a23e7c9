//! No kernel yet.
use crate::{
    error::{Error, Result},
    ops::paged_attention::PagedAttention,
    stream::Stream,
};
pub(crate) fn prepare(_: &PagedAttention) -> Result {
    Err(Error::unimplemented("the platform has no kernel for it yet"))
}
/// # Safety
/// none
pub(crate) unsafe fn launch(_: &PagedAttention, _: Stream) -> Result {
    Err(Error::unimplemented("the platform has no kernel for it yet"))
}
