//! `xla_gpu_flash_attn_varlen_bwd` through its XLA FFI handler and under guard pages, or on a GPU: against the f64
//! reference, against hostile metadata, and against itself.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "../support/mod.rs"]
mod support;

mod agreement;
mod calls;
mod containment;
mod interface;
mod laws;
mod metadata;
mod reference;
