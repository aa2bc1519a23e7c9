//! `combine`, which merges the partial results of split tiles (split-KV).

/// Threads per CTA.
pub const COMBINE_THREADS: i32 = 256;

/// Four columns of a row each, which a thread merges at a time if a tile has few partials.
pub const COMBINE_ITEMS_AT_ONCE: i32 = 4;
