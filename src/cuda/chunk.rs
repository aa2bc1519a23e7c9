//! The chunks in which kernels copy rows (`kernels/include/chunk.cuh`): 16 bytes, or one element without that alignment.

pub(super) use super::params::divisor::Divisor;
use crate::tensor::DType;

/// Bytes of a chunk of aligned rows.
pub(super) const CHUNK: usize = 16;

/// Whether all of these byte addresses and strides are multiples of `bytes`.
pub(super) fn aligned_to(bytes: usize, places: &[i64]) -> bool {
    places.iter().all(|place| place % bytes as i64 == 0)
}

/// Elements per chunk: 16 bytes of them, or one if rows are not aligned.
pub(super) fn elements(dtype: DType, aligned: bool) -> u32 {
    if aligned { (CHUNK / dtype.size()) as u32 } else { 1 }
}

impl Divisor {
    /// A divisor of dividends below `end`.
    pub(super) fn new(divisor: u32, end: u64) -> Self {
        // The inverse is rounded up, by less than 1 in units of 2^-32. The error of a quotient is then less than
        // dividend / 2^32 <= 1 / divisor, the least distance of a quotient to the next integer above it.
        let fits = divisor > 1 && end.saturating_mul(u64::from(divisor)) <= 1 << 32;
        let inverse = if fits { (1_u64 << 32).div_ceil(u64::from(divisor)) as u32 } else { 0 };
        Self { divisor, inverse }
    }
}

#[test]
fn the_inverse_divides_every_dividend_that_comes() {
    for divisor in (1..300).chain([1 << 12, 4097, 65535, 65536, 65537, u32::MAX]) {
        for end in [1, 1000, 1 << 15, 1 << 16, 1 << 20, 1 << 32] {
            let by = Divisor::new(divisor, end);
            // A quotient goes wrong first just below a multiple, and at the end.
            let dividends = (1..=500).map(|n| n * u64::from(divisor) - 1).chain(end.saturating_sub(500)..end);
            for n in dividends.filter(|n| *n < end && by.inverse != 0) {
                assert_eq!((n * u64::from(by.inverse)) >> 32, n / u64::from(divisor), "{n} / {divisor} below {end}");
            }
        }
    }
    assert_ne!(Divisor::new(128, 1 << 20).inverse, 0);
}
