//! `xla_gpu_flash_attn_varlen_bwd` through its XLA FFI handler and under guard pages, or on a GPU: against the f64
//! reference, against hostile metadata, and against itself.

mod agreement;
mod calls;
mod containment;
mod interface;
mod laws;
mod metadata;
mod reference;
