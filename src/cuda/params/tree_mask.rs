//! The parameter of the kernel for rows with bounds of their keys (`k_start`, `k_end`) or trees of queries (`tree_mask`).

use super::attention::AttentionParams;
use super::key_ranges::KeyRangeSource;

/// `tree_mask`, `[max_seqs, max_queries, query_words]`, dense. Null is no tree. A sequence of more than `max_queries` queries has
/// no tree.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TreeMaskSource {
    pub words: *const u32,
    pub max_queries: i32,
    pub query_words: i32,
}

/// The parameter of `attention_row_masks`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RowMaskParams {
    pub attention: AttentionParams,
    pub ranges: KeyRangeSource,
    pub tree: TreeMaskSource,
}
