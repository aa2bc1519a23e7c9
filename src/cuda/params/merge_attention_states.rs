//! The parameter of `merge_attention_states`.

use super::divisor::Divisor;
use std::ffi::c_void;

/// Threads per CTA.
pub const MERGE_STATES_THREADS: u32 = 256;

/// The attention state of one set of keys. Strides are in elements; the d elements of a head are contiguous.
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
pub struct MergeStatesParams {
    pub a: AttentionState,
    pub b: AttentionState,
    /// `[n, h, d]`
    pub out: *mut c_void,
    /// `[h, n]`
    pub lse: *mut f32,
    pub num_rows: i64,
    pub num_heads: i32,
    pub head_dim: i32,
    /// Whether vectors are 16 bytes: the heads of all three outs are multiples of that and aligned to it.
    pub aligned: i32,
    /// Rows per CTA; 1 when several CTAs (`blockIdx.y`) work on one row.
    pub cta_rows: i32,
    /// Vectors per row. A vector is 16 bytes, or one element if not `aligned`.
    pub row_vectors: Divisor,
    /// Vectors per head.
    pub head_vectors: Divisor,
}
