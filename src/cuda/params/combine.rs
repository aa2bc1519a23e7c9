//! `combine`, which merges the partial results of split tiles (split-KV).

/// Threads per CTA.
pub const COMBINE_THREADS: i32 = 256;
