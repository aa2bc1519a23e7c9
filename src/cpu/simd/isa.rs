//! The instruction sets of this CPU, and kernels run with them.

use super::portable::Portable;
use super::{Simd, SimdKernel};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use std::fmt;
use std::sync::OnceLock;

/// An instruction set that this CPU has.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Isa(Kind);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// The baseline of the architecture: SSE2, NEON.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512::Avx512<true>),
    /// bf16 pairs in scalar code, to test the kernels that multiply them on any CPU.
    #[cfg(any(test, feature = "failpoints"))]
    PortablePairs,
}

impl Isa {
    /// The widest that this CPU has and `XLA_ATTENTION_CPU_ISA` allows, detected once per process.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::up_to(Self::named().as_deref()))
    }

    /// [`best`](Self::best) for matrix products, with bf16 pairs only if the operands may be bf16 and the CPU takes less time for
    /// pairs than for f32, or `XLA_ATTENTION_CPU_ISA` names them.
    pub(crate) fn for_products(may_be_bf16: bool) -> Self {
        static HAS_SLOW_PAIRS: OnceLock<bool> = OnceLock::new();
        let is_slow = || Self::named().is_none() && has_slow_bf16_pairs();
        if may_be_bf16 && !*HAS_SLOW_PAIRS.get_or_init(is_slow) {
            Self::best()
        } else {
            Self::best().without_bf16_pairs()
        }
    }

    fn named() -> Option<String> {
        std::env::var("XLA_ATTENTION_CPU_ISA").ok()
    }

    /// The widest that this CPU has among those up to the named one; an unknown name or `None` allows all.
    pub(super) fn up_to(name: Option<&str>) -> Self {
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
        // Every CPU has the portable one, and every name allows it.
        let allowed = |isa: &Self| widest.is_none_or(|widest| isa.rank() <= widest);
        Self::available().into_iter().find(allowed).unwrap_or(Self(Kind::Portable))
    }

    /// The values of `XLA_ATTENTION_CPU_ISA`, narrowest first.
    pub(super) const NAMES: [&str; 4] = ["portable", "avx2", "avx512", "avx512_bf16"];

    /// Index into [`Isa::NAMES`].
    pub(super) fn rank(self) -> usize {
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

    /// All instruction sets that this CPU has, widest first.
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

    /// bf16 pairs in scalar code.
    #[cfg(test)]
    pub(crate) fn portable_pairs() -> Self {
        Self(Kind::PortablePairs)
    }

    /// The same instruction set with one f32 per lane where it multiplies bf16 pairs.
    pub(crate) fn without_bf16_pairs(self) -> Self {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(simd) => Self(Kind::Avx512(simd.without_bf16_pairs())),
            #[cfg(any(test, feature = "failpoints"))]
            Kind::PortablePairs => Self(Kind::Portable),
            _ => self,
        }
    }

    /// ([`Simd::LANES`], [`Simd::ELEMENTS_PER_LANE`]).
    pub(crate) fn vector_shape(self) -> (usize, usize) {
        struct Shape;
        impl SimdKernel for Shape {
            type Output = (usize, usize);
            #[inline(always)]
            unsafe fn run<S: Simd>(self, _: S) -> (usize, usize) {
                (S::LANES, S::ELEMENTS_PER_LANE)
            }
        }
        // SAFETY: `Shape` has no contract: it only returns constants.
        unsafe { self.dispatch(Shape) }
    }

    /// Run `kernel` with this instruction set.
    ///
    /// # Safety
    /// The contract of [`SimdKernel::run`] of the kernel.
    pub(crate) unsafe fn dispatch<K: SimdKernel>(self, kernel: K) -> K::Output {
        // SAFETY: the caller guarantees the contract of the kernel, which is all that `vectorize` requires.
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

/// Whether `vdpbf16ps` multiplies fewer numbers per cycle than a multiply-add of f32: on Intel's CPUs from Sapphire Rapids on, which
/// have AMX for bf16, it takes two cycles, in which two units multiply and add four vectors of f32.
fn has_slow_bf16_pairs() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        #[allow(unused_unsafe, reason = "newer compilers have it as a safe function")]
        // SAFETY: every CPU of x86-64 has the instruction and its leaf 0, the vendor.
        let vendor = unsafe { __cpuid(0) };
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        name.as_flattened() == b"GenuineIntel" && is_x86_feature_detected!("avx512fp16")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
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
