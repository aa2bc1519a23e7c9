//! `xla_gpu_paged_attention` through its XLA FFI handler and under guard pages, or on a GPU: against the f64 reference,
//! against hostile metadata, and against itself.

mod agreement;
mod invariance;
mod laws;
mod metadata;
