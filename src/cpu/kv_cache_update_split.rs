//! [`super::kv_cache_update`], which handles one buffer and two alike.

pub(crate) use super::kv_cache_update::run;
