//! Encoding of f32 as 8-bit floats, in integer arithmetic and one addition, so that the compiler vectorises plain
//! loops.

use crate::tensor::DType;

/// How f32 is rounded to an 8-bit type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Encoding {
    mantissa_bits: u32,
    bias: u32,
    /// The largest finite number.
    largest: f32,
}

impl Fp8Encoding {
    const E4M3FN: Self = Self { mantissa_bits: 3, bias: 7, largest: 448.0 };
    const E5M2: Self = Self { mantissa_bits: 2, bias: 15, largest: 57344.0 };

    /// `None` for a type of more than 8 bits.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F8E4M3FN => Some(Self::E4M3FN),
            DType::F8E5M2 => Some(Self::E5M2),
            _ => None,
        }
    }

    /// x rounded to nearest even, with saturation: larger magnitudes and infinities become the largest finite number.
    /// Every NaN becomes 0x7f.
    #[inline(always)]
    pub(super) fn encode(self, x: f32) -> u8 {
        let dropped = 23 - self.mantissa_bits;
        let smallest_normal = (128 - self.bias) << 23;
        // A power of two whose unit in the last place is the distance between subnormal numbers.
        let coarse = (128 + 23 - self.bias - self.mantissa_bits) << 23;
        let bits = x.to_bits();
        let magnitude = (bits & 0x7fff_ffff).min(self.largest.to_bits());
        // Add just under half a unit in the last place, and one more if that place is odd: ties to even. A carry into
        // the exponent gives the right result.
        let rounded = magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1);
        let normal = (rounded >> dropped).wrapping_sub((127 - self.bias) << self.mantissa_bits);
        // The addition rounds to a multiple of the distance between subnormal numbers, and the low mantissa bits of the
        // sum hold that multiple.
        let sum = f32::from_bits(magnitude) + f32::from_bits(coarse);
        let subnormal = sum.to_bits().wrapping_sub(coarse);
        let code = if magnitude < smallest_normal { subnormal } else { normal };
        if x.is_nan() { 0x7f } else { (code | (bits >> 31) << 7) as u8 }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "exact results are expected")]

    use super::*;

    /// The magnitude of an fp8 bit pattern below 0x7f by the definition of the format.
    fn magnitude(format: Fp8Encoding, code: u32) -> f64 {
        let (exponent, mantissa) = (code >> format.mantissa_bits, code % (1 << format.mantissa_bits));
        let implied = if exponent == 0 { 0 } else { 1 << format.mantissa_bits };
        let exponent = exponent.max(1) as i32 - format.bias as i32 - format.mantissa_bits as i32;
        f64::from(implied + mantissa) * f64::from(exponent).exp2()
    }

    #[test]
    fn numbers_round_to_the_nearest_code_and_ties_to_even() {
        for (format, last) in [(Fp8Encoding::E4M3FN, 0x7e), (Fp8Encoding::E5M2, 0x7b)] {
            assert_eq!(magnitude(format, last), f64::from(format.largest));
            for code in 0..last {
                let (low, high) = (magnitude(format, code) as f32, magnitude(format, code + 1) as f32);
                let middle = f32::midpoint(low, high);
                let even = code + code % 2;
                let expected = [
                    (low, code),
                    (low.next_up(), code),
                    (middle.next_down(), code),
                    (middle, even),
                    (middle.next_up(), code + 1),
                    (high.next_down(), code + 1),
                    (high, code + 1),
                ];
                for (x, code) in expected {
                    assert_eq!(u32::from(format.encode(x)), code, "{x:e} in {format:?}");
                    assert_eq!(u32::from(format.encode(-x)), code | 0x80, "-{x:e} in {format:?}");
                }
            }
            for x in [format.largest.next_up(), 2.0 * format.largest, f32::MAX, f32::INFINITY] {
                assert_eq!((format.encode(x), format.encode(-x)), (last as u8, last as u8 | 0x80), "{x:e}");
            }
            for nan in [0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff] {
                assert_eq!(format.encode(f32::from_bits(nan)), 0x7f, "{nan:#x}");
            }
        }
    }
}
