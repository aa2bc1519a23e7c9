//! AVX2 with FMA and F16C, and AVX-512.

#![allow(clippy::wildcard_imports, reason = "the intrinsics' own prefix tells where they come from")]

use super::{MAX_LANES, Simd, Vectorised};
use std::arch::x86_64::*;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx2(());

/// Proof that the CPU has AVX-512 F, BW, VL and DQ and what [`Avx2`] proves.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx512(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
            .then_some(Self(()))
    }

    pub(crate) fn run<K: Vectorised>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Vectorised>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` proves the features.
        unsafe { compiled(self, kernel) }
    }
}

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        (Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq"))
        .then_some(Self(()))
    }

    pub(crate) fn run<K: Vectorised>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
        fn compiled<K: Vectorised>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` proves the features.
        unsafe { compiled(self, kernel) }
    }
}

/// The operations that are one intrinsic each.
macro_rules! operations {
    ($v:ty: $splat:ident $load:ident $store:ident
        $add:ident $sub:ident $mul:ident $div:ident $fma:ident $max:ident) => {
        type V = $v;
        #[inline(always)]
        fn splat(self, x: f32) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $splat(x) }
        }
        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> $v {
            // SAFETY: `self` proves the features; readable, by the caller's word.
            unsafe { $load(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, x: $v) {
            // SAFETY: `self` proves the features; writable, by the caller's word.
            unsafe { $store(to, x) }
        }
        #[inline(always)]
        fn add(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $add(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $sub(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $mul(a, b) }
        }
        #[inline(always)]
        fn div(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $div(a, b) }
        }
        #[inline(always)]
        fn fma(self, a: $v, b: $v, c: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $fma(a, b, c) }
        }
        #[inline(always)]
        fn max(self, a: $v, b: $v) -> $v {
            // SAFETY: `self` proves the features.
            unsafe { $max(a, b) }
        }
    };
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const TILE: usize = 4;
    operations!(__m256: _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_add_ps _mm256_sub_ps _mm256_mul_ps
        _mm256_div_ps _mm256_fmadd_ps _mm256_max_ps);

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m256 {
        // SAFETY: `self` proves the features; readable, by the caller's word.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: __m256) {
        // SAFETY: `self` proves the features; writable, by the caller's word.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m256 {
        // SAFETY: `self` proves the features; readable, by the caller's word.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low))
        }
    }
    #[inline(always)]
    fn select_lt(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    fn exponential_of_low_bits(self, t: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
            _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(127 << 23)))
        }
    }
    #[inline(always)]
    fn sum_each(self, sums: [__m256; MAX_LANES]) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            // Each `hadd` halves the addends of a vector; after two, a 128-bit half holds four vectors' half sums.
            let low = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
            let high = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
        }
    }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    const TILE: usize = 8;
    operations!(__m512: _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_add_ps _mm512_sub_ps _mm512_mul_ps
        _mm512_div_ps _mm512_fmadd_ps _mm512_max_ps);

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m512 {
        // SAFETY: `self` proves the features; readable, by the caller's word.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: __m512) {
        // SAFETY: `self` proves the features; writable, by the caller's word.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m512 {
        // SAFETY: `self` proves the features; readable, by the caller's word.
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(low))
        }
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn exponential_of_low_bits(self, t: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
            _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(127 << 23)))
        }
    }
    #[inline(always)]
    fn sum_each(self, sums: [__m512; MAX_LANES]) -> __m512 {
        // A transposition that adds as it goes: each step halves the vectors and doubles how many sums one holds.
        // SAFETY: `self` proves the features.
        unsafe {
            let zero = _mm512_setzero_ps();
            let (mut pairs, mut quads) = ([zero; 8], [zero; 4]);
            for i in 0..8 {
                let (a, b) = (sums[2 * i], sums[2 * i + 1]);
                pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            for i in 0..4 {
                let (a, b) = (_mm512_castps_pd(pairs[2 * i]), _mm512_castps_pd(pairs[2 * i + 1]));
                let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                quads[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            }
            // quads[i] holds, in each of its four 128-bit blocks, partial sums of vectors 4i to 4i+3.
            let halves = [add_block_pairs(quads[0], quads[1]), add_block_pairs(quads[2], quads[3])];
            add_block_pairs(halves[0], halves[1])
        }
    }
}

/// 128-bit blocks `[a0 + a1, a2 + a3, b0 + b1, b2 + b3]`.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn add_block_pairs(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the features, by the caller's word.
    unsafe {
        let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
    }
}
