//! Constants of the kernel `attention_bwd_sinks`.

/// Threads per CTA.
pub const SINKS_THREADS: i32 = 512;
