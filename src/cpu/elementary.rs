//! `2^x` and `tanh x` on vectors.

use super::simd::Simd;

/// Minimax coefficients of `P(f) = (2^f - 1) / f` for |f| <= 1/2, lowest power first. The relative error of `1 + f *
/// P(f)` is at most 2.0e-9.
const EXP2: [f32; 6] =
    [std::f32::consts::LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_5, 0.000_153_533_62];

/// Minimax coefficients of `Q(x^2) = (tanh(x) / x - 1) / x^2` for |x| < 0.625, lowest power first. The relative error
/// of `x + x^3 * Q(x^2)` is at most 4.2e-9.
const TANH: [f32; 5] = [-0.333_332_84, 0.133_314_9, -0.053_743_497, 0.020_650_584, -0.005_717_042_4];

/// `2^x` with a relative error of at most 2e-7 for `-126 <= x < 127.5`. Below, the result is at most 2^-126, and 0 for
/// -inf; NaN stays NaN. For x of 127.5 and more the result is unspecified.
#[inline(always)]
pub(super) fn exp2<S: Simd>(simd: S, x: S::V) -> S::V {
    let (f, n) = simd.split_fraction(x);
    let mut p = simd.splat(EXP2[5]);
    for i in (0..5).rev() {
        p = simd.fma(p, f, simd.splat(EXP2[i]));
    }
    simd.scale_by_power_of_2(simd.fma(p, f, simd.splat(1.0)), n)
}

/// `tanh x` with a relative error of at most 3e-7; NaN stays NaN.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::V) -> S::V {
    let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
    let negative = simd.sub(zero, x);
    let magnitude = simd.max(negative, x);
    // The odd polynomial near 0, elsewhere 1 - 2 / (e^(2|x|) + 1), which rounds to 1 from |x| = 9.1 on.
    let square = simd.mul(x, x);
    let mut q = simd.splat(TANH[4]);
    for i in (0..4).rev() {
        q = simd.fma(q, square, simd.splat(TANH[i]));
    }
    let small = simd.fma(simd.mul(q, square), x, x);
    let exponent = simd.mul(magnitude, simd.splat(2.0 * std::f32::consts::LOG2_E));
    let limit = simd.splat(40.0);
    let exponential = exp2(simd, simd.select_lt(limit, exponent, limit, exponent));
    let large = simd.sub(one, simd.div(simd.splat(2.0), simd.add(exponential, one)));
    let large = simd.select_lt(x, zero, simd.sub(zero, large), large);
    simd.select_lt(magnitude, simd.splat(0.625), small, large)
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, MAX_LANES, SimdKernel};
    use super::*;

    /// Applies `exp2` or `tanh` to all of `x`, in place.
    struct Apply<'a> {
        x: &'a mut [f32],
        tanh: bool,
    }
    impl SimdKernel for Apply<'_> {
        type Output = ();
        #[inline(always)]
        unsafe fn run<S: Simd>(self, simd: S) {
            for chunk in self.x.chunks_exact_mut(S::LANES) {
                // SAFETY: the chunk has LANES elements.
                unsafe {
                    let x = simd.load(chunk.as_ptr());
                    simd.store(chunk.as_mut_ptr(), if self.tanh { tanh(simd, x) } else { exp2(simd, x) });
                }
            }
        }
    }

    fn apply(isa: Isa, x: &[f32], tanh: bool) -> Vec<f32> {
        let mut padded = x.to_vec();
        padded.resize(x.len().next_multiple_of(MAX_LANES), 0.0);
        // SAFETY: `Apply` has no contract: it works on its slice.
        unsafe { isa.dispatch(Apply { x: &mut padded, tanh }) };
        padded.truncate(x.len());
        padded
    }

    fn largest_relative_error(x: &[f32], y: &[f32], exact: impl Fn(f64) -> f64) -> f64 {
        let error = |(&x, &y): (&f32, &f32)| (f64::from(y) / exact(f64::from(x)) - 1.0).abs();
        x.iter().zip(y).map(error).fold(0.0, f64::max)
    }

    #[test]
    fn exp2_is_within_its_stated_error_of_the_f64_result() {
        let x: Vec<f32> = (0..4_000_000).map(|i| i as f32 * (253.4 / 4e6) - 126.0).collect();
        for isa in Isa::available() {
            let error = largest_relative_error(&x, &apply(isa, &x, false), f64::exp2);
            assert!(error < 2e-7, "{isa:?}: {error:e}");
            let y = apply(isa, &[0.0, f32::NEG_INFINITY, 1.0, f32::NAN, -126.1, -127.6, -140.0, -1e30], false);
            assert_eq!(y[..3], [1.0, 0.0, 2.0], "{isa:?}");
            assert!(y[3].is_nan(), "{isa:?}: {y:?}");
            assert!(y[4..].iter().all(|y| (0.0..=f32::MIN_POSITIVE).contains(y)), "{isa:?}: {y:?}");
        }
    }

    #[test]
    fn tanh_is_within_its_stated_error_of_the_f64_result() {
        let x: Vec<f32> = (1..2_000_000).map(|i| i as f32 * 1e-5 - 10.0).filter(|x| *x != 0.0).collect();
        for isa in Isa::available() {
            let error = largest_relative_error(&x, &apply(isa, &x, true), f64::tanh);
            assert!(error < 3e-7, "{isa:?}: {error:e}");
            let y = apply(isa, &[0.0, 1e-20, f32::INFINITY, f32::NEG_INFINITY, 1e30, f32::NAN], true);
            assert_eq!(y[..5], [0.0, 1e-20, 1.0, -1.0, 1.0], "{isa:?}");
            assert!(y[5].is_nan(), "{isa:?}: {y:?}");
        }
    }
}
