//! The tests that can share a process. Each module is a topic, and its name runs it alone: `cargo test --test it
//! tuned_prefill::`.
//!
//! These tests change no state of the process (environment, panic hook, installed pool). Tests that do are in
//! `tests/subprocess`, `tests/soak.rs` and `tests/fuzz`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a failed test")]
#![allow(clippy::print_stdout, reason = "a skipped test says so, and some print tables")]

mod attention;
mod attention_options;
mod bias;
mod conformance;
#[cfg(feature = "cuda")]
mod cuda_alignment;
#[cfg(feature = "cuda")]
mod cuda_boundary;
#[cfg(feature = "cuda")]
mod cuda_graphs;
mod declaration;
mod documentation;
mod f32_accuracy;
mod flash_attn_varlen;
mod flash_attn_varlen_bwd;
mod fp8_accuracy;
mod gather_kv_cache;
mod handler_sets;
mod head_groups;
mod instruction_sets;
mod key_ranges;
mod kv_cache_update;
mod kv_cache_update_fp8;
mod layering;
mod many_partials;
mod merge_attention_states;
mod mla_paged_attention;
mod mla_paged_attention_update;
mod paged_attention;
mod paged_attention_update;
mod portable_split_kv;
mod quantized_cache;
mod ragged_decode;
mod rope_kv_cache_update;
mod rust_interface;
mod rust_operators;
mod simple_add;
mod strides;
#[path = "../support/mod.rs"]
mod support;
mod tree_masks;
mod tuned_backward;
mod tuned_decode;
mod tuned_prefill;
mod tuned_split_kv;
mod vocabulary;
mod warp_tiles;
mod wide_heads;
