//! Rows of K and V on their way into a paged cache: `kv_cache_update`, and what `rope_kv_cache_update` shares with it.

use super::divisor::Divisor;
use super::slots::SlotMapping;
use std::ffi::c_void;

/// Threads per CTA, at most.
pub const ROW_THREADS: i32 = 192;

/// Heads in a share of a row of `kv_cache_update`: enough loads in flight to keep memory busy, also where little is
/// written for them.
pub const UPDATE_HEADS: i32 = 4;

/// The element type of a cache.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum CacheType {
    AsRows,
    F8E4M3Fn,
    F8E5M2,
}

/// How the heads of a row are shared out: a share is one piece of every `step`-th head, adjacent threads take adjacent
/// pieces.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HeadSharing {
    /// Pieces per head: chunks of 16 bytes, or where something is not aligned to that, elements.
    pub pieces: Divisor,
    /// Pieces per head that are rotated.
    pub turned: u32,
    pub step: u32,
}

/// New rows `[T, Hkv, D]` of K or V and where they go. Strides are in elements; the D elements of a head are contiguous.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NewRows {
    pub rows: *const c_void,
    pub row_token_stride: i64,
    pub row_head_stride: i64,
    pub cache: *mut c_void,
    pub page_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
    /// What is stored is the row divided by it; null for 1.
    pub scale: *const f32,
    /// 0 for one scale, 1 for one per head.
    pub scale_stride: i64,
    pub cache_type: CacheType,
    pub num_heads: i32,
    /// Whether pieces are chunks, and what a cache makes of them is aligned to its size as well.
    pub aligned: i64,
    pub sharing: HeadSharing,
}

/// How rows are shared out.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RowSharing {
    /// T
    pub num_rows: i32,
    /// Rows per CTA; 1 where CTAs share a row.
    pub cta_rows: i32,
    /// Shares per row.
    pub shares: Divisor,
}

/// The parameter of `kv_cache_update`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CacheUpdateParams {
    pub key: NewRows,
    pub value: NewRows,
    pub slot_mapping: SlotMapping,
    pub sharing: RowSharing,
}
