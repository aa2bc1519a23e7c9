//! AVX2 with FMA and F16C.

#![allow(clippy::wildcard_imports, reason = "the intrinsics' own prefix tells where they come from")]

use super::x86::operations;
use super::{MAX_LANES, ROUND, Simd, SimdKernel, from_lanes, pack_pair, scalar_fp8_operations};
use crate::cpu::fp8_decoding::{Fp8Decoding, Fp8ToBf16Table};
use half::bf16;
use std::arch::x86_64::*;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
            .then_some(Self(()))
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const ELEMENTS_PER_LANE: usize = 1;
    const MR: usize = 4;
    const HAS_NONTEMPORAL_STORES: bool = true;
    scalar_fp8_operations!();
    operations!(__m256: _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_add_ps _mm256_sub_ps _mm256_mul_ps
        _mm256_div_ps _mm256_fmadd_ps _mm256_max_ps);

    unsafe fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        unsafe fn compiled<K: SimdKernel>(simd: Avx2, kernel: K) -> K::Output {
            // SAFETY: the caller of `vectorize` guarantees the contract of the kernel.
            unsafe { kernel.run(simd) }
        }
        // SAFETY: `self` proves the features, and the caller guarantees the contract of the kernel.
        unsafe { compiled(self, kernel) }
    }

    #[inline(always)]
    unsafe fn store_nontemporal(self, to: *mut f32, x: __m256) {
        // SAFETY: `self` proves the features, and the caller guarantees writable, aligned elements.
        unsafe { _mm256_stream_ps(to, x) }
    }
    #[inline(always)]
    fn store_fence(self) {
        // SAFETY: `self` proves the features.
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m256 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: __m256) {
        // SAFETY: `self` proves the features, and the caller guarantees writable elements.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m256 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, x: __m256) {
        // SAFETY: `self` proves the features, and the caller guarantees writable elements.
        unsafe {
            // The algorithm of `round_to_bf16`.
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            let nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let upper = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, nan, is_nan));
            // `packus` packs each 128-bit half by itself: the results are in quarters 0 and 2.
            let packed = _mm256_permute4x64_epi64::<0b10_00>(_mm256_packus_epi32(upper, upper));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn store_groups(self, to: *mut f32, stride: usize, x: __m256) {
        // SAFETY: `self` proves the features, and the caller guarantees writable elements.
        unsafe {
            _mm_storeu_ps(to, _mm256_castps256_ps128(x));
            _mm_storeu_ps(to.add(stride), _mm256_extractf128_ps::<1>(x));
        }
    }
    #[inline(always)]
    unsafe fn load_fp8(self, format: Fp8Decoding, from: *const u8) -> __m256 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe {
            // The algorithm of `Fp8Decoding::decode`, in 16-bit lanes.
            let codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast()));
            let moved = _mm_sll_epi16(codes, _mm_cvtsi32_si128(format.shift as i32));
            let halves = _mm_and_si128(moved, _mm_set1_epi16(format.bits as i16));
            let magnitudes = _mm_or_si128(codes, _mm_set1_epi16(0xff80u16 as i16));
            let is_nan = _mm_cmpeq_epi16(magnitudes, _mm_set1_epi16(format.nan as i16));
            let halves = _mm_or_si128(halves, _mm_and_si128(is_nan, _mm_set1_epi16(0x7fff)));
            _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(format.factor))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m256 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    fn rotate(self, x: __m256, by: usize) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            // The permutation uses the low three bits of an index, so the sum wraps around.
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_permutevar8x32_ps(x, _mm256_add_epi32(lanes, _mm256_set1_epi32(by as i32)))
        }
    }
    #[inline(always)]
    fn select_lt(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    fn split_fraction(self, x: __m256) -> (__m256, __m256) {
        // The constant comes first: `max` returns its second operand where one is NaN, and NaN has to stay NaN.
        let x = self.max(self.splat(-127.0), x);
        let rounded = self.add(x, self.splat(ROUND));
        (self.sub(x, self.sub(rounded, self.splat(ROUND))), rounded)
    }
    #[inline(always)]
    fn scale_by_power_of_2(self, p: __m256, n: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            // n is x + ROUND: its low mantissa bits hold the integer in two's complement. The shift moves them into the
            // exponent, and the bias completes the power of two.
            let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
            let power = _mm256_add_epi32(shifted, _mm256_set1_epi32(127 << 23));
            _mm256_mul_ps(p, _mm256_castsi256_ps(power))
        }
    }
    #[inline(always)]
    fn horizontal_sums(self, sums: [__m256; MAX_LANES]) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            // Each `hadd` adds adjacent lanes of two vectors. After two of them, each 128-bit half holds the sums
            // of four vectors' lanes of that half.
            let low = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
            let high = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
        }
    }
}
