//! Division by a number that the host knows.

/// A divisor that the host knows.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Divisor {
    pub divisor: u32,
    /// 2^32 / divisor, rounded up; 0 where some dividend is too large for it.
    pub inverse: u32,
}
