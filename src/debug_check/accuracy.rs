//! Error bounds of results (`docs/semantics.md#error-bounds`), for debug check mode and for the tests, which include
//! this file (`tests/support/expected_rows.rs`).

/// Bound of an lse, relative to the larger of its magnitude and 1.
pub(crate) const LSE: f64 = 1e-4;
/// Bound of an lse with softcap in f16 or bf16, where the hyperbolic tangent has 11 bits.
pub(crate) const LSE_CAPPED: f64 = 2e-2;

/// Head dimensions D = Dv at which tensor cores may multiply e4m3fn q, K and V without conversion.
pub(crate) const FP8_HEAD_DIMS: [usize; 3] = [64, 128, 256];
/// Error of a weight by rounding it to e4m3fn, relative to the weight.
pub(crate) const FP8_WEIGHT: f64 = 1.0 / 16.0;
/// Smallest error of a weight, relative to the row's largest weight: that one is scaled to 2^8, and e4m3fn numbers are
/// at least 2^-9 apart.
pub(crate) const FP8_SMALL_WEIGHT: f64 = 1.0 / (1u64 << 18) as f64;

/// Error of a score whose fp8 products tensor cores add with 14 bits. `magnitude` is the sum of the products'
/// magnitudes. Each step of 32 products truncates below 2^-13 of its largest number.
pub(crate) fn fp8_score(head_dim: usize, magnitude: f64) -> f64 {
    head_dim as f64 / 32.0 / 4096.0 * magnitude
}
