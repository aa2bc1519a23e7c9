//! The parameter of `gather_kv_cache_token_scales`.

use super::gather_kv_cache::GatherParams;
use std::ffi::c_void;

/// K or V: codes and scales of the cache, and the results. Strides are in elements.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ScaledSource {
    pub cache: *const u8,
    pub page_stride: i64,
    pub token_stride: i64,
    pub head_stride: i64,
    pub scales: *const f32,
    pub scale_page_stride: i64,
    pub scale_token_stride: i64,
    pub scale_head_stride: i64,
    /// `[N, Hkv, D]`
    pub rows: *mut c_void,
}

/// The parameter. `gather_kv_cache_starts` reads its beginning.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct GatherTokenScaleParams {
    pub gather: GatherParams,
    pub keys: ScaledSource,
    pub values: ScaledSource,
    pub num_heads: i32,
    pub head_dim: i32,
    /// Whether codes are aligned to 8 bytes and results to 16.
    pub aligned: i32,
    /// Whether the cache is int8; else e4m3fn.
    pub is_i8: i32,
}
