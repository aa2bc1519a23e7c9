//! No kernel yet.
use crate::{
    error::{Error, Result},
    ops::kv_cache_update::KvCacheUpdate,
    pool::Pool,
};
pub(crate) unsafe fn run(_: &KvCacheUpdate, _: &dyn Pool) -> Result {
    Err(Error::unimplemented("the platform has no kernel for it yet"))
}
