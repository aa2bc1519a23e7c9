//! Quantization of rows that have a scale each (`docs/semantics.md#caches-with-a-scale-per-row`), in plain loops that the
//! compiler vectorises.

use super::fp8_encoding::Fp8Encoding;
use crate::problem::{SMALLEST_ROW, largest_code};
use crate::tensor::DType;

/// Adding this to an f32 of a small magnitude rounds it to an integer, ties to even, which the low bits of the sum hold.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// How rows become codes and a scale.
#[derive(Clone, Copy)]
pub(super) struct RowQuantization {
    largest: f32,
    /// `None` for i8.
    fp8: Option<Fp8Encoding>,
}

impl RowQuantization {
    /// For a cache of `dtype`, i8 or f8e4m3fn.
    pub(super) fn of(dtype: DType) -> Self {
        Self { largest: largest_code(dtype), fp8: Fp8Encoding::of(dtype) }
    }

    /// Writes the codes of a row and returns its scale. A row with a NaN or an infinity has a scale of NaN and codes of 0.
    ///
    /// # Safety
    /// `to` has `row.len()` writable bytes.
    #[inline(always)]
    pub(super) unsafe fn quantize(self, row: &[f32], to: *mut u8) -> f32 {
        // In the order of their bits NaN and infinities come after all other magnitudes.
        let largest = f32::from_bits(row.iter().fold(0, |bits, x| bits.max(x.to_bits() & 0x7fff_ffff)));
        if largest < SMALLEST_ROW || !largest.is_finite() {
            // SAFETY: the caller guarantees this number of bytes.
            unsafe { to.write_bytes(0, row.len()) };
            return if largest.is_finite() { 0.0 } else { f32::NAN };
        }
        let factor = self.largest / largest;
        for (i, x) in row.iter().enumerate() {
            let code = match self.fp8 {
                Some(format) => format.encode(x * factor),
                // At most 127 after rounding, since the product is at most 127 times 1 + 2^-23.
                None => (x * factor + ROUND).to_bits() as u8,
            };
            // SAFETY: i < row.len().
            unsafe { to.add(i).write(code) };
        }
        largest / self.largest
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "exact results are expected")]

    use super::*;

    fn quantized(dtype: DType, row: &[f32]) -> (Vec<u8>, f32) {
        let mut codes = vec![0x55; row.len()];
        // SAFETY: there are as many codes as numbers.
        let scale = unsafe { RowQuantization::of(dtype).quantize(row, codes.as_mut_ptr()) };
        (codes, scale)
    }

    #[test]
    fn codes_are_rounded_to_nearest_and_the_largest_magnitude_has_the_largest_code() {
        let row = [127.0, -127.0, 0.5, 1.5, -2.5, 3.499, -0.0, 126.5];
        let (codes, scale) = quantized(DType::I8, &row);
        assert_eq!(codes.iter().map(|c| *c as i8).collect::<Vec<_>>(), [127, -127, 0, 2, -2, 3, 0, 126]);
        assert_eq!(scale, 1.0);
        let (codes, scale) = quantized(DType::F8E4M3FN, &[448.0, -448.0, 1.0, 0.0, -0.0]);
        assert_eq!((codes, scale), (vec![0x7e, 0xfe, 0x38, 0, 0x80], 1.0));
        // The factor is rounded, and the largest code all the same.
        for largest in [0.1f32, 1.0 / 3.0, 7.77e-9, f32::MAX, SMALLEST_ROW, 1e-20] {
            assert_eq!(quantized(DType::I8, &[largest, -largest]), (vec![127, 0x81], largest / 127.0));
            assert_eq!(quantized(DType::F8E4M3FN, &[largest, -largest]), (vec![0x7e, 0xfe], largest / 448.0));
        }
    }

    #[test]
    fn rows_of_zeros_and_rows_with_a_nan_have_codes_of_0() {
        for dtype in [DType::I8, DType::F8E4M3FN] {
            for zero in [[0.0f32, -0.0], [SMALLEST_ROW.next_down(), 0.0], [f32::from_bits(1), -1e-40]] {
                assert_eq!(quantized(dtype, &zero), (vec![0, 0], 0.0));
            }
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let (codes, scale) = quantized(dtype, &[1.0, bad, 3.0]);
                assert!(scale.to_bits() == 0x7fc0_0000 && codes == [0, 0, 0], "{bad}: {scale}, {codes:?}");
            }
        }
    }
}
