//! [`super::kv_cache_update`] for a cache with K and V in two buffers.

use super::CallArguments;
use super::kv_cache_update::KvCacheUpdate;
use crate::error::Result;

/// Validates a call and returns its problem.
pub(crate) fn problem<'a>(args: &CallArguments<'a>) -> Result<KvCacheUpdate<'a>> {
    KvCacheUpdate::in_two_buffers(args)
}
