//! No kernel yet.
use crate::{
    error::{Error, Result},
    ops::paged_attention::PagedAttention,
    pool::Pool,
};
pub(crate) unsafe fn run(_: &PagedAttention, _: &dyn Pool) -> Result {
    Err(Error::unimplemented("the platform has no kernel for it yet"))
}
