//! 8-bit floats as element types that are only read. Every value is exact in f32.

use super::element::LoadElement;
use super::fp8_decoding::Fp8Decoding;
use super::simd::Simd;

/// f8e4m3fn: a sign, 4 bits of exponent with bias 7, 3 of mantissa. 0x7f and 0xff are NaN, and there is no infinity.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct E4m3(pub(super) u8);

/// f8e5m2: a sign, 5 bits of exponent with bias 15, 2 of mantissa, the upper byte of an f16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct E5m2(pub(super) u8);

impl LoadElement for E4m3 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Fp8Decoding::E4M3.decode(self.0)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller guarantees LANES readable elements.
        unsafe { simd.load_fp8(Fp8Decoding::E4M3, from.cast()) }
    }
}

impl LoadElement for E5m2 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Fp8Decoding::E5M2.decode(self.0)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller guarantees LANES readable elements.
        unsafe { simd.load_fp8(Fp8Decoding::E5M2, from.cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fp8_decoding::Fp8ToBf16Table;
    use super::super::simd::{Isa, MAX_LANES, SimdKernel};
    use super::*;
    use crate::tensor::DType;

    /// The value of an fp8 bit pattern by the definition of the format.
    fn value(code: u8, mantissa_bits: i32, bias: i32, has_infinity: bool) -> f32 {
        let (sign, magnitude) = (if code & 0x80 == 0 { 1.0 } else { -1.0 }, i32::from(code & 0x7f));
        let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude % (1 << mantissa_bits));
        let all_ones = exponent == (0x7f >> mantissa_bits);
        if has_infinity && all_ones {
            return if mantissa == 0 { sign * f32::INFINITY } else { f32::NAN };
        }
        if !has_infinity && magnitude == 0x7f {
            return f32::NAN;
        }
        let (exponent, implied) = if exponent == 0 { (1, 0) } else { (exponent, 1 << mantissa_bits) };
        sign * (implied + mantissa) as f32 * ((exponent - bias - mantissa_bits) as f32).exp2()
    }

    struct AllCodes;
    impl SimdKernel for AllCodes {
        type Output = ();
        #[inline(always)]
        unsafe fn run<S: Simd>(self, simd: S) {
            let codes: Vec<u8> = (0..=u8::MAX).collect();
            let bits = |x| {
                let mut lanes = [0.0f32; MAX_LANES];
                // SAFETY: MAX_LANES >= LANES.
                unsafe { simd.store(lanes.as_mut_ptr(), x) };
                lanes.map(f32::to_bits)
            };
            for first in (0..256).step_by(2 * S::LANES) {
                for format in [Fp8Decoding::E4M3, Fp8Decoding::E5M2] {
                    // SAFETY: 2 * LANES divides 256, so there are 2 * LANES codes from `first` on.
                    let [both, each] = unsafe {
                        let from = codes[first..].as_ptr();
                        [simd.load_fp8_2(format, from), [0, 1].map(|i| simd.load_fp8(format, from.add(i * S::LANES)))]
                    };
                    assert_eq!(both.map(bits), each.map(bits), "from code {first:#x} on");
                }
            }
            for first in (0..256).step_by(S::LANES) {
                let (mut e4m3, mut e5m2) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
                // SAFETY: LANES divides 256, so there are LANES codes from `first` on, and MAX_LANES >= LANES.
                unsafe {
                    simd.store(e4m3.as_mut_ptr(), E4m3::load(simd, codes.as_ptr().add(first).cast()));
                    simd.store(e5m2.as_mut_ptr(), E5m2::load(simd, codes.as_ptr().add(first).cast()));
                }
                for i in 0..S::LANES {
                    let code = codes[first + i];
                    let assert_both = |vector: f32, scalar: f32, expected: f32| {
                        let same = |x: f32| x.to_bits() == expected.to_bits() || (x.is_nan() && expected.is_nan());
                        assert!(same(vector) && same(scalar), "{code:#x}: {vector} and {scalar}, expected {expected}");
                    };
                    assert_both(e4m3[i], E4m3(code).to_f32(), value(code, 3, 7, false));
                    assert_both(e5m2[i], E5m2(code).to_f32(), value(code, 2, 15, true));
                    let paired = |dtype| Fp8ToBf16Table::of(dtype).to_bf16::<false>(code).to_f32();
                    assert_both(paired(DType::F8E4M3FN), paired(DType::F8E4M3FN), value(code, 3, 7, false));
                    assert_both(paired(DType::F8E5M2), paired(DType::F8E5M2), value(code, 2, 15, true));
                }
            }
        }
    }

    #[test]
    fn every_code_has_the_value_that_its_format_defines() {
        for isa in Isa::available() {
            // SAFETY: `AllCodes` has no contract: it uses its own arrays.
            unsafe { isa.dispatch(AllCodes) };
        }
    }
}
