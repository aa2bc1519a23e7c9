//! [`super::kv_cache_update`] of a cache in two buffers.

use super::CallArguments;
use super::kv_cache_update::KvCacheUpdate;
use crate::error::Result;

/// The problem of a call.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<KvCacheUpdate<'a>> {
    KvCacheUpdate::in_two_buffers(args)
}
