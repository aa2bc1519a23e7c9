//! No kernel yet.
use crate::{
    error::{Error, Result},
    ops::kv_cache_update::KvCacheUpdate,
    stream::Stream,
};
pub(crate) fn prepare(_: &KvCacheUpdate) -> Result {
    Err(Error::unimplemented("the platform has no kernel for it yet"))
}
/// # Safety
/// none
pub(crate) unsafe fn launch(_: &KvCacheUpdate, _: Stream) -> Result {
    Err(Error::unimplemented("the platform has no kernel for it yet"))
}
