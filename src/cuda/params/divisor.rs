//! Division by a number that the host knows.

/// A divisor of numbers `n` below 2^31: `n / divisor` is `((n * reciprocal) >> 31) >> shift`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IndexDivisor {
    pub divisor: i32,
    pub reciprocal: u32,
    pub shift: i32,
}

/// A divisor that the host knows.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Divisor {
    pub divisor: u32,
    /// 2^32 / divisor, rounded up; 0 where some dividend is too large for it.
    pub inverse: u32,
}
