//! The operators on the CPU, with the caller's thread pool.

#![allow(clippy::inline_always, reason = "vector code has to end up inside the function that enables its instructions")]

mod aligned;
mod element;
mod elementary;
pub(crate) mod kv_cache_update;
pub(crate) mod paged_attention;
mod simd;
pub(crate) mod simple_add;
