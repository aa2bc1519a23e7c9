//! Vectors of f32 behind one trait, for the instruction sets that kernels are compiled for.
//!
//! A kernel is generic over [`Simd`] and runs through [`Isa::run`], which compiles it once for each instruction set.
//! Whatever it calls must be `#[inline(always)]`: only then do the vector operations end up inside the function that
//! may use the instructions.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;
use std::sync::OnceLock;

/// The most lanes of any instruction set.
pub(crate) const MAX_LANES: usize = 16;

/// Operations on vectors of [`Simd::LANES`] f32. Holding a value proves that this CPU has the instructions.
pub(crate) trait Simd: Copy {
    /// One vector.
    type V: Copy;
    /// f32 in a vector: 4, 8 or 16.
    const LANES: usize;
    /// Rows of a register tile: this many times two vectors of sums fit into the registers, beside what feeds them.
    /// Divides 8.
    const TILE: usize;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// # Safety
    /// `from` has `LANES` readable elements; any alignment.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `to` has `LANES` writable elements; any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::V);
    /// `LANES` elements of f16, widened.
    /// # Safety
    /// `from` has `LANES` readable elements; any alignment.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;
    /// Rounded to nearest even; NaN stays NaN.
    /// # Safety
    /// `to` has `LANES` writable elements; any alignment.
    unsafe fn store_f16(self, to: *mut u16, x: Self::V);
    /// `LANES` elements of bf16, widened.
    /// # Safety
    /// `from` has `LANES` readable elements; any alignment.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;

    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the CPU can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where one of them is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `yes` where `a < b`, otherwise `no`, also where one of them is NaN.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// `2^n` for the integer n in the low mantissa bits of `t = n + 1.5 * 2^23`, -127 (which gives 0) to 127.
    fn exponential_of_low_bits(self, t: Self::V) -> Self::V;
    /// Lane i is the sum of the lanes of `sums[i]`; vectors beyond `LANES` are not read.
    fn sum_each(self, sums: [Self::V; MAX_LANES]) -> Self::V;
}

/// A kernel with its arguments, to be run with the instructions that the CPU has.
pub(crate) trait Vectorised {
    /// What it returns.
    type Output;
    /// The kernel; `#[inline(always)]`, see the module.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this CPU has.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Isa(Kind);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// What every CPU of the architecture has: SSE2, NEON.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Isa {
    /// The widest that this CPU has; found once.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }

    /// All that this CPU has, widest first.
    pub(crate) fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let wide = [x86::Avx512::detect().map(Kind::Avx512), x86::Avx2::detect().map(Kind::Avx2)];
        #[cfg(not(target_arch = "x86_64"))]
        let wide = [None];
        wide.into_iter().flatten().chain([Kind::Portable]).map(Isa).collect()
    }

    /// f32 in a vector.
    pub(crate) fn lanes(self) -> usize {
        struct Lanes;
        impl Vectorised for Lanes {
            type Output = usize;
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::LANES
            }
        }
        self.run(Lanes)
    }

    /// Run `kernel` compiled for this instruction set.
    pub(crate) fn run<K: Vectorised>(self, kernel: K) -> K::Output {
        match self.0 {
            Kind::Portable => kernel.run(portable::Portable),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(simd) => simd.run(kernel),
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Portable => "baseline instructions",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "AVX-512",
        })
    }
}

/// Ask for the cache line of `address`, which need not be readable, up to the second level of cache.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, part of the architecture's baseline, never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "exact results are expected")]

    use super::*;
    use half::{bf16, f16};

    /// What every operation gives for a few awkward vectors, compared with scalar arithmetic.
    struct Operations;
    impl Vectorised for Operations {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let lanes = |v: S::V| {
                let mut out = [0.0f32; MAX_LANES];
                // SAFETY: LANES <= MAX_LANES.
                unsafe { simd.store(out.as_mut_ptr(), v) };
                out[..S::LANES].to_vec()
            };
            let a: Vec<f32> = (0..MAX_LANES).map(|i| i as f32 * 1.25 - 3.0).collect();
            let mut b: Vec<f32> = (0..MAX_LANES).map(|i| 2.0 - i as f32 * 0.75).collect();
            b[1] = f32::NAN;
            b[2] = f32::NEG_INFINITY;
            // SAFETY: both have MAX_LANES elements.
            let (va, vb) = unsafe { (simd.load(a.as_ptr()), simd.load(b.as_ptr())) };
            let same = |v: S::V, expected: &dyn Fn(f32, f32) -> f32| {
                for (i, got) in lanes(v).into_iter().enumerate() {
                    let want = expected(a[i], b[i]);
                    assert!(got == want || (got.is_nan() && want.is_nan()), "lane {i}: {got} instead of {want}");
                }
            };
            same(simd.splat(4.5), &|_, _| 4.5);
            same(simd.add(va, vb), &|a, b| a + b);
            same(simd.sub(va, vb), &|a, b| a - b);
            same(simd.mul(va, vb), &|a, b| a * b);
            same(simd.div(va, vb), &|a, b| a / b);
            same(simd.fma(va, vb, va), &|a, b| a * b + a);
            same(simd.max(va, vb), &|a, b| if a > b { a } else { b });
            same(simd.select_lt(va, vb, va, simd.splat(0.5)), &|a, b| if a < b { a } else { 0.5 });
            for n in -127i16..=127 {
                let power = simd.exponential_of_low_bits(simd.splat(f32::from(n) + 12_582_912.0));
                same(power, &|_, _| if n == -127 { 0.0 } else { f32::from(n).exp2() });
            }
        }
    }

    /// Lane i of the reduction belongs to vector i.
    struct Sums;
    impl Vectorised for Sums {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let data: Vec<f32> = (0..MAX_LANES * MAX_LANES).map(|i| (i * i % 37) as f32).collect();
            let mut vectors = [simd.splat(0.0); MAX_LANES];
            for (i, v) in vectors.iter_mut().enumerate() {
                // SAFETY: the beginning of row i of MAX_LANES x MAX_LANES.
                *v = unsafe { simd.load(data.as_ptr().add(i * MAX_LANES)) };
            }
            let mut out = [0.0f32; MAX_LANES];
            // SAFETY: LANES <= MAX_LANES.
            unsafe { simd.store(out.as_mut_ptr(), simd.sum_each(vectors)) };
            for (i, sum) in out[..S::LANES].iter().enumerate() {
                assert_eq!(*sum, data[i * MAX_LANES..][..S::LANES].iter().sum::<f32>(), "vector {i} of {}", S::LANES);
            }
        }
    }

    /// Every 16-bit pattern widens as the `half` crate says, and f32 rounds to f16 as it says.
    struct HalfConversions;
    impl Vectorised for HalfConversions {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            for first in (0..=u16::MAX).step_by(S::LANES) {
                let bits: Vec<u16> = (0..S::LANES as u16).map(|i| first + i).collect();
                let (mut wide, mut narrow) = ([0.0f32; MAX_LANES], [0u16; MAX_LANES]);
                // SAFETY: LANES elements each.
                unsafe {
                    simd.store(wide.as_mut_ptr(), simd.load_bf16(bits.as_ptr()));
                    assert!((0..S::LANES).all(|i| same(wide[i], bf16::from_bits(bits[i]).to_f32())), "bf16 {first}");
                    simd.store(wide.as_mut_ptr(), simd.load_f16(bits.as_ptr()));
                    assert!((0..S::LANES).all(|i| same(wide[i], f16::from_bits(bits[i]).to_f32())), "f16 {first}");
                    // Both neighbourhoods of a rounding boundary, subnormal results, overflow to infinity.
                    for scale in [1.0, 1.000_1, 0.999_9, 1.5, 3e-5, 7e4] {
                        let scaled = wide.map(|x| x * scale);
                        simd.store_f16(narrow.as_mut_ptr(), simd.load(scaled.as_ptr()));
                        for i in 0..S::LANES {
                            let want = f16::from_f32(scaled[i]);
                            assert!(
                                narrow[i] == want.to_bits() || (want.is_nan() && f16::from_bits(narrow[i]).is_nan()),
                                "{} became {:#x} instead of {want}",
                                scaled[i],
                                narrow[i]
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_computes_what_scalar_code_computes() {
        for isa in Isa::available() {
            isa.run(Operations);
            isa.run(Sums);
            isa.run(HalfConversions);
        }
    }
}
