//! Conversion of rows whose element type is known at run time only.

use super::element::{narrow, widen};
use super::element_fp8::{E4m3, E5m2};
use super::simd::{Simd, SimdKernel};
use crate::tensor::DType;
use half::{bf16, f16};

/// Convert a row of `n` elements of type `dtype`, which is f32, f16, bf16, f8e4m3fn or f8e5m2, to f32.
///
/// # Safety
/// `from` has `n` readable elements, `to` has `n` writable ones.
#[inline(always)]
pub(super) unsafe fn widen_row<S: Simd>(simd: S, dtype: DType, from: *const u8, to: *mut f32, n: usize) {
    // SAFETY: the caller guarantees the two rows that `WidenRow` requires.
    unsafe { simd.vectorize(WidenRow { dtype, from, to, n }) };
}

/// Convert a row of `n` f32 to type `dtype`, which is f32, f16 or bf16, rounded to nearest even.
///
/// # Safety
/// `from` has `n` readable elements, `to` has `n` writable ones.
#[inline(always)]
pub(super) unsafe fn narrow_row<S: Simd>(simd: S, dtype: DType, from: *const f32, to: *mut u8, n: usize) {
    // SAFETY: the caller guarantees the two rows that `NarrowRow` requires.
    unsafe { simd.vectorize(NarrowRow { dtype, from, to, n }) };
}

/// # Safety
/// As [`widen_row`].
struct WidenRow {
    dtype: DType,
    from: *const u8,
    to: *mut f32,
    n: usize,
}

impl SimdKernel for WidenRow {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { dtype, from, to, n } = self;
        // SAFETY: `from` has n elements of type `dtype`, and `to` room for n f32.
        unsafe {
            match dtype {
                DType::F16 => widen::<S, f16>(simd, from.cast(), to, n),
                DType::BF16 => widen::<S, bf16>(simd, from.cast(), to, n),
                DType::F8E4M3FN => widen::<S, E4m3>(simd, from.cast(), to, n),
                DType::F8E5M2 => widen::<S, E5m2>(simd, from.cast(), to, n),
                _ => widen::<S, f32>(simd, from.cast(), to, n),
            }
        }
    }
}

/// # Safety
/// As [`narrow_row`].
struct NarrowRow {
    dtype: DType,
    from: *const f32,
    to: *mut u8,
    n: usize,
}

impl SimdKernel for NarrowRow {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Self { dtype, from, to, n } = self;
        // SAFETY: `from` has n f32, and `to` room for n elements of type `dtype`.
        unsafe {
            match dtype {
                DType::F16 => narrow::<S, f16>(simd, from, to.cast(), n),
                DType::BF16 => narrow::<S, bf16>(simd, from, to.cast(), n),
                _ => narrow::<S, f32>(simd, from, to.cast(), n),
            }
        }
    }
}
