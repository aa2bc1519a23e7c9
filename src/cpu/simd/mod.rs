//! Vectors of f32 behind one trait, and runtime dispatch over instruction sets, with the structure of the crate pulp.
//!
//! A kernel implements [`SimdKernel`] (pulp's `WithSimd`), generic over [`Simd`]. [`Isa::dispatch`] (`Arch::dispatch`)
//! runs it with the best instructions of the CPU; the compiler makes one copy per instruction set. Everything that a
//! kernel calls must be `#[inline(always)]`: only then do the vector operations end up inside the function that enables
//! the instructions (`#[target_feature]` in [`Simd::vectorize`]). A closure does not inherit them unless it is inlined
//! too.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod isa;
mod portable;
mod scalar_fp8;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

use super::bf16_rounding::round_to_bf16;
use super::fp8_decoding::{Fp8Decoding, Fp8ToBf16Table};
use half::bf16;
use scalar_fp8::scalar_fp8_operations;

pub(crate) use isa::Isa;

/// Maximum lanes of a vector in any instruction set.
pub(crate) const MAX_LANES: usize = 16;

/// Bytes of a cache line.
pub(crate) const CACHE_LINE: usize = 64;

/// Adding this to a small f32 rounds it to an integer, which the low mantissa bits of the sum hold.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// Maximum elements in a lane, see [`Simd::ELEMENTS_PER_LANE`].
pub(crate) const MAX_ELEMENTS_PER_LANE: usize = 2;

/// Operations on vectors of [`Simd::LANES`] f32. Holding a value of the type proves that this CPU has the instructions.
///
/// Where an instruction set multiplies pairs of bf16 (`vdpbf16ps`), a lane may also hold two bf16, the first in its
/// lower half. Operations on such pairs have a default in scalar code, for tests on CPUs without the instructions.
pub(crate) trait Simd: Copy {
    /// One vector.
    type V: Copy;
    /// A [`Fp8ToBf16Table`] in the form that look-ups need, in registers if possible.
    type Fp8Table: Copy;
    /// f32 in a vector: 4, 8 or 16.
    const LANES: usize;
    /// Elements that a lane holds while they are multiplied: 1 (f32), or 2 (bf16) where that is faster.
    const ELEMENTS_PER_LANE: usize;
    /// Rows of the micro-kernel (BLIS's MR): MR times two vectors of sums fit into the registers, beside the operands.
    /// It divides 8.
    const MR: usize;
    /// Whether [`store_nontemporal`](Self::store_nontemporal) bypasses the caches.
    const HAS_NONTEMPORAL_STORES: bool = false;

    /// Call `kernel` as a function that is not inlined and has these instructions: for long code with many call sites.
    ///
    /// # Safety
    /// The contract of [`SimdKernel::run`] of the kernel.
    unsafe fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output;
    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// `LANES` elements from `from` on.
    /// # Safety
    /// `from` has `LANES` readable elements; any alignment.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// Store `LANES` elements from `to` on.
    /// # Safety
    /// `to` has `LANES` writable elements; any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::V);
    /// [`store`](Self::store), bypassing the caches where
    /// [`HAS_NONTEMPORAL_STORES`](Self::HAS_NONTEMPORAL_STORES) is set. Such stores are weakly ordered: before another
    /// thread may read them, this thread needs a [`store_fence`](Self::store_fence).
    /// # Safety
    /// `to` has `LANES` writable elements and is aligned to the vector.
    #[inline(always)]
    unsafe fn store_nontemporal(self, to: *mut f32, x: Self::V) {
        // SAFETY: the caller guarantees LANES writable elements.
        unsafe { self.store(to, x) }
    }
    /// Order this thread's non-temporal stores before its later stores (`sfence`).
    #[inline(always)]
    fn store_fence(self) {}
    /// `LANES` elements of f16 as f32.
    /// # Safety
    /// `from` has `LANES` readable elements; any alignment.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;
    /// Store as f16, rounded to nearest even; NaN stays NaN.
    /// # Safety
    /// `to` has `LANES` writable elements; any alignment.
    unsafe fn store_f16(self, to: *mut u16, x: Self::V);
    /// `LANES` elements of bf16 as f32.
    /// # Safety
    /// `from` has `LANES` readable elements; any alignment.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;
    /// Store as bf16, rounded to nearest even; NaN stays NaN.
    /// # Safety
    /// `to` has `LANES` writable elements; any alignment.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, x: Self::V) {
        for (i, x) in to_array(self, x)[..Self::LANES].iter().enumerate() {
            // SAFETY: i < LANES, and the caller guarantees LANES writable elements.
            unsafe { to.add(i).write_unaligned(round_to_bf16(*x).to_bits()) }
        }
    }
    /// `LANES` 8-bit floats as f32; infinities stay infinities and NaN stays NaN.
    /// # Safety
    /// `from` has `LANES` readable elements.
    unsafe fn load_fp8(self, format: Fp8Decoding, from: *const u8) -> Self::V;
    /// Two vectors of `load_fp8`.
    /// # Safety
    /// `from` has 2 * LANES readable elements.
    #[inline(always)]
    unsafe fn load_fp8_2(self, format: Fp8Decoding, from: *const u8) -> [Self::V; 2] {
        // SAFETY: the i-th LANES of the 2 * LANES elements that the caller guarantees.
        [0, 1].map(|i| unsafe { self.load_fp8(format, from.add(i * Self::LANES)) })
    }
    /// `LANES` i8 as f32.
    /// # Safety
    /// `from` has `LANES` readable elements.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;

    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once if the instruction set has a fused operation.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of a and b; `b` where one of them is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `yes` where `a < b`, otherwise `no`, also where one of them is NaN.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// (f, n) with x = f + n: a fraction of at most 1/2 in magnitude, and an integer encoded as
    /// [`Self::scale_by_power_of_2`] takes it. x must be below 127.5. For -inf the fraction is unspecified.
    fn split_fraction(self, x: Self::V) -> (Self::V, Self::V);
    /// `p * 2^n` for p between 1/2 and 2 and an n of [`Self::split_fraction`]. At most 2^-126 if n is below -126, and 0
    /// if n came from -inf.
    fn scale_by_power_of_2(self, p: Self::V, n: Self::V) -> Self::V;
    /// Lane i of the result is lane `(i + by) % LANES`.
    fn rotate(self, x: Self::V, by: usize) -> Self::V;
    /// Lane i of the result is lane `i / count`; `count` is a power of two.
    #[inline(always)]
    fn repeat_each(self, x: Self::V, count: usize) -> Self::V {
        let lanes = to_array(self, x);
        from_lanes(self, lanes, |_, i| lanes[i / count])
    }
    /// Lane i is the sum of the lanes of `sums[i]`; vectors beyond `LANES` are not read.
    fn horizontal_sums(self, sums: [Self::V; MAX_LANES]) -> Self::V;

    /// The dot product of each lane's elements, added to `sum`: `sum + a * b` with one f32 per lane, `sum + a.1 * b.1 +
    /// a.0 * b.0` with two bf16 per lane. In the latter, numbers that are subnormal in f32 may count as 0.
    #[inline(always)]
    fn dot(self, a: Self::V, b: Self::V, sum: Self::V) -> Self::V {
        if Self::ELEMENTS_PER_LANE == 1 {
            return self.fma(a, b, sum);
        }
        let (a, b) = (to_array(self, a).map(unpack_pair), to_array(self, b).map(unpack_pair));
        from_lanes(self, to_array(self, sum), |sum, i| sum + a[i].1 * b[i].1 + a[i].0 * b[i].0)
    }
    /// Lanes with the bf16 pair (a, b), rounded to nearest even; subnormal numbers may become 0.
    #[inline(always)]
    fn pack_pairs(self, a: Self::V, b: Self::V) -> Self::V {
        let b = to_array(self, b);
        from_lanes(self, to_array(self, a), |a, i| pack_pair(round_to_bf16(a), round_to_bf16(b[i])))
    }
    /// bf16 pairs, both elements multiplied by the lane's `factor` and rounded to nearest even; subnormal numbers may
    /// become 0.
    #[inline(always)]
    fn scale_pairs(self, pairs: Self::V, factor: Self::V) -> Self::V {
        let factor = to_array(self, factor);
        from_lanes(self, to_array(self, pairs), |pair, i| {
            let (first, second) = unpack_pair(pair);
            pack_pair(round_to_bf16(first * factor[i]), round_to_bf16(second * factor[i]))
        })
    }
    /// The first `n` elements of a row of bf16, at most 2 * LANES, two per lane, then zeros.
    /// # Safety
    /// `from` has `n` readable elements; any alignment.
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u16, n: usize) -> Self::V {
        // SAFETY: i < n, and the caller guarantees n readable elements.
        let element = |i| bf16::from_bits(if i < n { unsafe { from.add(i).read_unaligned() } } else { 0 });
        from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(2 * i), element(2 * i + 1)))
    }
    /// The pairs (first\[i\], second\[i\]) of two rows of bf16 for i below `n`, at most LANES, then zeros.
    /// # Safety
    /// Both rows have `n` readable elements; any alignment.
    #[inline(always)]
    unsafe fn interleave_bf16(self, first: *const u16, second: *const u16, n: usize) -> Self::V {
        let element = |from: *const u16, i| {
            if i >= n {
                return bf16::ZERO;
            }
            // SAFETY: i < n, and the caller guarantees n readable elements in both rows.
            bf16::from_bits(unsafe { from.add(i).read_unaligned() })
        };
        from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(first, i), element(second, i)))
    }
    /// Two vectors of `interleave_bf16`.
    /// # Safety
    /// Both rows have 2 * LANES readable elements; any alignment.
    #[inline(always)]
    unsafe fn interleave_bf16_2(self, first: *const u16, second: *const u16) -> [Self::V; 2] {
        [0, 1].map(|i| {
            let at = i * Self::LANES;
            // SAFETY: LANES of the 2 * LANES elements that the caller guarantees in both rows, from `at` on.
            unsafe { self.interleave_bf16(first.add(at), second.add(at), Self::LANES) }
        })
    }
    /// The table in the form that `load_fp8_pairs` and `interleave_fp8` take. With `I8` it is that of i8.
    fn fp8_table(self, table: &'static Fp8ToBf16Table) -> Self::Fp8Table;
    /// The first `n` elements of a row of 8 bits, at most 2 * LANES, as bf16, two per lane, then zeros.
    /// # Safety
    /// `from` has `n` readable elements.
    unsafe fn load_fp8_pairs<const I8: bool>(self, table: Self::Fp8Table, from: *const u8, n: usize) -> Self::V;
    /// The pairs (first\[i\], second\[i\]) of two rows of 8 bits for i below `n`, at most LANES, as bf16, then
    /// zeros.
    /// # Safety
    /// Both rows have `n` readable elements.
    unsafe fn interleave_fp8<const I8: bool>(
        self,
        table: Self::Fp8Table,
        first: *const u8,
        second: *const u8,
        n: usize,
    ) -> Self::V;
    /// Two vectors of `load_fp8_pairs`.
    /// # Safety
    /// `from` has 4 * LANES readable elements.
    #[inline(always)]
    unsafe fn load_fp8_pairs_2<const I8: bool>(self, table: Self::Fp8Table, from: *const u8) -> [Self::V; 2] {
        // SAFETY: the i-th 2 * LANES of the 4 * LANES elements that the caller guarantees.
        [0, 1].map(|i| unsafe { self.load_fp8_pairs::<I8>(table, from.add(i * 2 * Self::LANES), 2 * Self::LANES) })
    }
    /// Four vectors of `interleave_fp8`.
    /// # Safety
    /// Both rows have 4 * LANES readable elements.
    #[inline(always)]
    unsafe fn interleave_fp8_4<const I8: bool>(
        self,
        table: Self::Fp8Table,
        first: *const u8,
        second: *const u8,
    ) -> [Self::V; 4] {
        [0, 1, 2, 3].map(|i| {
            let at = i * Self::LANES;
            // SAFETY: LANES of the 4 * LANES elements that the caller guarantees in both rows, from `at` on.
            unsafe { self.interleave_fp8::<I8>(table, first.add(at), second.add(at), Self::LANES) }
        })
    }
    /// Store the lanes in groups of MR, which begin `stride` elements apart.
    /// # Safety
    /// All groups are writable; MR divides LANES.
    #[inline(always)]
    unsafe fn store_groups(self, to: *mut f32, stride: usize, x: Self::V) {
        let lanes = to_array(self, x);
        for group in 0..Self::LANES / Self::MR {
            // SAFETY: MR of LANES <= MAX_LANES elements, to a group that the caller guarantees to be writable.
            unsafe {
                let from = lanes.as_ptr().add(group * Self::MR);
                to.add(group * stride).copy_from_nonoverlapping(from, Self::MR);
            }
        }
    }
}

/// The lanes of a vector as an array, filled up with zeros.
#[inline(always)]
fn to_array<S: Simd>(simd: S, x: S::V) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: the array has MAX_LANES >= LANES elements.
    unsafe { simd.store(lanes.as_mut_ptr(), x) };
    lanes
}

/// The vector whose lane i is `f(lanes[i], i)`.
#[inline(always)]
fn from_lanes<S: Simd>(simd: S, mut lanes: [f32; MAX_LANES], f: impl Fn(f32, usize) -> f32) -> S::V {
    for (i, lane) in lanes[..S::LANES].iter_mut().enumerate() {
        *lane = f(*lane, i);
    }
    // SAFETY: the array has MAX_LANES >= LANES elements.
    unsafe { simd.load(lanes.as_ptr()) }
}

/// The two bf16 of a lane, as f32.
#[inline(always)]
fn unpack_pair(pair: f32) -> (f32, f32) {
    (f32::from_bits(pair.to_bits() << 16), f32::from_bits(pair.to_bits() & 0xffff_0000))
}

/// A lane of two bf16.
#[inline(always)]
fn pack_pair(first: bf16, second: bf16) -> f32 {
    f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16)
}

/// A kernel with its arguments, to be run by [`Isa::dispatch`] or [`Simd::vectorize`].
///
/// The arguments may be raw pointers. Such a type has a Safety section, which is the contract of its
/// [`run`](Self::run).
pub(crate) trait SimdKernel {
    /// The result of the kernel.
    type Output;
    /// Run the kernel. Implementations are `#[inline(always)]`, see the module.
    ///
    /// # Safety
    /// The contract in the Safety section of the type; a type without one requires nothing.
    unsafe fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Load a byte of each cache line of a row.
///
/// # Safety
/// The row is readable.
#[inline(always)]
pub(crate) unsafe fn load_lines(row: *const u8, bytes: usize) {
    for byte in (0..bytes).step_by(CACHE_LINE) {
        // SAFETY: the byte is one of the row's. Volatile, because the loads are all that is wanted.
        unsafe { row.add(byte).read_volatile() };
    }
}

/// Prefetch all cache lines of a row into the L2 cache. Its addresses need not be readable.
#[inline(always)]
pub(crate) fn prefetch_row(row: *const u8, bytes: usize) {
    for byte in (0..bytes).step_by(CACHE_LINE) {
        let address = row.wrapping_add(byte);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: prefetch is part of the x86-64 baseline, and it does not fault at any address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(address.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }
}
