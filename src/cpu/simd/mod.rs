//! Vectors of f32 behind one trait, for the instruction sets that kernels are compiled for.
//!
//! A kernel is generic over [`Simd`] and runs through [`Isa::dispatch`], which compiles it once for each instruction set.
//! Whatever it calls must be `#[inline(always)]`: only then do the vector operations end up inside the function that
//! may use the instructions.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

use super::bf16_rounding::round_to_bf16;
use super::fp8_decoding::{Fp8Decoding, Fp8ToBf16Table};
use half::bf16;
use portable::Portable;
use std::fmt;
use std::sync::OnceLock;

/// The most lanes of any instruction set.
pub(crate) const MAX_LANES: usize = 16;

/// Bytes that memory moves at a time.
pub(crate) const CACHE_LINE: usize = 64;

/// Adding it rounds a small f32 to an integer, which then stands in the low mantissa bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// The most elements in a lane.
pub(crate) const MAX_ELEMENTS_PER_LANE: usize = 2;

/// Operations on vectors of [`Simd::LANES`] f32. Holding a value proves that this CPU has the instructions.
///
/// Where an instruction set multiplies pairs of bf16, a lane may also be a word of two bf16, the first in its lower
/// half. Operations on such words are also defined in scalars, for CPUs without the instructions.
pub(crate) trait Simd: Copy {
    /// One vector.
    type V: Copy;
    /// A table of 8-bit codes where it is at hand.
    type Fp8Table: Copy;
    /// f32 in a vector: 4, 8 or 16.
    const LANES: usize;
    /// Elements that lie in a lane while they are multiplied: 1, f32, or 2, bf16, where that is faster.
    const ELEMENTS_PER_LANE: usize;
    /// Rows of a register tile: this many times two vectors of sums fit into the registers, beside what feeds them.
    /// Divides 8.
    const MR: usize;
    /// Whether [`stream`](Self::stream) is more than a store.
    const HAS_NONTEMPORAL_STORES: bool = false;

    /// Run `kernel` as a function of its own with these instructions: for what is long and needed in many places.
    ///
    /// # Safety
    /// As [`SimdKernel::run`] of the kernel.
    unsafe fn vectorize<K: SimdKernel>(self, kernel: K) -> K::Output;
    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// # Safety
    /// `from` has `LANES` readable elements; any alignment.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `to` has `LANES` writable elements; any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::V);
    /// As [`store`](Self::store), past the caches where [`HAS_NONTEMPORAL_STORES`](Self::HAS_NONTEMPORAL_STORES): what follows on other threads must come
    /// after a [`fence`](Self::fence).
    /// # Safety
    /// As of `store`; `to` is aligned to the vector.
    #[inline(always)]
    unsafe fn store_nontemporal(self, to: *mut f32, x: Self::V) {
        // SAFETY: the caller's word.
        unsafe { self.store(to, x) }
    }
    /// What this thread has streamed is stored.
    #[inline(always)]
    fn store_fence(self) {}
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
    /// Rounded to nearest even; NaN stays NaN.
    /// # Safety
    /// `to` has `LANES` writable elements; any alignment.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, x: Self::V) {
        for (i, x) in to_array(self, x)[..Self::LANES].iter().enumerate() {
            // SAFETY: i < LANES.
            unsafe { to.add(i).write_unaligned(round_to_bf16(*x).to_bits()) }
        }
    }
    /// `LANES` codes, widened; infinities and NaN stay what they are.
    /// # Safety
    /// `from` has `LANES` readable elements.
    unsafe fn load_fp8(self, format: Fp8Decoding, from: *const u8) -> Self::V;

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
    /// x as a fraction, at most 1/2 in magnitude, and an integer in a form that [`Self::scale_by_power_of_2`] takes; x is
    /// less than 127.5. -inf may have any fraction.
    fn split_fraction(self, x: Self::V) -> (Self::V, Self::V);
    /// `p * 2^n` for p between 1/2 and 2; not above 2^-126 for n below -126, 0 where n came from -inf.
    fn scale_by_power_of_2(self, p: Self::V, n: Self::V) -> Self::V;
    /// Lane i of the result is lane `(i + by) % LANES`.
    fn rotate(self, x: Self::V, by: usize) -> Self::V;
    /// Lane i is the sum of the lanes of `sums[i]`; vectors beyond `LANES` are not read.
    fn horizontal_sums(self, sums: [Self::V; MAX_LANES]) -> Self::V;

    /// `sum + a * b` with lanes of f32, `sum + a.1 * b.1 + a.0 * b.0` with lanes of two bf16, where numbers that are
    /// subnormal in f32 may count as 0.
    #[inline(always)]
    fn dot(self, a: Self::V, b: Self::V, sum: Self::V) -> Self::V {
        if Self::ELEMENTS_PER_LANE == 1 {
            return self.fma(a, b, sum);
        }
        let (a, b) = (to_array(self, a).map(unpack_pair), to_array(self, b).map(unpack_pair));
        from_lanes(self, to_array(self, sum), |sum, i| sum + a[i].1 * b[i].1 + a[i].0 * b[i].0)
    }
    /// Words (a, b) of the numbers rounded to nearest even; subnormal ones may become 0.
    #[inline(always)]
    fn pack_pairs(self, a: Self::V, b: Self::V) -> Self::V {
        let b = to_array(self, b);
        from_lanes(self, to_array(self, a), |a, i| pack_pair(round_to_bf16(a), round_to_bf16(b[i])))
    }
    /// Words whose elements are times `factor`, rounded to nearest even; subnormal ones may become 0.
    #[inline(always)]
    fn scale_pairs(self, words: Self::V, factor: Self::V) -> Self::V {
        let factor = to_array(self, factor);
        from_lanes(self, to_array(self, words), |both, i| {
            let (first, second) = unpack_pair(both);
            pack_pair(round_to_bf16(first * factor[i]), round_to_bf16(second * factor[i]))
        })
    }
    /// Words of the first `n` elements of a row of bf16, at most twice `LANES`, then zeros.
    /// # Safety
    /// `from` has `n` readable elements; any alignment.
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u16, n: usize) -> Self::V {
        // SAFETY: i < n.
        let element = |i| bf16::from_bits(if i < n { unsafe { from.add(i).read_unaligned() } } else { 0 });
        from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(2 * i), element(2 * i + 1)))
    }
    /// Words (first\[i\], second\[i\]) of two rows of bf16, i below `n`, at most `LANES`, then zeros.
    /// # Safety
    /// Both have `n` readable elements; any alignment.
    #[inline(always)]
    unsafe fn interleave_bf16(self, first: *const u16, second: *const u16, n: usize) -> Self::V {
        let element = |from: *const u16, i| {
            if i >= n {
                return bf16::ZERO;
            }
            // SAFETY: i < n.
            bf16::from_bits(unsafe { from.add(i).read_unaligned() })
        };
        from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(first, i), element(second, i)))
    }
    /// A table for the following two.
    fn fp8_table(self, table: &'static Fp8ToBf16Table) -> Self::Fp8Table;
    /// As `load_bf16_pairs`, from codes.
    /// # Safety
    /// As `load_bf16_pairs`.
    unsafe fn load_fp8_pairs(self, table: Self::Fp8Table, from: *const u8, n: usize) -> Self::V;
    /// As `interleave_bf16`, from codes.
    /// # Safety
    /// As `interleave_bf16`.
    unsafe fn interleave_fp8(self, table: Self::Fp8Table, first: *const u8, second: *const u8, n: usize) -> Self::V;
    /// `load_fp8_pairs` of four times `LANES` codes.
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn load_fp8_pairs_2(self, table: Self::Fp8Table, from: *const u8) -> [Self::V; 2] {
        // SAFETY: two times `2 * LANES` of the codes.
        [0, 1].map(|i| unsafe { self.load_fp8_pairs(table, from.add(i * 2 * Self::LANES), 2 * Self::LANES) })
    }
    /// `interleave_fp8` of four times `LANES` columns.
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn interleave_fp8_4(self, table: Self::Fp8Table, first: *const u8, second: *const u8) -> [Self::V; 4] {
        [0, 1, 2, 3].map(|i| {
            let at = i * Self::LANES;
            // SAFETY: `LANES` of the columns from `at` on, four times.
            unsafe { self.interleave_fp8(table, first.add(at), second.add(at), Self::LANES) }
        })
    }
    /// Parts of `MR` lanes, each `stride` after the one before.
    /// # Safety
    /// All of it is writable; `MR` divides `LANES`.
    #[inline(always)]
    unsafe fn store_groups(self, to: *mut f32, stride: usize, x: Self::V) {
        let lanes = to_array(self, x);
        for part in 0..Self::LANES / Self::MR {
            // SAFETY: a part of the lanes, of which there are LANES <= MAX_LANES, to its place, by this function's contract.
            unsafe {
                let from = lanes.as_ptr().add(part * Self::MR);
                to.add(part * stride).copy_from_nonoverlapping(from, Self::MR);
            }
        }
    }
}

/// What [`Simd`] says of codes, by its definition.
macro_rules! scalar_fp8_operations {
    () => {
        type Fp8Table = &'static Fp8ToBf16Table;
        #[inline(always)]
        fn fp8_table(self, table: &'static Fp8ToBf16Table) -> Self::Fp8Table {
            table
        }
        #[inline(always)]
        unsafe fn load_fp8_pairs(self, table: Self::Fp8Table, from: *const u8, n: usize) -> Self::V {
            // SAFETY: i < n.
            let element = |i| if i < n { table.to_bf16(unsafe { from.add(i).read() }) } else { bf16::ZERO };
            from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(2 * i), element(2 * i + 1)))
        }
        #[inline(always)]
        unsafe fn interleave_fp8(
            self,
            table: Self::Fp8Table,
            first: *const u8,
            second: *const u8,
            n: usize,
        ) -> Self::V {
            let element = |from: *const u8, i| {
                if i >= n {
                    return bf16::ZERO;
                }
                // SAFETY: i < n.
                table.to_bf16(unsafe { from.add(i).read() })
            };
            from_lanes(self, [0.0; MAX_LANES], |_, i| pack_pair(element(first, i), element(second, i)))
        }
    };
}
use scalar_fp8_operations;

/// The lanes of a vector, then zeros.
#[inline(always)]
fn to_array<S: Simd>(simd: S, x: S::V) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: LANES <= MAX_LANES.
    unsafe { simd.store(lanes.as_mut_ptr(), x) };
    lanes
}

/// A vector of what `f` makes of each lane and its index.
#[inline(always)]
fn from_lanes<S: Simd>(simd: S, mut lanes: [f32; MAX_LANES], f: impl Fn(f32, usize) -> f32) -> S::V {
    for (i, lane) in lanes[..S::LANES].iter_mut().enumerate() {
        *lane = f(*lane, i);
    }
    // SAFETY: LANES <= MAX_LANES.
    unsafe { simd.load(lanes.as_ptr()) }
}

/// The two bf16 of a word, widened.
#[inline(always)]
fn unpack_pair(word: f32) -> (f32, f32) {
    (f32::from_bits(word.to_bits() << 16), f32::from_bits(word.to_bits() & 0xffff_0000))
}

/// Two bf16 as a word.
#[inline(always)]
fn pack_pair(first: bf16, second: bf16) -> f32 {
    f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16)
}

/// A kernel with its arguments, to be run with the instructions that the CPU has.
///
/// The arguments may be addresses: a type with a contract has a section on safety, which says what running it requires.
pub(crate) trait SimdKernel {
    /// What it returns.
    type Output;
    /// The kernel; `#[inline(always)]`, see the module.
    ///
    /// # Safety
    /// What the type requires.
    unsafe fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this CPU has.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Isa(Kind);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// What every CPU of the architecture has: SSE2, NEON.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512::Avx512<true>),
    /// Pairs of bf16 by their definition, to test the kernels that multiply them on any CPU.
    #[cfg(any(test, feature = "failpoints"))]
    PortablePairs,
}

impl Isa {
    /// The widest that this CPU has and `XLA_ATTENTION_CPU_ISA` allows; found once.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::up_to(std::env::var("XLA_ATTENTION_CPU_ISA").ok().as_deref()))
    }

    /// The widest that this CPU has among those up to the named one; any, if there is no such name.
    fn up_to(name: Option<&str>) -> Self {
        #[cfg(feature = "failpoints")]
        if name == Some("portable_pairs") {
            return Self(Kind::PortablePairs);
        }
        let widest = name.and_then(|name| {
            let known = Self::NAMES.iter().position(|known| *known == name);
            if known.is_none() {
                eprintln!("XLA_ATTENTION_CPU_ISA={name}: expected one of {:?}; taken for the last", Self::NAMES);
            }
            known
        });
        // The portable one is always there, and is allowed by every name.
        let allowed = |isa: &Self| widest.is_none_or(|widest| isa.rank() <= widest);
        Self::available().into_iter().find(allowed).unwrap_or(Self(Kind::Portable))
    }

    /// What `XLA_ATTENTION_CPU_ISA` may say, narrowest first.
    const NAMES: [&str; 4] = ["portable", "avx2", "avx512", "avx512_bf16"];

    /// Its place in [`Isa::NAMES`].
    fn rank(self) -> usize {
        match self.0 {
            Kind::Portable => 0,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => 1,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => 2,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => 3,
            #[cfg(any(test, feature = "failpoints"))]
            Kind::PortablePairs => 0,
        }
    }

    /// All that this CPU has, widest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut kinds = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            kinds.extend(avx512::Avx512::<true>::detect().map(Kind::Avx512Bf16));
            kinds.extend(avx512::Avx512::<false>::detect().map(Kind::Avx512));
            kinds.extend(avx2::Avx2::detect().map(Kind::Avx2));
        }
        kinds.push(Kind::Portable);
        kinds.into_iter().map(Isa).collect()
    }

    /// Pairs of bf16 by their definition.
    #[cfg(test)]
    pub(crate) fn portable_pairs() -> Self {
        Self(Kind::PortablePairs)
    }

    /// The same without multiplying pairs of bf16.
    pub(crate) fn without_bf16_pairs(self) -> Self {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(simd) => Self(Kind::Avx512(simd.without_bf16_pairs())),
            #[cfg(any(test, feature = "failpoints"))]
            Kind::PortablePairs => Self(Kind::Portable),
            _ => self,
        }
    }

    /// Lanes of a vector, and elements in a lane while they are multiplied.
    pub(crate) fn vector_shape(self) -> (usize, usize) {
        struct Shape;
        impl SimdKernel for Shape {
            type Output = (usize, usize);
            #[inline(always)]
            unsafe fn run<S: Simd>(self, _: S) -> (usize, usize) {
                (S::LANES, S::ELEMENTS_PER_LANE)
            }
        }
        // SAFETY: it requires nothing.
        unsafe { self.dispatch(Shape) }
    }

    /// Run `kernel` compiled for this instruction set.
    ///
    /// # Safety
    /// As [`SimdKernel::run`] of the kernel.
    pub(crate) unsafe fn dispatch<K: SimdKernel>(self, kernel: K) -> K::Output {
        // SAFETY: `call` asks for what `run` asks for, which is this function's contract.
        unsafe {
            match self.0 {
                Kind::Portable => Portable::<1>.vectorize(kernel),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx2(simd) => simd.vectorize(kernel),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx512(simd) => simd.vectorize(kernel),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx512Bf16(simd) => simd.vectorize(kernel),
                #[cfg(any(test, feature = "failpoints"))]
                Kind::PortablePairs => Portable::<2>.vectorize(kernel),
            }
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
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => "AVX-512 with bf16",
            #[cfg(any(test, feature = "failpoints"))]
            Kind::PortablePairs => "baseline instructions, pairs of bf16",
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

/// The same for all lines of a row.
#[inline(always)]
pub(crate) fn prefetch_row(row: *const u8, bytes: usize) {
    for byte in (0..bytes).step_by(CACHE_LINE) {
        prefetch(row.wrapping_add(byte));
    }
}
