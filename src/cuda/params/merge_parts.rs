//! `merge_parts`, which combines the partials of split tiles.

/// Threads per CTA.
pub const MERGE_PARTS_THREADS: i32 = 256;
