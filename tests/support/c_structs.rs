//! The structures of XLA's `c_api.h` (FFI API 0.1) that a call needs.

use std::ffi::{c_char, c_void};
use std::mem::{offset_of, size_of};

#[repr(C)]
pub struct Extension {
    pub struct_size: usize,
    pub kind: i32,
    pub next: *mut Extension,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ApiVersion {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub major: i32,
    pub minor: i32,
}

pub type Entry = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

#[repr(C)]
pub struct Api {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub version: ApiVersion,
    pub internal: *const c_void,
    pub entries: [Entry; 18],
}

// SAFETY: the table holds constants and function pointers only.
unsafe impl Sync for Api {}

#[repr(C)]
pub struct FfiBuffer {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub dtype: i32,
    pub data: *mut u8,
    pub rank: i64,
    pub dims: *const i64,
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`.
#[repr(C)]
pub struct Buffers {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub size: i64,
    pub types: *const i32,
    pub items: *const *const FfiBuffer,
}

#[repr(C)]
pub struct ByteSpan {
    pub data: *const c_char,
    pub len: usize,
}

#[repr(C)]
pub struct Scalar {
    pub dtype: i32,
    pub value: *const c_void,
}

#[repr(C)]
pub struct ScalarArray {
    pub dtype: i32,
    pub size: usize,
    pub data: *const c_void,
}

#[repr(C)]
pub struct Attributes {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub size: i64,
    pub types: *const i32,
    pub names: *const *const ByteSpan,
    pub values: *const *const c_void,
}

#[repr(C)]
pub struct CallFrame {
    pub struct_size: usize,
    pub extension_start: *mut Extension,
    pub api: *const Api,
    pub context: *const c_void,
    pub stage: i32,
    pub arguments: Buffers,
    pub results: Buffers,
    pub attributes: Attributes,
    pub future: *mut c_void,
}

#[repr(C)]
pub struct Metadata {
    pub struct_size: usize,
    pub version: ApiVersion,
    pub traits: u32,
}

#[repr(C)]
pub struct MetadataExtension {
    pub base: Extension,
    pub metadata: *mut Metadata,
}

/// The value of `XLA_FFI_CallFrame_STRUCT_SIZE`, which does not count `future`.
pub const FRAME_STRUCT_SIZE: usize = offset_of!(CallFrame, future);

const _: () = {
    assert!(size_of::<CallFrame>() == 176 && FRAME_STRUCT_SIZE == 168);
    assert!(size_of::<FfiBuffer>() == 48 && size_of::<Buffers>() == 40 && size_of::<Attributes>() == 48);
    assert!(size_of::<Api>() == 192 && size_of::<ApiVersion>() == 24 && size_of::<Extension>() == 24);
    assert!(size_of::<Metadata>() == 40 && offset_of!(Metadata, traits) + 4 == 36);
    assert!(size_of::<MetadataExtension>() == 32);
};
