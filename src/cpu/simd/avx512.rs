//! AVX-512, with or without the dot products of bf16 pairs (`vdpbf16ps`).

#![allow(clippy::wildcard_imports, reason = "the intrinsics' own prefix tells where they come from")]

use super::avx2::Avx2;
use super::x86::operations;
use super::{MAX_LANES, Simd, SimdKernel};
use crate::cpu::fp8_decoding::{Fp8Decoding, Fp8ToBf16Table};
use std::arch::x86_64::*;

/// Proof that the CPU has AVX-512 F, BW, VL and DQ and the features of [`super::avx2::Avx2`]; with BF16 also AVX-512
/// BF16 and VBMI.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Avx512<const BF16: bool>(());

impl Avx512<false> {
    pub(crate) fn detect() -> Option<Self> {
        (Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq"))
        .then_some(Self(()))
    }
}

impl Avx512<true> {
    pub(crate) fn detect() -> Option<Self> {
        (Avx512::<false>::detect().is_some()
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vbmi"))
        .then_some(Self(()))
    }

    pub(crate) fn without_bf16_pairs(self) -> Avx512<false> {
        let Self(proof) = self;
        Avx512(proof)
    }
}

/// A [`Fp8ToBf16Table`] in registers: the low bytes of the bf16 of magnitudes 0 to 63 and 64 to 127, then the high
/// bytes.
#[derive(Clone, Copy)]
pub(crate) struct Fp8LookupTable([__m512i; 4]);

impl Fp8LookupTable {
    /// The bf16 of 32 numbers, each of which is given twice, in both bytes of its result.
    ///
    /// # Safety
    /// The CPU has AVX-512 BW and VBMI.
    #[inline(always)]
    unsafe fn lookup_doubled<const I8: bool>(self, doubled: __m512i) -> __m512 {
        // SAFETY: the caller guarantees the features, and no intrinsic here touches memory.
        unsafe {
            let (magnitudes, is_not_0) = magnitudes::<I8>(doubled);
            let low = _mm512_permutex2var_epi8(self.0[0], magnitudes, self.0[1]);
            let high = _mm512_maskz_permutex2var_epi8(is_not_0, self.0[2], magnitudes, self.0[3]);
            // The low byte of each 16-bit element comes from `low`, the high byte from `high`.
            let magnitude = _mm512_ternarylogic_epi32::<0b1011_1000>(high, _mm512_set1_epi16(0xff), low);
            // magnitude | (doubled & sign)
            let sign = _mm512_set1_epi32(0x8000_8000u32 as i32);
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0b1111_1000>(magnitude, doubled, sign))
        }
    }

    /// The bf16 of 64 numbers: those of the low halves of the four 128-bit blocks, then those of the high halves.
    ///
    /// # Safety
    /// The CPU has AVX-512 BW and VBMI.
    #[inline(always)]
    unsafe fn lookup_halves<const I8: bool>(self, codes: __m512i) -> [__m512; 2] {
        // SAFETY: the caller guarantees the features, and no intrinsic here touches memory.
        unsafe {
            let (magnitudes, is_not_0) = magnitudes::<I8>(codes);
            let low = _mm512_permutex2var_epi8(self.0[0], magnitudes, self.0[1]);
            let high = _mm512_maskz_permutex2var_epi8(is_not_0, self.0[2], magnitudes, self.0[3]);
            // high | (codes & sign)
            let high = _mm512_ternarylogic_epi32::<0b1111_1000>(high, codes, _mm512_set1_epi8(0x80u8 as i8));
            [_mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)), _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high))]
        }
    }
}

/// The table indices of numbers, which are their low 7 bits, and which high bytes are not 0 whatever the table says: index 0
/// of i8 is that of 128, because -128 has it, so that 0 needs the mask.
///
/// # Safety
/// The CPU has AVX-512 BW.
#[inline(always)]
unsafe fn magnitudes<const I8: bool>(codes: __m512i) -> (__m512i, u64) {
    // SAFETY: the caller guarantees the features, and the intrinsics touch no memory.
    unsafe { if I8 { (_mm512_abs_epi8(codes), _mm512_test_epi8_mask(codes, codes)) } else { (codes, u64::MAX) } }
}

/// Permutations that double bytes for [`Fp8LookupTable::lookup_doubled`]: byte i of the result is byte `indices[i]` of
/// the input.
const fn doubling_indices(interleave: bool) -> [u8; 64] {
    let mut indices = [0; 64];
    let mut i = 0;
    while i < 64 {
        // One row of 32 bytes: byte i / 2. Two rows of 16 bytes: byte i / 4 of each in turn.
        indices[i] = if interleave { i / 4 + (i / 2) % 2 * 16 } else { i / 2 } as u8;
        i += 1;
    }
    indices
}
static DOUBLE: [u8; 64] = doubling_indices(false);
static DOUBLE_AND_INTERLEAVE: [u8; 64] = doubling_indices(true);

/// Permutation of two vectors of bf16 that takes an element of each in turn, from element `from` of both on.
const fn alternating_indices(from: u16) -> [u16; 32] {
    let mut indices = [0; 32];
    let mut i = 0;
    while i < 32 {
        // Indices from 32 on are elements of the second vector.
        indices[i] = from + i as u16 / 2 + i as u16 % 2 * 32;
        i += 1;
    }
    indices
}
static ALTERNATE_LOW: [u16; 32] = alternating_indices(0);
static ALTERNATE_HIGH: [u16; 32] = alternating_indices(16);

impl<const BF16: bool> Simd for Avx512<BF16> {
    const LANES: usize = 16;
    const ELEMENTS_PER_LANE: usize = if BF16 { 2 } else { 1 };
    const MR: usize = 8;
    const HAS_NONTEMPORAL_STORES: bool = true;
    type Fp8Table = Fp8LookupTable;
    operations!(__m512: _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_add_ps _mm512_sub_ps _mm512_mul_ps
        _mm512_div_ps _mm512_fmadd_ps _mm512_max_ps);

    unsafe fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
        #[inline(never)]
        unsafe fn single<const BF16: bool, K: SimdKernel>(simd: Avx512<BF16>, kernel: K) -> K::Output {
            // SAFETY: the caller of `vectorize` guarantees the contract of the kernel.
            unsafe { kernel.run(simd) }
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
        #[inline(never)]
        unsafe fn pairs<const BF16: bool, K: SimdKernel>(simd: Avx512<BF16>, kernel: K) -> K::Output {
            // SAFETY: the caller of `vectorize` guarantees the contract of the kernel.
            unsafe { kernel.run(simd) }
        }
        // SAFETY: `self` proves the features, and the caller guarantees the contract of the kernel.
        unsafe { if BF16 { pairs(self, kernel) } else { single(self, kernel) } }
    }

    #[inline(always)]
    unsafe fn store_nontemporal(self, to: *mut f32, x: __m512) {
        // SAFETY: `self` proves the features, and the caller guarantees writable, aligned elements.
        unsafe { _mm512_stream_ps(to, x) }
    }
    #[inline(always)]
    fn store_fence(self) {
        // SAFETY: `self` proves the features.
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m512 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: __m512) {
        // SAFETY: `self` proves the features, and the caller guarantees writable elements.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m512 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(low))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, x: __m512) {
        // SAFETY: `self` proves the features, and the caller guarantees writable elements.
        unsafe {
            // The algorithm of `round_to_bf16`.
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let upper = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(is_nan, rounded, nan));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(upper));
        }
    }
    #[inline(always)]
    unsafe fn store_groups(self, to: *mut f32, stride: usize, x: __m512) {
        // SAFETY: `self` proves the features, and the caller guarantees writable elements.
        unsafe {
            _mm256_storeu_ps(to, _mm512_castps512_ps256(x));
            _mm256_storeu_ps(to.add(stride), _mm512_extractf32x8_ps::<1>(x));
        }
    }
    #[inline(always)]
    fn dot(self, a: __m512, b: __m512, sum: __m512) -> __m512 {
        if BF16 {
            // SAFETY: `self` proves the features, as BF16 is true.
            unsafe { _mm512_dpbf16_ps(sum, as_bf16_vector(a), as_bf16_vector(b)) }
        } else {
            self.fma(a, b, sum)
        }
    }
    #[inline(always)]
    fn pack_pairs(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features if BF16 is true. If it is not, ELEMENTS_PER_LANE is 1, and no kernel packs
        // pairs. The transmute is between vectors of 512 bits.
        unsafe {
            // `cvtne2ps` gives a0 ... a15 b0 ... b15; the pairs are a0 b0 a1 b1 ...
            let order = _mm512_set_epi16(
                31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                17, 1, 16, 0,
            );
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(b, a));
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both))
        }
    }
    #[inline(always)]
    fn scale_pairs(self, pairs: __m512, factor: __m512) -> __m512 {
        // SAFETY: `self` proves the features if BF16 is true. If it is not, ELEMENTS_PER_LANE is 1, and no kernel has
        // pairs. The transmute is between vectors of 512 bits.
        unsafe {
            let pairs = _mm512_castps_si512(pairs);
            let [low, high] = [_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64::<1>(pairs)]
                .map(|half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half))));
            let both = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, factor), _mm512_mul_ps(low, factor));
            std::mem::transmute(both)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u16, n: usize) -> __m512 {
        // SAFETY: `self` proves the features. The caller guarantees n readable elements, and masked loads touch no
        // others.
        unsafe {
            if n >= 32 {
                return _mm512_loadu_ps(from.cast());
            }
            _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask_of_first(n) as u32, from.cast()))
        }
    }
    #[inline(always)]
    unsafe fn interleave_bf16(self, first: *const u16, second: *const u16, n: usize) -> __m512 {
        // SAFETY: `self` proves the features, and the caller guarantees n readable elements in both rows.
        unsafe {
            let (first, second) = (load_16_bf16(first, n), load_16_bf16(second, n));
            _mm512_castsi512_ps(_mm512_or_si512(first, _mm512_slli_epi32::<16>(second)))
        }
    }
    #[inline(always)]
    unsafe fn interleave_bf16_2(self, first: *const u16, second: *const u16) -> [__m512; 2] {
        // SAFETY: `self` proves the features, and the caller guarantees 32 readable elements in both rows.
        unsafe {
            let (first, second) = (_mm512_loadu_si512(first.cast()), _mm512_loadu_si512(second.cast()));
            let low = _mm512_loadu_si512(ALTERNATE_LOW.as_ptr().cast());
            let high = _mm512_loadu_si512(ALTERNATE_HIGH.as_ptr().cast());
            [
                _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, low, second)),
                _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, high, second)),
            ]
        }
    }
    #[inline(always)]
    fn fp8_table(self, table: &'static Fp8ToBf16Table) -> Fp8LookupTable {
        // SAFETY: `self` proves the features; both arrays of the table have 128 bytes.
        unsafe {
            let [low, high] = [table.low.as_ptr(), table.high.as_ptr()];
            Fp8LookupTable([
                _mm512_loadu_si512(low.cast()),
                _mm512_loadu_si512(low.add(64).cast()),
                _mm512_loadu_si512(high.cast()),
                _mm512_loadu_si512(high.add(64).cast()),
            ])
        }
    }
    #[inline(always)]
    unsafe fn load_fp8_pairs<const I8: bool>(self, table: Fp8LookupTable, from: *const u8, n: usize) -> __m512 {
        // SAFETY: the CPU has VBMI if BF16 is true, and otherwise no kernel loads pairs. The caller guarantees n readable
        // elements, and masked loads touch no others.
        unsafe {
            let codes = if n >= 32 {
                _mm256_loadu_si256(from.cast())
            } else {
                _mm256_maskz_loadu_epi8(mask_of_first(n) as u32, from.cast())
            };
            let codes = _mm512_castsi256_si512(codes);
            table.lookup_doubled::<I8>(_mm512_permutexvar_epi8(_mm512_loadu_si512(DOUBLE.as_ptr().cast()), codes))
        }
    }
    #[inline(always)]
    unsafe fn interleave_fp8<const I8: bool>(
        self,
        table: Fp8LookupTable,
        first: *const u8,
        second: *const u8,
        n: usize,
    ) -> __m512 {
        // SAFETY: the CPU has VBMI if BF16 is true, and otherwise no kernel loads pairs. The caller guarantees n readable
        // elements in both rows.
        unsafe {
            let (first, second) = (load_16_fp8(first, n), load_16_fp8(second, n));
            let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(first), second);
            let order = _mm512_loadu_si512(DOUBLE_AND_INTERLEAVE.as_ptr().cast());
            table.lookup_doubled::<I8>(_mm512_permutexvar_epi8(order, _mm512_castsi256_si512(both)))
        }
    }
    #[inline(always)]
    unsafe fn load_fp8_pairs_2<const I8: bool>(self, table: Fp8LookupTable, from: *const u8) -> [__m512; 2] {
        // SAFETY: the CPU has VBMI if BF16 is true, and otherwise no kernel loads pairs. The caller guarantees 64 readable
        // elements.
        unsafe {
            // The quarters of the first 32 elements go to the low halves of the 128-bit blocks, those of the second 32
            // to the high halves.
            let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            table.lookup_halves::<I8>(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(from.cast())))
        }
    }
    #[inline(always)]
    unsafe fn interleave_fp8_4<const I8: bool>(
        self,
        table: Fp8LookupTable,
        first: *const u8,
        second: *const u8,
    ) -> [__m512; 4] {
        // SAFETY: the CPU has VBMI if BF16 is true, and otherwise no kernel loads pairs. The caller guarantees 64 readable
        // elements in both rows.
        unsafe {
            // The rows are 16 groups of four columns. This transposes the groups, so that the two steps of interleaving
            // below, which stay within 128-bit blocks, leave each vector with 16 consecutive columns.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let first = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(first.cast()));
            let second = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(second.cast()));
            let [a, b] = table.lookup_halves::<I8>(_mm512_unpacklo_epi8(first, second));
            let [c, d] = table.lookup_halves::<I8>(_mm512_unpackhi_epi8(first, second));
            [a, b, c, d]
        }
    }
    #[inline(always)]
    unsafe fn load_fp8(self, format: Fp8Decoding, from: *const u8) -> __m512 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe {
            let codes = _mm512_zextsi256_si512(_mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast())));
            let halves = _mm512_castsi512_si256(fp8_halves(format, codes));
            _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(format.factor))
        }
    }
    #[inline(always)]
    unsafe fn load_fp8_2(self, format: Fp8Decoding, from: *const u8) -> [__m512; 2] {
        // SAFETY: `self` proves the features, and the caller guarantees 32 readable elements.
        unsafe {
            let halves = fp8_halves(format, _mm512_cvtepi8_epi16(_mm256_loadu_si256(from.cast())));
            [_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves)]
                .map(|half| _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(format.factor)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        // SAFETY: `self` proves the features, and the caller guarantees readable elements.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    fn rotate(self, x: __m512, by: usize) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            // The permutation uses the low four bits of an index, so the sum wraps around.
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(by as i32)), x)
        }
    }
    #[inline(always)]
    fn repeat_each(self, x: __m512, count: usize) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let shift = _mm_cvtsi32_si128(count.trailing_zeros() as i32);
            _mm512_permutexvar_ps(_mm512_srl_epi32(lanes, shift), x)
        }
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn split_fraction(self, x: __m512) -> (__m512, __m512) {
        // SAFETY: `self` proves the features.
        unsafe {
            (_mm512_reduce_ps::<_MM_FROUND_TO_NEAREST_INT>(x), _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(x))
        }
    }
    #[inline(always)]
    fn scale_by_power_of_2(self, p: __m512, n: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_scalef_ps(p, n) }
    }
    #[inline(always)]
    fn horizontal_sums(self, sums: [__m512; MAX_LANES]) -> __m512 {
        // A transposition that adds on the way: each step halves the number of vectors and doubles the sums per vector.
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
            // Each 128-bit block of quads[i] holds partial sums of vectors 4i to 4i+3.
            let halves = [add_block_pairs(quads[0], quads[1]), add_block_pairs(quads[2], quads[3])];
            add_block_pairs(halves[0], halves[1])
        }
    }
}

/// The f16 of 32 8-bit floats, sign-extended to 16 bits, before they are multiplied by the format's factor.
///
/// # Safety
/// The CPU has AVX-512 BW.
#[inline(always)]
unsafe fn fp8_halves(format: Fp8Decoding, codes: __m512i) -> __m512i {
    // SAFETY: the caller guarantees the features, and the intrinsics touch no memory.
    unsafe {
        // The algorithm of `Fp8Decoding::decode`. A NaN of e4m3fn is 0x3f80 beside its sign, and becomes 0x7fff by the addition.
        let moved = _mm512_sll_epi16(codes, _mm_cvtsi32_si128(format.shift as i32));
        let halves = _mm512_and_si512(moved, _mm512_set1_epi16(format.bits as i16));
        let magnitudes = _mm512_or_si512(codes, _mm512_set1_epi16(0xff80u16 as i16));
        let is_nan = _mm512_cmpeq_epi16_mask(magnitudes, _mm512_set1_epi16(format.nan as i16));
        _mm512_mask_add_epi16(halves, is_nan, halves, _mm512_set1_epi16(0x7fff - 0x3f80))
    }
}

/// The first `n` elements of bf16, at most 16, each in the lower half of a 32-bit lane, then zeros.
///
/// # Safety
/// The CPU has AVX-512 BW and VL; `n` elements are readable.
#[inline(always)]
unsafe fn load_16_bf16(from: *const u16, n: usize) -> __m512i {
    // SAFETY: the caller guarantees the features and n readable elements; the masked load touches no others.
    unsafe {
        _mm512_cvtepu16_epi32(if n >= 16 {
            _mm256_loadu_si256(from.cast())
        } else {
            _mm256_maskz_loadu_epi16(mask_of_first(n) as u16, from.cast())
        })
    }
}

/// The first `n` 8-bit elements, at most 16, then zeros.
///
/// # Safety
/// The CPU has AVX-512 BW and VL; `n` elements are readable.
#[inline(always)]
unsafe fn load_16_fp8(from: *const u8, n: usize) -> __m128i {
    // SAFETY: the caller guarantees the features and n readable elements; the masked load touches no others.
    unsafe {
        if n >= 16 { _mm_loadu_si128(from.cast()) } else { _mm_maskz_loadu_epi8(mask_of_first(n) as u16, from.cast()) }
    }
}

/// A mask of the first `n` elements, n < 32.
#[inline(always)]
fn mask_of_first(n: usize) -> u64 {
    (1 << n) - 1
}

/// The same bits as a vector of bf16.
#[inline(always)]
fn as_bf16_vector(x: __m512) -> __m512bh {
    // SAFETY: both types are 512 bits, and any bits are valid in both.
    unsafe { std::mem::transmute(x) }
}

/// The 128-bit blocks `[a0 + a1, a2 + a3, b0 + b1, b2 + b3]`.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn add_block_pairs(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller guarantees AVX-512 F, and the intrinsics touch no memory.
    unsafe {
        let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
    }
}
