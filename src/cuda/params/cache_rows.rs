//! New rows of K and V that are stored in a paged cache: `kv_cache_update`, and what `rope_kv_cache_update` shares with it.
//!
//! A thread copies one *vector* of a few heads of one row: 16 bytes, or a single element where rows or cache are not
//! aligned to that.

use super::divisor::Divisor;
use super::slots::SlotMapping;
use std::ffi::c_void;

/// Maximum threads per CTA.
pub const ROW_THREADS: i32 = 192;

/// Heads per thread of `kv_cache_update`: enough loads in flight to saturate DRAM, also when an fp8 cache makes the stores
/// small.
pub const UPDATE_HEADS_PER_THREAD: i32 = 4;

/// The element type of a cache.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum CacheType {
    /// The type of the new rows.
    AsRows,
    F8E4M3Fn,
    F8E5M2,
}

/// How the vectors of a row `[num_heads, D]` are divided between threads: a thread takes the same vector of every `step`-th
/// head, and adjacent threads take adjacent vectors, so that accesses coalesce.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct HeadPartition {
    /// Vectors per head. Where rotated pairs are `half` apart, a vector of first elements and the one of their second
    /// elements count as one.
    pub vectors: Divisor,
    /// Vectors per head that are rotated; they come first.
    pub rotated: u32,
    /// `ceil(num_heads / heads per thread)`
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
    /// Rows are divided by it before they are stored; null is 1.
    pub scale: *const f32,
    /// 0 for one scale, 1 for one per head.
    pub scale_stride: i64,
    pub cache_type: CacheType,
    pub num_heads: i32,
    /// Whether vectors are 16 bytes: rows are aligned to that, and the cache to what it stores of a vector.
    pub aligned: i64,
    pub heads: HeadPartition,
}

/// How rows are divided between CTAs and threads.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RowPartition {
    /// T
    pub num_rows: i32,
    /// Rows per CTA; 1 when several CTAs (`blockIdx.y`) work on one row.
    pub cta_rows: i32,
    /// Threads per row.
    pub threads: Divisor,
}

/// The parameter of `kv_cache_update`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CacheUpdateParams {
    pub key: NewRows,
    pub value: NewRows,
    pub slot_mapping: SlotMapping,
    pub partition: RowPartition,
}
