//! 8-bit floats, which are only read: every code is exact in f32.

use super::element::Stored;
use super::simd::Simd;
use crate::tensor::DType;
use half::{bf16, f16};

/// A sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN, and there is no infinity.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct E4m3(pub(super) u8);

/// A sign, 5 bits of exponent with bias 15, 2 of mantissa: the upper byte of an f16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct E5m2(pub(super) u8);

/// How codes of an 8-bit type become f32, by way of f16, in which subnormal numbers are as good as any.
///
/// A code of e5m2 is the upper byte of an f16. One of e4m3fn, moved to where the exponents end alike, is an f16 that is
/// 256 times smaller, because the exponent's bias is 8 larger; subnormal numbers agree. Only its NaN would be a number.
#[derive(Clone, Copy)]
pub(crate) struct CodeFormat {
    /// By how much a code of 16 bits, with its sign extended, moves up
    pub(super) shift: u32,
    /// Bits of it that are the f16's
    pub(super) bits: u16,
    /// The code with all upper bits set that is NaN and is not by itself; 0, which no such code is, without one
    pub(super) nan: u16,
    /// What the f16 has to be multiplied with
    pub(super) factor: f32,
}

impl CodeFormat {
    pub(super) const E4M3: Self = Self { shift: 7, bits: 0xbfff, nan: 0xffff, factor: 256.0 };
    pub(super) const E5M2: Self = Self { shift: 8, bits: 0xffff, nan: 0, factor: 1.0 };

    /// Of `dtype`, f8e4m3fn or f8e5m2.
    pub(super) fn of(dtype: DType) -> Self {
        if dtype == DType::F8E5M2 { Self::E5M2 } else { Self::E4M3 }
    }

    pub(super) const fn decode(self, code: u8) -> f32 {
        let extended = code as i8 as i16 as u16;
        let mut half = extended << self.shift & self.bits;
        if extended | 0xff80 == self.nan {
            half |= 0x7fff;
        }
        f16::from_bits(half).to_f32_const() * self.factor
    }
}

/// The bf16 of an 8-bit type's codes, which are exact: their lower and upper bytes, for codes without a sign.
pub(crate) struct PairTable {
    pub(super) low: [u8; 128],
    pub(super) high: [u8; 128],
}

static E4M3_PAIRS: PairTable = PairTable::new(CodeFormat::E4M3);
static E5M2_PAIRS: PairTable = PairTable::new(CodeFormat::E5M2);

impl PairTable {
    /// Of `dtype`, f8e4m3fn or f8e5m2.
    pub(super) fn of(dtype: DType) -> &'static Self {
        if dtype == DType::F8E5M2 { &E5M2_PAIRS } else { &E4M3_PAIRS }
    }

    const fn new(format: CodeFormat) -> Self {
        let mut table = Self { low: [0; 128], high: [0; 128] };
        let mut code = 0u8;
        while code < 128 {
            let bits = format.decode(code).to_bits();
            (table.low[code as usize], table.high[code as usize]) = ((bits >> 16) as u8, (bits >> 24) as u8);
            code += 1;
        }
        table
    }

    /// The number of a code.
    #[inline(always)]
    pub(super) fn element(&self, code: u8) -> bf16 {
        let magnitude = usize::from(code & 0x7f);
        bf16::from_bits(u16::from_le_bytes([self.low[magnitude], self.high[magnitude] | code & 0x80]))
    }
}

impl Stored for E4m3 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        CodeFormat::E4M3.decode(self.0)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller's word.
        unsafe { simd.load_codes(CodeFormat::E4M3, from.cast()) }
    }
}

impl Stored for E5m2 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        CodeFormat::E5M2.decode(self.0)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the caller's word.
        unsafe { simd.load_codes(CodeFormat::E5M2, from.cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, MAX_LANES, Vectorised};
    use super::*;

    /// The value of a code by the format's definition.
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
    impl Vectorised for AllCodes {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let codes: Vec<u8> = (0..=u8::MAX).collect();
            for first in (0..256).step_by(S::LANES) {
                let (mut e4m3, mut e5m2) = ([0.0f32; MAX_LANES], [0.0f32; MAX_LANES]);
                // SAFETY: LANES codes, LANES <= MAX_LANES.
                unsafe {
                    simd.store(e4m3.as_mut_ptr(), E4m3::load(simd, codes.as_ptr().add(first).cast()));
                    simd.store(e5m2.as_mut_ptr(), E5m2::load(simd, codes.as_ptr().add(first).cast()));
                }
                for i in 0..S::LANES {
                    let code = codes[first + i];
                    let same = |found: f32, one: f32, expected: f32| {
                        let same = |x: f32| x.to_bits() == expected.to_bits() || (x.is_nan() && expected.is_nan());
                        assert!(same(found) && same(one), "{code:#x}: {found} and {one} instead of {expected}");
                    };
                    same(e4m3[i], E4m3(code).to_f32(), value(code, 3, 7, false));
                    same(e5m2[i], E5m2(code).to_f32(), value(code, 2, 15, true));
                    let paired = |dtype| PairTable::of(dtype).element(code).to_f32();
                    same(paired(DType::F8E4M3FN), paired(DType::F8E4M3FN), value(code, 3, 7, false));
                    same(paired(DType::F8E5M2), paired(DType::F8E5M2), value(code, 2, 15, true));
                }
            }
        }
    }

    #[test]
    fn every_code_has_the_value_that_its_format_defines() {
        for isa in Isa::available() {
            isa.run(AllCodes);
        }
    }
}
