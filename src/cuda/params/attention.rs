//! The forward attention kernels for every GPU.

use super::divisor::IndexDivisor;
use super::slots::SlotMapping;
use std::ffi::c_void;

/// Tokens whose addresses decode looks up together. If the page size is a multiple of this, as is usual, they share a
/// page.
pub const TOKENS_PER_LOAD: i32 = 16;

/// Bytes of a `SplitRecord` in the workspace.
pub const SPLIT_RECORD_BYTES: i32 = 64;

/// Minimum keys of a tile that may be split: for shorter ones the combine kernel costs more than splitting saves.
pub const MIN_SPLIT_TILE_KEYS: i32 = 640;

/// The largest magnitude of a `q_offset`.
pub const LARGEST_Q_OFFSET: i32 = 1 << 28;

/// Minimum keys of a split, and of a work range.
pub const MIN_SPLIT_KEYS: i32 = 128;

/// K or V in any layout, by its strides in elements. The elements of a head of a token are contiguous. Contiguous keys are
/// a single page of unlimited size.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KvSource {
    pub base: *const c_void,
    pub page_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
}

/// A scale factor: one for all KV heads (stride 0) or one per KV head (stride 1); null is 1.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ScaleSource {
    pub values: *const f32,
    pub head_stride: i64,
}

/// Where in the caller's workspace a decode launch stores the partial results of split tiles (`partial_rows.cuh`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PartialResults {
    /// `SplitRecord [num_ranges - 1]`: one per boundary between work ranges.
    pub split_records: *mut c_void,
    /// `float2 [Hkv, rows_per_head]`: max and sum of each partial row.
    pub states: *mut c_void,
    /// `float [Hkv, rows_per_head, pitch]`: unnormalized outputs.
    pub outputs: *mut c_void,
    /// Below 2^24.
    pub rows_per_head: i32,
    /// Columns of an output: Dv.
    pub pitch: i32,
    /// Maximum work ranges per KV head, limited by the room for their partials; 0 if no tile may be split.
    pub num_ranges: i32,
    /// `batch_invariant`: maximum fixed-size splits per tile; else 0.
    pub max_fixed_splits: i32,
    /// The factor that turns the kernel's scores, and their `max` in `states`, into logits in base 2.
    pub log2_unit: f32,
    /// If each sequence has up to one query and keys in up to so many KV chunks, warps of decode compute tiles alone
    /// (`warp_tiles.cuh`); 0 if they never do.
    pub max_warp_tile_chunks: i32,
}

/// Keys or values `[Tq, Hkv, D]` of the query rows. Strides are in elements.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NewRowSource {
    pub base: *const c_void,
    pub token_stride: i64,
    pub head_stride: i64,
}

/// Tokens that the cache does not have yet: the last `len_q` keys of each sequence. Decode kernels with `appends_kv` read
/// them from here and store them in the cache (`new_tokens.cuh`); other kernels ignore them.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NewTokens {
    /// If `base` is null, the cache already has all tokens.
    pub key: NewRowSource,
    pub value: NewRowSource,
    /// The slots of all Tq rows, including padding rows.
    pub slots: SlotMapping,
}

/// The element type of q in the kernels for 8-bit K and V.
#[derive(Clone, Copy)]
#[repr(i32)]
pub enum QueryType {
    F16,
    Bf16,
    Fp8,
}

/// The parameter of the portable attention kernels: Tq query rows, B sequence slots, Hq = group * Hkv query heads, P pages.
/// Strides are in elements. Absent operands are null.
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
    /// `[B, max_pages]`; null if keys are contiguous.
    pub block_table: *const i32,
    pub block_table_stride: i64,
    /// `[B + 1]`
    pub cu_seqlens_q: *const i32,
    /// `[B]`
    pub seqused_q: *const i32,
    /// `[B + 1]`; null only if keys are paged and `seqused_k` gives their lengths.
    pub cu_seqlens_k: *const i32,
    /// `[B]`
    pub seqused_k: *const i32,
    /// `[B]`
    pub leftpad_k: *const i32,
    /// `[B]`: the position of query 0 among the keys; if null, `top_left` tells it.
    pub q_offset: *const i32,
    /// A scalar; if null, all B slots are in use.
    pub num_seqs: *const i32,
    /// `[Hq]`, or `[B, Hq]`.
    pub alibi_slopes: *const f32,
    /// Stride of sequences in `alibi_slopes`: 0 or Hq.
    pub alibi_stride: i64,
    /// `[Hq]`
    pub sinks: *const f32,
    pub q_scale: ScaleSource,
    pub k_scale: ScaleSource,
    pub v_scale: ScaleSource,
    /// Factor of the output: what the conversion of fp8 V divides by (`fp8.cuh`); else 1.
    pub value_factor: f32,
    /// `softmax_scale * log2(e)`
    pub softmax_scale_log2: f32,
    /// `softcap * log2(e)`; 0 is off.
    pub softcap_log2: f32,
    /// Factor of q . k: `softmax_scale / softcap`, or without a cap `softmax_scale_log2`; times what the conversions of fp8 q
    /// and K divide by.
    pub score_factor: f32,
    /// Tq
    pub num_tokens: i32,
    /// B
    pub max_seqs: i32,
    /// P; 1 if keys are contiguous.
    pub num_pages: i32,
    /// If keys are contiguous, a multiple of every kernel's block size.
    pub page_size: i32,
    /// Paged keys: `max_pages * page_size`; contiguous keys: rows of K and V. Below 2^31 - 256.
    pub capacity: i32,
    pub num_kv_heads: i32,
    pub group: i32,
    /// `1 / group`
    pub group_reciprocal: f32,
    /// Queries of a tile, which has whole queries, of all CTAs of a cluster. Only `hopper_prefill*` and `hopper_split_kv` read
    /// this field.
    pub tile_queries: IndexDivisor,
    /// D: a multiple of 8 up to the variant's bucket.
    pub head_dim: i32,
    /// Dv: likewise.
    pub value_dim: i32,
    /// How many keys before its position a query attends to; -1 is all.
    pub window_left: i32,
    /// How many keys after its position a query attends to; 0 is causal, -1 is all.
    pub window_right: i32,
    /// Whether query 0 is at the position of key 0; otherwise the last query is at that of the last key.
    pub top_left: i32,
    /// This launch skips sequences with fewer queries. Set per launch.
    pub min_queries: i32,
    /// This launch skips sequences with more queries. Set per launch.
    pub max_queries: i32,
    /// Whether this launch clears the padding rows, which belong to no sequence. Set per launch.
    pub clears_padding_rows: i32,
    /// Only the kernels for fp8 K and V read this field and the next two.
    pub q_type: QueryType,
    /// Whether K and V are e5m2; else e4m3fn.
    pub kv_is_e5m2: i32,
    /// Whether out is bf16; else f16.
    pub out_is_bf16: i32,
    /// Whether out is f32 and q is not.
    pub widens_out: i32,
    /// Only the kernels for fp8 K and V read this field: whether K and V are loaded 8 bytes at a time, because they are not
    /// aligned to 16; else 16.
    pub has_narrow_rows: i32,
    /// Set per launch.
    pub partial: PartialResults,
    /// Set per launch, if the launch also updates the cache.
    pub new_tokens: NewTokens,
}
