//! Parameter of the portable backward kernels.

use super::attention::AttentionParams;
use std::ffi::c_void;

/// Shapes use the names of [`AttentionParams`], and Tk for key rows. Strides are in elements.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BackwardParams {
    /// The forward call, over contiguous keys; its `out` and `lse` are read.
    pub forward: AttentionParams,
    /// `[Tq, Hq, Dv]`
    pub dout: *const c_void,
    pub dout_token_stride: i64,
    pub dout_head_stride: i64,
    /// `[Hq, Tq]`; null stands for zeros.
    pub dlse: *const f32,
    /// `[Tq, Hq, D]`, dense.
    pub dq: *mut c_void,
    /// `[Tk, Hkv, D]`, dense.
    pub dk: *mut c_void,
    /// `[Tk, Hkv, Dv]`, dense.
    pub dv: *mut c_void,
    /// `[Hq]`
    pub dsinks: *mut f32,
    /// `[Hq, Tq]` in the workspace: `attention_bwd_dq`, or `attention_bwd_delta` where that is launched, writes it and the
    /// other kernels read it. Null if the workspace is too small; the others then compute it themselves.
    pub delta: *mut f32,
    pub softmax_scale: f32,
    /// Whether dq, dk and dv are f32 and q is not.
    pub widens_gradients: i32,
}
