//! `xla_gpu_flash_attn_varlen` through its XLA FFI handler and under guard pages, or on a GPU: against the f64
//! reference, against hostile metadata, and against itself.

mod agreement;
mod containment;
mod interface;
mod invariance;
mod laws;
mod merging;
mod metadata;
