//! The operators on the CPU, with the caller's thread pool.

mod aligned;
mod element;
mod elementary;
pub(crate) mod kv_cache_update;
pub(crate) mod paged_attention;
mod simd;
pub(crate) mod simple_add;
