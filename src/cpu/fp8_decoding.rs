//! Decoding of 8-bit floats to f32, and of 8-bit types to bf16.

use crate::tensor::DType;
use half::{bf16, f16};

/// How an 8-bit type is decoded to f32: by shifts to f16, whose conversion to f32 handles subnormal numbers.
///
/// A number of e5m2 is the upper byte of an f16. A number of e4m3fn, shifted so that the exponents align, is an f16
/// that is 256 times smaller, because the bias of f16 is 8 larger; this holds for subnormal numbers too. Its NaN alone
/// needs a special case, as these bits are a finite f16.
#[derive(Clone, Copy)]
pub(crate) struct Fp8Decoding {
    /// Left shift of the number, sign-extended to 16 bits.
    pub(super) shift: u32,
    /// Mask of the shifted bits that belong to the f16.
    pub(super) bits: u16,
    /// The NaN that needs a special case, with all bits from the sign up set; 0, which never matches, if there is none.
    pub(super) nan: u16,
    /// Factor of the f16.
    pub(super) factor: f32,
}

impl Fp8Decoding {
    pub(super) const E4M3: Self = Self { shift: 7, bits: 0xbfff, nan: 0xffff, factor: 256.0 };
    pub(super) const E5M2: Self = Self { shift: 8, bits: 0xffff, nan: 0, factor: 1.0 };

    /// For `dtype`, which is f8e4m3fn or f8e5m2.
    pub(super) fn of(dtype: DType) -> Self {
        if dtype == DType::F8E5M2 { Self::E5M2 } else { Self::E4M3 }
    }

    pub(super) const fn decode(self, code: u8) -> f32 {
        let extended = code as i8 as i16 as u16;
        let mut half = extended << self.shift & self.bits;
        if extended | 0xff80 == self.nan {
            half |= 0x7fff;
        }
        if half & 0x7fff > 0x7c00 {
            // The NaN that the CPU's conversion gives: a product of NaN at compile time may have other bits.
            return f32::from_bits((half as u32 & 0x8000) << 16 | 0x7fc0_0000 | (half as u32 & 0x3ff) << 13);
        }
        f16::from_bits(half).to_f32_const() * self.factor
    }
}

/// The bf16 of all magnitudes of an 8-bit type, which are exact, in two arrays: low bytes and high bytes. Index 0 of i8 is
/// that of 128.
pub(crate) struct Fp8ToBf16Table {
    pub(super) low: [u8; 128],
    pub(super) high: [u8; 128],
}

static E4M3_PAIRS: Fp8ToBf16Table = Fp8ToBf16Table::new(Some(Fp8Decoding::E4M3));
static E5M2_PAIRS: Fp8ToBf16Table = Fp8ToBf16Table::new(Some(Fp8Decoding::E5M2));
static I8_PAIRS: Fp8ToBf16Table = Fp8ToBf16Table::new(None);

impl Fp8ToBf16Table {
    /// For `dtype`, which is f8e4m3fn, f8e5m2 or i8.
    pub(super) fn of(dtype: DType) -> &'static Self {
        match dtype {
            DType::F8E5M2 => &E5M2_PAIRS,
            DType::I8 => &I8_PAIRS,
            _ => &E4M3_PAIRS,
        }
    }

    /// Of 8-bit floats, or of i8.
    const fn new(format: Option<Fp8Decoding>) -> Self {
        let mut table = Self { low: [0; 128], high: [0; 128] };
        let mut code = 0u8;
        while code < 128 {
            let number = match format {
                Some(format) => format.decode(code),
                None if code == 0 => 128.0,
                None => code as f32,
            };
            let bits = number.to_bits();
            (table.low[code as usize], table.high[code as usize]) = ((bits >> 16) as u8, (bits >> 24) as u8);
            code += 1;
        }
        table
    }

    /// The bf16 of a bit pattern; with `I8` this is the table of i8.
    #[inline(always)]
    pub(super) fn to_bf16<const I8: bool>(&self, code: u8) -> bf16 {
        if I8 {
            return bf16::from_bits((f32::from(code as i8).to_bits() >> 16) as u16);
        }
        let magnitude = usize::from(code & 0x7f);
        bf16::from_bits(u16::from_le_bytes([self.low[magnitude], self.high[magnitude] | code & 0x80]))
    }
}
