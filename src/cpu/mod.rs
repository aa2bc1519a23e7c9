//! The operators on the CPU, with the caller's thread pool.

#![allow(clippy::inline_always, reason = "vector code has to end up inside the function that enables its instructions")]

mod aligned;
pub(crate) mod attention;
mod bf16_rounding;
mod cache_rows;
mod element;
mod element_fp8;
mod element_rows;
mod elementary;
pub(crate) mod flash_attn_varlen_bwd;
mod fp8_decoding;
mod fp8_rounding;
pub(crate) mod kv_cache_update;
pub(crate) mod merge_attention_states;
pub(crate) mod paged_attention_update;
mod register_tile;
pub(crate) mod rope_kv_cache_update;
mod simd;
pub(crate) mod simple_add;
