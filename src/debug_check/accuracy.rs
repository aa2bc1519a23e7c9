//! How far a result may be off from its definition (`docs/semantics.md#error-bounds`, `docs/kernels.md` for fp8), for the
//! check and for the tests, which include this file (`tests/support/expected_rows.rs`).

/// A log-sum-exp: of its size, or of 1 where that is less.
pub(crate) const LSE: f64 = 1e-4;
/// The same with a soft cap in 16 bits: a hyperbolic tangent of 11 bits.
pub(crate) const LSE_CAPPED: f64 = 2e-2;

/// Head dimensions D = Dv at which tensor cores may multiply q, K and V of e4m3fn as they are.
pub(crate) const FP8_HEAD_DIMS: [usize; 2] = [128, 256];
/// Rounding of a weight to e4m3fn: of the weight itself.
pub(crate) const FP8_WEIGHT: f64 = 1.0 / 16.0;
/// And of the row's largest weight, which is 2^8: numbers of e4m3fn are 2^-9 apart at least.
pub(crate) const FP8_SMALL_WEIGHT: f64 = 1.0 / (1u64 << 18) as f64;

/// How far off a score may be where tensor cores add products of fp8 with 14 bits, by `magnitude`, the sum of the
/// products' magnitudes: each step of 32 products cuts off what is below 2^-13 of its largest number.
pub(crate) fn fp8_score(head_dim: usize, magnitude: f64) -> f64 {
    head_dim as f64 / 32.0 / 4096.0 * magnitude
}
