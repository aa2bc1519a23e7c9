//! The forward attention kernels for every GPU.

use super::slots::SlotMapping;
use std::ffi::c_void;

/// Keys that decode looks up and loads together. In pages of a multiple of them, as nearly all are, they are adjacent.
pub const TOKENS_PER_LOAD: i32 = 16;

/// Bytes of a split record (`SplitRecord`) in the workspace.
pub const SPLIT_RECORD_BYTES: i32 = 64;

/// A tile of fewer keys is left whole: splitting it costs more than it is worth.
pub const MIN_SPLIT_TILE_KEYS: i32 = 640;

/// Keys of a part of a split tile, and of a CTA's work range, at least.
pub const MIN_SPLIT_KEYS: i32 = 128;

/// K or V in any layout: element strides between adjacent pages, tokens of a page, heads. The elements of a token's head
/// are contiguous. Contiguous keys are one page without an end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KvSource {
    pub base: *const c_void,
    pub page_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
}

/// Factors: one (stride 0) or one per KV head (stride 1); null is 1.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ScaleSource {
    pub values: *const f32,
    pub head_stride: i64,
}

/// Where decode launches leave what several CTAs computed of a tile, in the caller's workspace (`partial_rows.cuh`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PartialResults {
    /// `SplitRecord [groups - 1]`: those of the work ranges after the first.
    pub split_records: *mut c_void,
    /// `float2 [Hkv, rows_per_head]`: max and sum.
    pub states: *mut c_void,
    /// `float [Hkv, rows_per_head, pitch]`
    pub outputs: *mut c_void,
    /// Below 2^24.
    pub rows_per_head: i32,
    /// Columns of an output: Dv.
    pub pitch: i32,
    /// Work ranges that have room for their partials; 0 where no tile may be split.
    pub num_ranges: i32,
    /// `batch_invariant`: spans per tile at most; else 0.
    pub max_fixed_splits: i32,
    /// Logits to base 2 are this times the scores that `max` is one of.
    pub log2_unit: f32,
    pub reserved: i32,
}

/// Keys or values `[Tq, Hkv, D]` of the query rows. Strides are in elements.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NewRowSource {
    pub base: *const c_void,
    pub token_stride: i64,
    pub head_stride: i64,
}

/// Tokens that the cache does not hold yet: the last `len_q` keys of each sequence. Decode of more than 8 bits takes them
/// from here and stores them in the cache (`new_tokens.cuh`); other kernels ignore them.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NewTokens {
    /// Without a base the cache holds all.
    pub key: NewRowSource,
    pub value: NewRowSource,
    /// Of every row, whether it belongs to a sequence or not.
    pub slots: SlotMapping,
}

/// What q is, where K and V have 8 bits.
#[derive(Clone, Copy)]
#[repr(i32)]
pub enum QueryType {
    F16,
    Bf16,
    Fp8,
}

/// Tq query rows, B sequence slots, Hq = group * Hkv query heads, P pages. Strides are in elements. What the caller leaves
/// out is null.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AttentionParams {
    /// `[Tq, Hq, D]`
    pub q: *const c_void,
    pub q_token_stride: i64,
    pub q_head_stride: i64,
    /// `[Tq, Hq, Dv]`
    pub out: *mut c_void,
    pub out_token_stride: i64,
    pub out_head_stride: i64,
    /// `[Hq, Tq]`
    pub lse: *mut f32,
    pub k: KvSource,
    pub v: KvSource,
    /// `[B, max_pages]`; without it the keys are contiguous.
    pub block_table: *const i32,
    pub block_table_stride: i64,
    /// `[B + 1]`
    pub cu_seqlens_q: *const i32,
    /// `[B]`
    pub seqused_q: *const i32,
    /// `[B + 1]`; given where keys are contiguous, or `seqused_k` is not.
    pub cu_seqlens_k: *const i32,
    /// `[B]`
    pub seqused_k: *const i32,
    /// `[B]`
    pub leftpad_k: *const i32,
    /// One number; without it all B slots are in use.
    pub num_seqs: *const i32,
    /// `[Hq]`, or `[B, Hq]`.
    pub alibi_slopes: *const f32,
    /// From a sequence's slopes to the next one's: 0 or Hq.
    pub alibi_stride: i64,
    /// `[Hq]`
    pub sinks: *const f32,
    pub q_scale: ScaleSource,
    pub k_scale: ScaleSource,
    pub v_scale: ScaleSource,
    /// Factor of the output: what fp8 V's numbers have been divided by.
    pub value_factor: f32,
    /// `softmax_scale * log2(e)`
    pub softmax_scale_log2: f32,
    /// `softcap * log2(e)`; 0 is off.
    pub softcap_log2: f32,
    /// Factor of q . k: `softmax_scale / softcap`, or `softmax_scale_log2` where there is no cap; times what fp8 numbers
    /// have been divided by.
    pub score_factor: f32,
    /// Tq
    pub num_tokens: i32,
    /// B
    pub max_seqs: i32,
    /// P; 1 where keys are contiguous.
    pub num_pages: i32,
    /// Where keys are contiguous, a multiple of every block's size.
    pub page_size: i32,
    /// Paged: longest context that a row of `block_table` can name; contiguous: rows of K and V. Below 2^31 - 256.
    pub capacity: i32,
    pub num_kv_heads: i32,
    pub group: i32,
    /// `1 / group`
    pub group_reciprocal: f32,
    /// D: a multiple of 8 up to the variant's bucket.
    pub head_dim: i32,
    /// Dv: likewise.
    pub value_dim: i32,
    /// Keys before the query's own position that it sees; -1 is all.
    pub window_left: i32,
    /// Keys after it; 0 is causal, -1 is all.
    pub window_right: i32,
    /// Whether query 0 is aligned with key 0, else the last query with the last key.
    pub top_left: i32,
    /// Sequences with fewer queries are another launch's. Set for each launch.
    pub min_queries: i32,
    /// Sequences with more queries are another launch's. Set for each launch.
    pub max_queries: i32,
    /// Whether this launch writes the rows that belong to no sequence. Set for each launch.
    pub clears_padding_rows: i32,
    /// Read, as the rest, by kernels for fp8 K and V only.
    pub q_type: QueryType,
    /// Else e4m3fn.
    pub kv_is_e5m2: i32,
    /// Else of the type that the kernel computes in.
    pub out_is_bf16: i32,
    /// K and V are chunks of 8 bytes, aligned to 8, else of 16.
    pub has_narrow_rows: i32,
    /// Set for each launch.
    pub partial: PartialResults,
    /// Set where the cache is yet to be updated.
    pub new_tokens: NewTokens,
}
