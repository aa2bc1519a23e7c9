//! Rounding of f32 to bf16 in integer arithmetic.

use half::bf16;

/// x rounded to nearest even; NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    // Add just under half a unit in the last place, and one more if that place is odd: ties to even. A carry into the
    // exponent gives the right result, up to infinity. NaN keeps its upper bits, and the quiet bit keeps it from
    // becoming infinity.
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
