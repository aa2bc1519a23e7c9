//! Calls through `xa_call`.

use super::{Attr, Dtype};
use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};
use xla_attention::{XaAttribute, XaCall, XaTensor, xa_call};

/// A number of an attribute kind that does not exist.
const UNKNOWN: i32 = 3;

pub fn c_tensor(dtype: Dtype, dims: &[i64], strides: Option<&[i64]>, data: *mut u8) -> XaTensor {
    let strides = strides.map_or(null(), <[i64]>::as_ptr);
    XaTensor { data: data.cast(), dims: dims.as_ptr(), strides, rank: dims.len() as i32, dtype: dtype.0 }
}

pub fn c_attribute(value: &Attr) -> XaAttribute {
    match *value {
        Attr::Bool(v) => XaAttribute { kind: 0, real: 0.0, integer: v.into() },
        Attr::I64(v) => XaAttribute { kind: 1, real: 0.0, integer: v },
        Attr::F32(v) => XaAttribute { kind: 2, real: v, integer: 0 },
        _ => XaAttribute { kind: UNKNOWN, real: 0.0, integer: 0 },
    }
}

/// A request without attributes and without a stream. It points into `operands` and `results`.
pub fn c_request(op: i32, action: i32, operands: &[XaTensor], results: &[XaTensor]) -> XaCall {
    XaCall {
        struct_size: size_of::<XaCall>(),
        op,
        action,
        operands: operands.as_ptr(),
        num_operands: operands.len(),
        results: results.as_ptr(),
        num_results: results.len(),
        attributes: null(),
        num_attributes: 0,
        stream: null_mut(),
        addresses: null(),
        num_addresses: 0,
    }
}

/// Calls `xa_call`; returns its code and its text.
pub fn c_call(request: *const XaCall) -> (i32, String) {
    let mut text = [0 as c_char; 4096];
    // SAFETY: each request of these tests describes existing memory, and `text` has the given length.
    let code = unsafe { xa_call(request, text.as_mut_ptr(), text.len()) };
    // SAFETY: `xa_call` terminates the text; without a text the buffer is still zero.
    (code, unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}
