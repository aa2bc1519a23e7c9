//! Parameters of the kernels for calls with bounds of the keys of each row (`k_start`, `k_end`).

use super::attention::AttentionParams;
use super::attention_bwd::BackwardParams;

/// The bounds of each query row, `[Tq]`, counted from the sequence's key 0. Null is no bound.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KeyRangeSource {
    pub start: *const i32,
    pub end: *const i32,
}

/// The parameter of `attention_key_ranges`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KeyRangeParams {
    pub attention: AttentionParams,
    pub ranges: KeyRangeSource,
}

/// The parameter of `attention_bwd_*_key_ranges`, and of the kernels that read its beginning.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct KeyRangeBackwardParams {
    pub backward: BackwardParams,
    pub ranges: KeyRangeSource,
}
