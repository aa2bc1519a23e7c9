//! How the kernels for rows take them: a chunk of neighbouring elements a thread (`kernels/include/chunk.cuh`).

pub(super) use super::params::divisor::Divisor;
use crate::tensor::DType;

/// Bytes of a chunk of rows that are aligned to it.
pub(super) const CHUNK: usize = 16;

/// All of these byte addresses and distances are multiples of `bytes`.
pub(super) fn aligned_to(bytes: usize, places: &[i64]) -> bool {
    places.iter().all(|place| place % bytes as i64 == 0)
}

/// Elements of a piece of rows: of a chunk, or one.
pub(super) fn elements(dtype: DType, chunks: bool) -> u32 {
    if chunks { (CHUNK / dtype.size()) as u32 } else { 1 }
}

impl Divisor {
    /// Of dividends below `end`.
    pub(super) fn new(divisor: u32, end: u64) -> Self {
        // The inverse is too large by less than divisor / 2^32, which no such dividend carries over an integer.
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
