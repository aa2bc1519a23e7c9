//! The operators on NVIDIA GPUs: choose a variant, size the grid, launch on the caller's stream.
//!
//! Works through the driver API on whatever context is current: no device is set, no device memory allocated, nothing
//! waited for, so every launch may be captured into a graph. Each operator has `prepare`, which loads what `launch`
//! with the same problem could choose, and `launch`, which loads by itself what it finds missing. `host_copy` alone
//! waits, for calls that are checked.

pub(crate) mod attention;
pub(crate) mod flash_attn_varlen_bwd;
pub(crate) mod kv_cache_update;
pub(crate) mod merge_attention_states;
pub(crate) mod paged_attention_update;
pub(crate) mod rope_kv_cache_update;
pub(crate) mod simple_add;

mod cache_rows;
mod chunk;
pub(crate) mod device;
mod driver;
pub(crate) mod host_copy;
mod image;
mod kernel;
mod kernel_file;
pub(crate) mod launch;
mod module;
pub(crate) mod params;
#[cfg(test)]
mod sass;
mod tensor_map;
mod tiles;
pub(crate) mod variants;
