//! The kernels of attention's gradients for every GPU.

use super::attention::AttentionParams;
use std::ffi::c_void;

/// Letters as of [`AttentionParams`], and Tk key rows. Strides are in elements.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BackwardParams {
    /// Over contiguous keys; its out and lse are read.
    pub forward: AttentionParams,
    /// `[Tq, Hq, Dv]`
    pub dout: *const c_void,
    pub dout_token_stride: i64,
    pub dout_head_stride: i64,
    /// `[Hq, Tq]`; null is 0.
    pub dlse: *const f32,
    /// `[Tq, Hq, D]`, dense.
    pub dq: *mut c_void,
    /// `[Tk, Hkv, D]`, dense.
    pub dk: *mut c_void,
    /// `[Tk, Hkv, Dv]`, dense.
    pub dv: *mut c_void,
    /// `[Hq]`
    pub dsinks: *mut f32,
    /// `[Hq, Tq]`, which `attention_bwd_dq` writes for the others; null where there is no room for it.
    pub delta: *mut f32,
    pub softmax_scale: f32,
    pub reserved: i32,
}
