//! The slot mapping: where the new tokens of a call go in a paged cache.

use std::ffi::c_void;

/// Slot `page * page_size + offset` names a token of the cache.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SlotMapping {
    /// `[T]`, i64 if `are_64_bit`, else i32.
    pub slots: *const c_void,
    /// Slots of the cache: `num_pages * page_size`. Tokens with other slots are not stored.
    pub count: i64,
    pub page_size: i32,
    /// `log2(page_size)`; -1 if that is not a power of two.
    pub page_shift: i32,
    pub are_64_bit: i64,
}
