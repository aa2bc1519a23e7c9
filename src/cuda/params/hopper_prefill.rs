//! Parameters of the forward attention kernels of sm_90a.

use super::attention::{AttentionParams, KvSource};
use super::bias::BiasSource;
use super::divisor::IndexDivisor;
use super::key_ranges::KeyRangeSource;
use super::tensor_map::TensorMap;
use super::tree_mask::TreeMaskSource;

/// The parameter of `hopper_prefill`, `hopper_prefill_8bit`, `hopper_prefill_fp8`, `hopper_split_kv`, `hopper_split_kv_8bit` and
/// `hopper_prefill_f32`, which uses no tensor maps.
///
/// Query heads are packed as in the portable kernels (`PackGQA`), but a tile has whole queries only, as many as fit:
/// `attention.tile_queries`. A query has `attention.group` rows of a tile. The query heads of a KV head are one pack, or several
/// of a power of two each. One pack may end with *padding heads*, which make the rows of a query a power of two: they are computed
/// and not stored. `attention.num_kv_heads` is the number of packs.
///
/// An atom column is the columns that a row of a swizzle atom holds; a row group is the 8 rows of an atom. Where D or Dv
/// is smaller than the tile's (`clips_columns`), a box is one atom column of one head, so that TMA fills the columns past D
/// with zeros and stores none past Dv.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperPrefillParams {
    pub attention: AttentionParams,
    /// `[atom column, token, pack, head of the pack, column]`, in boxes of a tile's rows. Clipped `[1, token, pack, head of the
    /// pack, column]`. The heads of a pack end before its padding heads.
    pub q: TensorMap,
    /// Contiguous `[1, head, atom column, token, column]`, in boxes of a block of keys. Paged `[page, row group, atom column
    /// of all heads, token of the row group, column]`, in boxes of `box_row_groups` row groups. Clipped
    /// `[1, head, 1, token, column]` and `[page, row group, head, token of the row group, column]`.
    pub k: TensorMap,
    /// As `k`.
    pub v: TensorMap,
    /// As `q`, in boxes of a warp's 16 rows.
    pub out: TensorMap,
    /// The dynamic scheduler's counter, 0 before the launch. Null: CTA c computes tiles c, c + grid, ...
    pub next_tile: *mut u64,
    /// Whether later rows of a sequence attend to more keys, so that LPT order pays.
    pub is_causal: i32,
    /// Paged: row groups per box of K and V, a power of two that divides page and block. 0: rows are copied by `cp.async`.
    pub box_row_groups: i32,
    /// Paged: stride of KV heads of K, in entries of the map's third axis from the right.
    pub k_head_atom_columns: i32,
    /// The same of V.
    pub v_head_atom_columns: i32,
    /// `2^16 / attention.group`, rounded up: row `i < 2^8` of a tile is one of query `(i * group_reciprocal) >> 16`.
    pub group_reciprocal: u32,
    /// Query heads of a pack, without padding heads.
    pub group_heads: i32,
    /// Whether a box of q has one atom column: columns are clipped, or the queries have fewer rows than the tile.
    pub query_boxes_are_columns: i32,
    /// Whether `out` is valid: a warp's 16 rows are stored by TMA.
    pub stores_by_tma: i32,
    /// Whether boxes are of one atom column each, clipped at D and Dv.
    pub clips_columns: i32,
    /// `attention.num_kv_heads`, the number of packs.
    pub packs: IndexDivisor,
    pub packs_per_kv_head: IndexDivisor,
    /// The page size; 1 if keys are contiguous.
    pub page_divisor: IndexDivisor,
}

/// The parameter of `hopper_key_ranges`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperKeyRangeParams {
    pub prefill: HopperPrefillParams,
    pub ranges: KeyRangeSource,
}

/// The parameter of `hopper_row_masks`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperRowMaskParams {
    pub prefill: HopperPrefillParams,
    pub ranges: KeyRangeSource,
    pub tree: TreeMaskSource,
}

/// The parameter of `hopper_bias`. Its tiles have rows of one query head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperBiasParams {
    pub prefill: HopperPrefillParams,
    /// `[1, 1, matrix, row, key]`; a box has the rows of a tile and 64 keys. Unused where rows begin anywhere.
    pub bias: TensorMap,
    pub source: BiasSource,
}

/// The parameter of `hopper_prefill_token_scales` and `hopper_split_kv_token_scales`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperTokenScaleParams {
    pub prefill: HopperPrefillParams,
    /// The f32 scales of the rows of K and of V. Strides are in scales.
    pub k_scales: KvSource,
    pub v_scales: KvSource,
    /// Whether K and V are int8; else e4m3fn.
    pub kv_is_i8: i32,
}

/// The parameter of `hopper_fused`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperFusedParams {
    pub prefill: HopperPrefillParams,
    /// As prefill's K, in boxes of 16 tokens.
    pub k: TensorMap,
    /// As `k`.
    pub v: TensorMap,
    /// Decode's parameter, for the sequences that are too short for prefill. It clears no padding rows.
    pub decode: AttentionParams,
}
