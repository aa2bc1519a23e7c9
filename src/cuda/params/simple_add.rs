//! The parameter of `simple_add`.

use std::ffi::c_void;

/// `out[i] = a[i] + b[i]` for i < n.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SimpleAddParams {
    pub a: *const c_void,
    pub b: *const c_void,
    pub out: *mut c_void,
    pub n: i64,
}
