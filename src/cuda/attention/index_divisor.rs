//! Division of numbers below 2^31 with a multiplication.

use crate::cuda::params::divisor::IndexDivisor;

impl IndexDivisor {
    /// `divisor` is positive and below 2^31.
    pub(super) fn of(divisor: u64) -> Self {
        // The divisor is in (2^(shift - 1), 2^shift], so the reciprocal fits 32 bits, and rounding it up adds less than 1 / divisor to
        // a quotient.
        let shift = divisor.next_power_of_two().trailing_zeros();
        Self {
            divisor: divisor as i32,
            reciprocal: (1u64 << (31 + shift)).div_ceil(divisor) as u32,
            shift: shift as i32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_exact() {
        let largest = (1u64 << 31) - 1;
        for divisor in [1, 2, 3, 4, 12, 100, 641, 65_535, 65_537, 1 << 30, (1 << 30) + 1, largest - 1, largest] {
            let IndexDivisor { reciprocal, shift, .. } = IndexDivisor::of(divisor);
            let divide = |n: u64| ((n * u64::from(reciprocal)) >> 31) >> shift;
            for multiple in [0, 1, 2, 3, 1000, largest / divisor - 1, largest / divisor] {
                let first = multiple * divisor;
                for n in [first.saturating_sub(1), first, first + 1, first + divisor - 1, largest] {
                    if n <= largest {
                        assert_eq!(divide(n), n / divisor, "{n} / {divisor}");
                    }
                }
            }
        }
    }
}
