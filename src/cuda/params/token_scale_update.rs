//! The parameter of `kv_cache_update_token_scales`, and what the kernel shares with the host.

use super::cache_rows::RowPartition;
use super::slots::SlotMapping;
use std::ffi::c_void;

/// Elements of a row that a thread has at a time. Head dimensions are multiples of this.
pub const TOKEN_SCALE_ELEMENTS: i32 = 8;

/// The smallest largest magnitude of a row that is not stored as zeros.
pub const SMALLEST_SCALED_ROW: f32 = 7.888_609e-31;

/// New rows `[T, Hkv, D]` of K or V, and where their codes and scales go. Strides are in elements.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct QuantizedRows {
    pub rows: *const c_void,
    pub row_token_stride: i64,
    pub row_head_stride: i64,
    pub cache: *mut u8,
    pub page_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
    pub scales: *mut f32,
    pub scale_page_stride: i64,
    pub scale_token_stride: i64,
    pub scale_head_stride: i64,
    /// Whether rows are aligned to 16 bytes and their codes to 8; else a thread loads and stores single elements.
    pub aligned: i64,
}

/// The parameter.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TokenScaleUpdateParams {
    pub key: QuantizedRows,
    pub value: QuantizedRows,
    pub slot_mapping: SlotMapping,
    /// The rows are those of a token: K of all heads, then V.
    pub partition: RowPartition,
    pub num_heads: i32,
    pub head_dim: i32,
    /// A group of `1 << group_shift` threads, at most a warp, has a head of K or V.
    pub group_shift: i32,
    /// Whether the cache is int8; else e4m3fn.
    pub is_i8: i32,
}
