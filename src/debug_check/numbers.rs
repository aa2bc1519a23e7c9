//! Reads elements of any dtype as f64, and writes f64 as a float dtype.

use crate::tensor::DType;
use half::{bf16, f16};

/// Reads the element at `at` as f64.
///
/// # Safety
/// `at` points to a readable element of this dtype.
pub(super) unsafe fn read(dtype: DType, at: *const u8) -> f64 {
    // SAFETY: the caller guarantees a readable element, and buffers are aligned to their element
    // (`Tensor::check_data`).
    unsafe {
        match dtype {
            DType::F16 => at.cast::<f16>().read().to_f64(),
            DType::BF16 => at.cast::<bf16>().read().to_f64(),
            DType::F32 => f64::from(at.cast::<f32>().read()),
            DType::F64 => at.cast::<f64>().read(),
            DType::I8 => f64::from(at.cast::<i8>().read()),
            DType::I32 => f64::from(at.cast::<i32>().read()),
            DType::I64 => at.cast::<i64>().read() as f64,
            // An e5m2 number is the upper byte of an f16.
            DType::F8E5M2 => f16::from_bits(u16::from(at.read()) << 8).to_f64(),
            DType::F8E4M3FN => e4m3fn(at.read()),
            _ => f64::from(at.read()),
        }
    }
}

fn e4m3fn(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        15 if code & 7 == 7 => f64::NAN,
        0 => mantissa * (-9f64).exp2(),
        _ => (8.0 + mantissa) * f64::from(exponent - 10).exp2(),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Writes `x`, rounded to nearest.
///
/// # Safety
/// `at` points to a writable element of this dtype, which is f16, bf16 or f32.
pub(super) unsafe fn write(dtype: DType, at: *mut u8, x: f64) {
    // SAFETY: the caller guarantees a writable element, and buffers are aligned to their element.
    unsafe {
        match dtype {
            DType::F16 => at.cast::<f16>().write(f16::from_f64(x)),
            DType::BF16 => at.cast::<bf16>().write(bf16::from_f64(x)),
            _ => at.cast::<f32>().write(x as f32),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "exact results are expected")]

    use super::*;

    #[test]
    fn the_numbers_of_8_bits_are_those_of_their_definition() {
        let numbers = |dtype, codes: [u8; 5]| {
            codes.map(|code| {
                // SAFETY: `code` is an element of one byte.
                unsafe { read(dtype, &raw const code) }
            })
        };
        assert_eq!(numbers(DType::F8E4M3FN, [0x00, 0x01, 0x38, 0x7e, 0xb9]), [0.0, 0.001_953_125, 1.0, 448.0, -1.125]);
        assert_eq!(numbers(DType::F8E5M2, [0x00, 0x3c, 0x7b, 0x7c, 0xbd]), [0.0, 1.0, 57344.0, f64::INFINITY, -1.25]);
        assert!(numbers(DType::F8E4M3FN, [0x7f, 0xff, 0x7f, 0xff, 0x7f]).iter().all(|x| x.is_nan()));
    }
}
