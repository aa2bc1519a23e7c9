//! Parameters of the forward attention kernels of sm_90a.

use super::attention::AttentionParams;
use super::tensor_map::TensorMap;

/// `key / page_size` of a key below 2^31 is `((key * reciprocal) >> 31) >> shift`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PageDivisor {
    pub reciprocal: u32,
    pub shift: i32,
}

/// The parameter of `hopper_prefill`, `hopper_prefill_fp8`, `hopper_split_kv` and `hopper_prefill_f32`, which uses no tensor
/// maps.
///
/// Query heads are packed as in the portable kernels (`PackGQA`), but by a power of two, `attention.group`. A KV head whose
/// number of query heads is not a power of two has several packs, or one with *padding heads*, whose rows are computed and
/// not stored. `attention.num_kv_heads` is the number of packs.
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
    /// Packs per KV head.
    pub packs_per_kv_head: i32,
    /// Paged: row groups per box of K and V, a power of two that divides page and block. 0: rows are copied by `cp.async`.
    pub box_row_groups: i32,
    /// Paged: stride of KV heads of K, in entries of the map's third axis from the right.
    pub k_head_atom_columns: i32,
    /// The same of V.
    pub v_head_atom_columns: i32,
    /// log2 of `attention.group`.
    pub group_log2: i32,
    /// Query heads of a pack, without padding heads.
    pub group_heads: i32,
    /// Whether `out` is valid: a warp's 16 rows are stored by TMA.
    pub stores_by_tma: i32,
    /// Whether boxes are of one atom column each, clipped at D and Dv.
    pub clips_columns: i32,
    /// For rows that are loaded one by one.
    pub page_divisor: PageDivisor,
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
