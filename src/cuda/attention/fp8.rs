//! How the kernels for fp8 K and V get their numbers (`kernels/include/fp8.cuh`).

use crate::ops::attention::Attention;
use crate::tensor::DType;

/// `Fp8Format` of `kernels/include/attention_params.cuh`, which says what each is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Fp8Format {
    shift: u32,
    carry: u32,
    special: u32,
    spread: u32,
    scale: u32,
}

/// A format, and what numbers of it are divided by when the kernels have decoded them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8 {
    pub(super) format: Fp8Format,
    pub(super) divisor: f32,
}

/// The same for both halves of a word.
const fn pair(half: u32) -> u32 {
    half << 16 | half
}

impl Fp8 {
    /// Where K and V are fp8. q that is fp8 has K's format (SPEC 2.1).
    pub(super) fn of(problem: &Attention) -> Option<Self> {
        let is_e5m2 = match problem.kv_dtype {
            DType::F8E4M3FN => false,
            DType::F8E5M2 => true,
            _ => return None,
        };
        Some(match (compute_dtype(problem), is_e5m2) {
            // Biases 127 and 15: the bit above the five of the exponent.
            (DType::BF16, true) => {
                let (carry, special) = (pair(1 << 7), pair(1 << 12));
                let format = Fp8Format { shift: 3, carry, special, spread: 0b111, scale: bf16_power_of_two(112) };
                Self { format, divisor: 1.0 }
            }
            // Biases 127 and 7: the bit above the four of the exponent. Its only special number has all bits set.
            (DType::BF16, false) => {
                let (carry, special) = (pair(1 << 4), pair(1 << 11));
                let format = Fp8Format { shift: 4, carry, special, spread: 0b1111, scale: bf16_power_of_two(120) };
                Self { format, divisor: 1.0 }
            }
            (_, true) => Self { format: Fp8Format::default(), divisor: 1.0 },
            // Biases 15 and 7.
            (_, false) => Self { format: Fp8Format { shift: 1, ..Fp8Format::default() }, divisor: 256.0 },
        })
    }
}

/// What the kernel computes in.
pub(super) fn compute_dtype(problem: &Attention) -> DType {
    if problem.q.dtype == DType::F8E4M3FN { DType::F16 } else { problem.q.dtype }
}

/// Two bf16.
const fn bf16_power_of_two(exponent: u32) -> u32 {
    pair((127 + exponent) << 7)
}

#[cfg(test)]
mod tests {
    use super::super::tests::problem;
    use super::*;
    use crate::tensor::Tensor;
    use half::{bf16, f16};

    /// What `decode_fp8_pair` of `kernels/include/fp8.cuh` makes of a code, for one half.
    fn decoded(fp8: &Fp8, is_bf16: bool, code: u8) -> f32 {
        let codes = u32::from(code) << 8;
        let x = (codes & 0x8000) | ((codes & 0x7f00) >> fp8.format.shift);
        if is_bf16 {
            let special = (x + (fp8.format.carry & 0xffff)) & fp8.format.special & 0xffff;
            let scale = bf16::from_bits((fp8.format.scale & 0xffff) as u16);
            bf16::from_f32(bf16::from_bits((special * fp8.format.spread + x) as u16).to_f32() * scale.to_f32()).to_f32()
        } else {
            f16::from_bits((x | ((x + 0x80) & 0x4000)) as u16).to_f32() * fp8.divisor
        }
    }

    /// A number of `mantissa` bits of mantissa, from its definition.
    fn defined(code: u8, mantissa: u32, bias: i32) -> f32 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = (i32::from((code & 0x7f) >> mantissa), f32::from(code & ((1 << mantissa) - 1)));
        let unit = 2f32.powi(-(mantissa as i32));
        match exponent {
            0 => sign * fraction * unit * 2f32.powi(1 - bias),
            31 if mantissa == 2 && matches!(code & 3, 0) => sign * f32::INFINITY,
            31 if mantissa == 2 => f32::NAN,
            15 if mantissa == 3 && code & 7 == 7 => f32::NAN,
            _ => sign * (1.0 + fraction * unit) * 2f32.powi(exponent - bias),
        }
    }

    #[test]
    fn every_code_of_every_format_is_decoded_exactly() {
        let plain = problem(1, 1, 2, 64);
        for (q, is_bf16) in [(DType::F16, false), (DType::BF16, true)] {
            for (kv_dtype, mantissa, bias) in [(DType::F8E4M3FN, 3, 7), (DType::F8E5M2, 2, 15)] {
                let problem = Attention { q: Tensor { dtype: q, ..plain.q }, kv_dtype, ..plain };
                let fp8 = Fp8::of(&problem).expect("it is fp8");
                for code in 0..=u8::MAX {
                    let (found, wanted) = (decoded(&fp8, is_bf16, code), defined(code, mantissa, bias));
                    let same = found.to_bits() == wanted.to_bits() || (found.is_nan() && wanted.is_nan());
                    assert!(same, "{kv_dtype} {code:#x} for {q}: {found}, expected {wanted}");
                }
            }
        }
    }
}
