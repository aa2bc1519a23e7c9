//! Four lanes as an array, which the compiler turns into vectors of the architecture's baseline (SSE2, NEON).

use super::{MAX_LANES, ROUND, Simd, SimdKernel, from_lanes, pack_pair, scalar_fp8_operations};
use crate::cpu::fp8_decoding::{Fp8Decoding, Fp8ToBf16Table};
use half::{bf16, f16};

/// The baseline, which needs no proof of features. `ELEMENTS_PER_LANE` is the constant of [`Simd`].
#[derive(Clone, Copy)]
pub(crate) struct Portable<const ELEMENTS_PER_LANE: usize>;

type V = [f32; 4];

#[inline(always)]
fn map2(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

impl<const ELEMENTS_PER_LANE: usize> Simd for Portable<ELEMENTS_PER_LANE> {
    type V = V;
    const LANES: usize = 4;
    const MR: usize = 4;
    const ELEMENTS_PER_LANE: usize = ELEMENTS_PER_LANE;

    #[inline(never)]
    unsafe fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output {
        // SAFETY: the caller guarantees the contract of the kernel.
        unsafe { kernel.run(self) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> V {
        // SAFETY: four readable elements, as the caller guarantees.
        unsafe { from.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: V) {
        // SAFETY: four writable elements, as the caller guarantees.
        unsafe { to.cast::<V>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> V {
        // SAFETY: four readable elements, as the caller guarantees.
        unsafe { from.cast::<[u16; 4]>().read_unaligned() }.map(|bits| f16::from_bits(bits).to_f32_const())
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: V) {
        let bits = x.map(|x| f16::from_f32_const(x).to_bits());
        // SAFETY: four writable elements, as the caller guarantees.
        unsafe { to.cast::<[u16; 4]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> V {
        // SAFETY: four readable elements, as the caller guarantees.
        unsafe { from.cast::<[u16; 4]>().read_unaligned() }.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_fp8(self, format: Fp8Decoding, from: *const u8) -> V {
        // SAFETY: four readable elements, as the caller guarantees.
        unsafe { from.cast::<[u8; 4]>().read() }.map(|code| format.decode(code))
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> V {
        // SAFETY: four readable elements, as the caller guarantees.
        unsafe { from.cast::<[i8; 4]>().read() }.map(f32::from)
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // `mul_add` is a library call where the baseline has no fused instruction.
        let multiply_add = |a: f32, b: f32, c: f32| {
            if cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { a * b + c }
        };
        [
            multiply_add(a[0], b[0], c[0]),
            multiply_add(a[1], b[1], c[1]),
            multiply_add(a[2], b[2], c[2]),
            multiply_add(a[3], b[3], c[3]),
        ]
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        let pick = |i: usize| if a[i] < b[i] { yes[i] } else { no[i] };
        [pick(0), pick(1), pick(2), pick(3)]
    }
    #[inline(always)]
    fn split_fraction(self, x: V) -> (V, V) {
        // The constant comes first: `max` returns its second operand where one is NaN, and NaN has to stay NaN.
        let x = self.max(self.splat(-127.0), x);
        let rounded = self.add(x, self.splat(ROUND));
        (self.sub(x, self.sub(rounded, self.splat(ROUND))), rounded)
    }
    #[inline(always)]
    fn scale_by_power_of_2(self, p: V, n: V) -> V {
        // n is x + ROUND: its low mantissa bits hold the integer in two's complement. The shift moves them into the
        // exponent, and the bias completes the power of two.
        map2(p, n, |p, n| p * f32::from_bits((n.to_bits() << 23).wrapping_add(127 << 23)))
    }
    #[inline(always)]
    fn rotate(self, x: V, by: usize) -> V {
        [x[by % 4], x[(by + 1) % 4], x[(by + 2) % 4], x[(by + 3) % 4]]
    }
    scalar_fp8_operations!();
    #[inline(always)]
    fn horizontal_sums(self, sums: [V; MAX_LANES]) -> V {
        let lane = |i: usize| (sums[i][0] + sums[i][2]) + (sums[i][1] + sums[i][3]);
        [lane(0), lane(1), lane(2), lane(3)]
    }
}
