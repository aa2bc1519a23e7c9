//! From f32 to bf16, in integers.

use half::bf16;

/// Rounded to nearest even; NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    // Add just under half of the last kept place, and one more where that place is odd; a carry into the exponent
    // is right, up to infinity. NaN keeps its upper bits and one that no infinity has.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (got, want) = (round_to_bf16(x), bf16::from_f32(x));
                assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{x}: {got} {want}");
            }
        }
    }
}
