//! `merge_attention_states`.

use super::divisor::Divisor;
use std::ffi::c_void;

/// Threads per CTA.
pub const MERGE_STATES_THREADS: u32 = 256;

/// Attention over one set of keys. Strides are in elements; the d elements of a head are contiguous.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AttentionState {
    /// `[n, h, d]`
    pub out: *const c_void,
    pub row_stride: i64,
    pub head_stride: i64,
    /// `[h, n]`
    pub lse: *const f32,
}

/// The parameter of `merge_attention_states`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MergeParams {
    pub a: AttentionState,
    pub b: AttentionState,
    /// `[n, h, d]`
    pub out: *mut c_void,
    /// `[h, n]`
    pub lse: *mut f32,
    pub num_rows: i64,
    pub num_heads: i32,
    pub head_dim: i32,
    /// Whether the heads of all three outs consist of chunks of 16 bytes, aligned to 16.
    pub aligned: i32,
    /// Rows per CTA; 1 where CTAs share a row.
    pub cta_rows: i32,
    /// Pieces per row: chunks, or where those are not aligned, elements.
    pub row_items: Divisor,
    /// Pieces per head.
    pub head_items: Divisor,
}
