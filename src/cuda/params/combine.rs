//! `combine`, which merges the partial results of split tiles (split-KV).

/// Threads per CTA.
pub const COMBINE_THREADS: i32 = 256;

/// CTAs that run on an SM at a time.
pub const COMBINE_CTAS_PER_SM: i32 = 3;
