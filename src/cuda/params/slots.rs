//! Where the tokens of a call go in a paged cache.

use std::ffi::c_void;

/// Slot `page * page_size + offset` names a token of the cache.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SlotMapping {
    /// `[T]`, i64 if `are_64_bit`, else i32.
    pub slots: *const c_void,
    /// Slots of the cache.
    pub count: i64,
    pub page_size: i32,
    /// `page_size` is 2 to the power of it; -1 where it is no power of two.
    pub page_shift: i32,
    pub are_64_bit: i64,
}
