//! The operators on the CPU, with the caller's thread pool.

pub(crate) mod kv_cache_update;
pub(crate) mod paged_attention;
pub(crate) mod simple_add;
