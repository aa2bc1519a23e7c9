//! `rope_kv_cache_update`.

use super::cache_rows::{HeadPartition, NewRows, RowPartition};
use super::slots::SlotMapping;
use std::ffi::c_void;

/// Heads per thread of values, and of queries whose rotated pairs are adjacent elements.
pub const ROPE_HEADS_PER_THREAD: i32 = 2;

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
    /// Whether vectors are 16 bytes, to which both tensors are aligned.
    pub aligned: i64,
    pub heads: HeadPartition,
}

/// The rotary embedding: cosines and sines by position, and which elements of a head form pairs.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Rotation {
    /// `[T]`
    pub positions: *const i32,
    /// `[max_positions, 2 * half]`: cosines, then sines.
    pub cos_sin: *const f32,
    pub row_stride: i64,
    pub max_positions: i32,
    /// Rotated pairs per head; 0 without a table.
    pub half: i32,
    /// Whether a pair is two adjacent elements (GPT-J); else its elements are `half` apart (GPT-NeoX).
    pub interleaved: i64,
}

/// The parameter of `rope_kv_cache_update`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RopeParams {
    pub key: NewRows,
    pub value: NewRows,
    pub slot_mapping: SlotMapping,
    pub partition: RowPartition,
    pub query: QueryRows,
    pub rotation: Rotation,
}
