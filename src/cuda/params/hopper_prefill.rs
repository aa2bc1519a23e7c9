//! The forward attention kernels of sm_90a.

use super::attention::AttentionParams;
use super::tensor_map::TensorMap;

/// `key / page_size` of a key below 2^31 is `((key * reciprocal) >> 31) >> shift`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PageDivisor {
    pub reciprocal: u32,
    pub shift: i32,
}

/// Queries of `attention.group` heads are packed as in the portable kernels; the group is a power of two here. Where the
/// heads of a KV head are not, they are several packs, and `attention.num_kv_heads` counts packs.
///
/// Columns of the tensor maps are those of a panel.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperPrefillParams {
    pub attention: AttentionParams,
    /// `[panel, token, head, column]`: boxes of a tile's rows.
    pub q: TensorMap,
    /// Contiguous `[1, head, panel, token, column]`: boxes of a block of keys; paged `[page, its octet, panel of all heads,
    /// token of the octet, column]`: `box_row_groups` octets per box.
    pub k: TensorMap,
    /// Likewise.
    pub v: TensorMap,
    /// `[panel, token, head, column]`: boxes of a warp's rows.
    pub out: TensorMap,
    /// 0 before the launch; without it tiles are dealt out in turn.
    pub next_tile: *mut u64,
    /// Whether later rows of a sequence see more keys.
    pub is_causal: i32,
    pub packs_per_kv_head: i32,
    /// Paged: a power of two that divides page and block; 0: rows are copied one by one.
    pub box_row_groups: i32,
    /// Paged: panels from a KV head of K to the next one.
    pub k_head_atom_columns: i32,
    /// Paged: panels from a KV head of V to the next one.
    pub v_head_atom_columns: i32,
    /// log2 of `attention.group`.
    pub group_log2: i32,
    /// Whether a warp's rows are a box of `out`.
    pub stores_by_tma: i32,
    /// Where rows are copied one by one.
    pub page_divisor: PageDivisor,
}

/// The parameter of `hopper_fused`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HopperFusedParams {
    pub prefill: HopperPrefillParams,
    /// As that of prefill, with boxes of 16 tokens.
    pub k: TensorMap,
    /// Likewise.
    pub v: TensorMap,
    /// Of the sequences that are too short for prefill; clears nothing.
    pub decode: AttentionParams,
}
