//! An update, whatever the cache lies in: [`super::kv_cache_update`].

pub(crate) use super::kv_cache_update::{launch, prepare};
