//! Interleaved and separate caches share one implementation: [`super::kv_cache_update`].

pub(crate) use super::kv_cache_update::{launch, prepare};
