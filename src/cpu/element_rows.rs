//! Rows of elements whose type is known at run time.

use super::element::{narrow, widen};
use super::element_fp8::{E4m3, E5m2};
use super::simd::{Simd, Vectorised};
use crate::tensor::DType;
use half::{bf16, f16};

/// Widen rows of elements of type `dtype`: f32, f16, bf16, f8e4m3fn or f8e5m2.
///
/// # Safety
/// `from` has `n` readable elements, `to` has `n` writable ones.
#[inline(always)]
pub(super) unsafe fn widen_row<S: Simd>(simd: S, dtype: DType, from: *const u8, to: *mut f32, n: usize) {
    simd.call(WidenRow { dtype, from, to, n });
}

/// Round a row of `n` elements to type `dtype`: f32, f16 or bf16.
///
/// # Safety
/// `from` has `n` readable elements, `to` has `n` writable ones.
#[inline(always)]
pub(super) unsafe fn narrow_row<S: Simd>(simd: S, dtype: DType, from: *const f32, to: *mut u8, n: usize) {
    simd.call(NarrowRow { dtype, from, to, n });
}

/// Made by [`widen_row`] alone, whose contract it carries.
struct WidenRow {
    dtype: DType,
    from: *const u8,
    to: *mut f32,
    n: usize,
}

impl Vectorised for WidenRow {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { dtype, from, to, n } = self;
        // SAFETY: see the type.
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

/// Made by [`narrow_row`] alone, whose contract it carries.
struct NarrowRow {
    dtype: DType,
    from: *const f32,
    to: *mut u8,
    n: usize,
}

impl Vectorised for NarrowRow {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { dtype, from, to, n } = self;
        // SAFETY: see the type.
        unsafe {
            match dtype {
                DType::F16 => narrow::<S, f16>(simd, from, to.cast(), n),
                DType::BF16 => narrow::<S, bf16>(simd, from, to.cast(), n),
                _ => narrow::<S, f32>(simd, from, to.cast(), n),
            }
        }
    }
}
