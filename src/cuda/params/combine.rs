//! `combine`, which combines the partials of split tiles.

/// Threads per CTA.
pub const COMBINE_THREADS: i32 = 256;
