//! `rope_kv_cache_update`.

use super::cache_rows::{HeadSharing, NewRows, RowSharing};
use super::slots::SlotMapping;
use std::ffi::c_void;

/// Heads of values in a share of a row, and of queries whose pairs are adjacent.
pub const ROPE_HEADS: i32 = 2;

/// Queries `[T, Hq, D]` and where they go. Strides are in elements; the D elements of a head are contiguous.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct QueryRows {
    pub rows: *const c_void,
    pub row_token_stride: i64,
    pub row_head_stride: i64,
    /// `[T, Hq, D]`
    pub out: *mut c_void,
    pub num_heads: i32,
    pub head_dim: i32,
    /// Whether pieces are chunks, to which both are aligned, or single elements.
    pub aligned: i64,
    pub sharing: HeadSharing,
}

/// Angles by position, and which elements they turn.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Rotation {
    /// `[T]`
    pub positions: *const i32,
    /// `[max_positions, 2 * half]`: cosines, then sines.
    pub cos_sin: *const f32,
    pub row_stride: i64,
    pub max_positions: i32,
    /// Pairs per head.
    pub half: i32,
    /// Whether pairs are adjacent, not `half` apart.
    pub interleaved: i64,
}

/// The parameter of `rope_kv_cache_update`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RopeParams {
    pub key: NewRows,
    pub value: NewRows,
    pub slot_mapping: SlotMapping,
    pub sharing: RowSharing,
    pub query: QueryRows,
    pub rotation: Rotation,
}
