#![allow(clippy::float_cmp, reason = "exact results are expected")]

use super::*;
use crate::tensor::DType;
use half::{bf16, f16};

/// Every operation on f32 agrees with scalar arithmetic, also for NaN and infinity.
struct Operations;
impl SimdKernel for Operations {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let lanes = |v: S::V| {
            let mut out = [0.0f32; MAX_LANES];
            // SAFETY: the array has MAX_LANES >= LANES elements.
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
        for n in -126i16..=127 {
            for fraction in [0.0, 0.25, -0.4375] {
                let (f, n_again) = simd.split_fraction(simd.splat(f32::from(n) + fraction));
                same(f, &|_, _| fraction);
                same(simd.scale_by_power_of_2(simd.splat(1.5), n_again), &|_, _| 1.5 * f32::from(n).exp2());
            }
        }
        for by in [1, 2, S::LANES / 2, S::LANES - 1] {
            let rotated = lanes(simd.rotate(va, by));
            assert!((0..S::LANES).all(|i| rotated[i] == a[(i + by) % S::LANES]), "{by}: {rotated:?}");
        }
        let (_, n) = simd.split_fraction(simd.splat(f32::NEG_INFINITY));
        same(simd.scale_by_power_of_2(simd.splat(1.5), n), &|_, _| 0.0);
    }
}

/// Lane i of the horizontal sums is the sum of vector i.
struct HorizontalSums;
impl SimdKernel for HorizontalSums {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let data: Vec<f32> = (0..MAX_LANES * MAX_LANES).map(|i| (i * i % 37) as f32).collect();
        let mut vectors = [simd.splat(0.0); MAX_LANES];
        for (i, v) in vectors.iter_mut().enumerate() {
            // SAFETY: row i of MAX_LANES x MAX_LANES has LANES elements.
            *v = unsafe { simd.load(data.as_ptr().add(i * MAX_LANES)) };
        }
        let mut out = [0.0f32; MAX_LANES];
        // SAFETY: the array has MAX_LANES >= LANES elements.
        unsafe { simd.store(out.as_mut_ptr(), simd.horizontal_sums(vectors)) };
        for (i, sum) in out[..S::LANES].iter().enumerate() {
            assert_eq!(*sum, data[i * MAX_LANES..][..S::LANES].iter().sum::<f32>(), "vector {i} of {}", S::LANES);
        }
    }
}

/// Conversions between f32 and f16 or bf16 agree with the `half` crate, for every 16-bit pattern.
struct HalfConversions;
impl SimdKernel for HalfConversions {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        for first in (0..=u16::MAX).step_by(S::LANES) {
            let bits: Vec<u16> = (0..S::LANES as u16).map(|i| first + i).collect();
            let (mut wide, mut narrow) = ([0.0f32; MAX_LANES], [0u16; MAX_LANES]);
            // SAFETY: all arrays have at least LANES elements.
            unsafe {
                simd.store(wide.as_mut_ptr(), simd.load_bf16(bits.as_ptr()));
                assert!((0..S::LANES).all(|i| same(wide[i], bf16::from_bits(bits[i]).to_f32())), "bf16 {first}");
                simd.store(wide.as_mut_ptr(), simd.load_f16(bits.as_ptr()));
                assert!((0..S::LANES).all(|i| same(wide[i], f16::from_bits(bits[i]).to_f32())), "f16 {first}");
                // Numbers on both sides of a rounding boundary, subnormal results, overflow to infinity.
                for scale in [1.0, 1.000_1, 0.999_9, 1.5, 3e-5, 7e4] {
                    let scaled = wide.map(|x| x * scale);
                    simd.store_f16(narrow.as_mut_ptr(), simd.load(scaled.as_ptr()));
                    for i in 0..S::LANES {
                        let want = f16::from_f32(scaled[i]);
                        assert!(
                            narrow[i] == want.to_bits() || (want.is_nan() && f16::from_bits(narrow[i]).is_nan()),
                            "{} became {:#x}, expected {want}",
                            scaled[i],
                            narrow[i]
                        );
                    }
                }
            }
        }
    }
}

/// bf16 pairs, loaded as bf16 or fp8, and their dot products, for instruction sets that have them.
struct Pairs;
impl SimdKernel for Pairs {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        if S::ELEMENTS_PER_LANE == 1 {
            return;
        }
        let elements = |v: S::V| -> Vec<f32> {
            let mut out = [0.0f32; MAX_LANES];
            // SAFETY: the array has MAX_LANES >= LANES elements.
            unsafe { simd.store(out.as_mut_ptr(), v) };
            out[..S::LANES]
                .iter()
                .flat_map(|w| [w.to_bits() << 16, w.to_bits() & 0xffff_0000])
                .map(f32::from_bits)
                .collect()
        };
        let lanes = S::LANES;
        let row: Vec<bf16> = (0..2 * lanes).map(|i| bf16::from_f32(i as f32 * 0.75 - 3.0)).collect();
        let second: Vec<bf16> = (0..2 * lanes).map(|i| bf16::from_f32(100.0 - i as f32)).collect();
        let at = |row: &[bf16], i: usize, n: usize| if i < n { row[i].to_f32() } else { 0.0 };
        for n in (8..=2 * lanes).step_by(8) {
            // SAFETY: the row has 2 * LANES >= n elements.
            let found = elements(unsafe { simd.load_bf16_pairs(row.as_ptr().cast(), n) });
            assert_eq!(found, (0..2 * lanes).map(|i| at(&row, i, n)).collect::<Vec<_>>());
            let n = n.min(lanes);
            // SAFETY: both rows have 2 * LANES >= n elements.
            let found = elements(unsafe { simd.interleave_bf16(row.as_ptr().cast(), second.as_ptr().cast(), n) });
            assert_eq!(found, (0..lanes).flat_map(|i| [at(&row, i, n), at(&second, i, n)]).collect::<Vec<_>>());
        }
        // SAFETY: both rows have 2 * LANES elements.
        let found = unsafe { simd.interleave_bf16_2(row.as_ptr().cast(), second.as_ptr().cast()) };
        let interleaved: Vec<f32> = (0..2 * lanes).flat_map(|i| [row[i].to_f32(), second[i].to_f32()]).collect();
        assert_eq!(found.map(elements).concat(), interleaved);
        fp8_pairs::<S, false>(simd, DType::F8E4M3FN, &elements);
        fp8_pairs::<S, false>(simd, DType::F8E5M2, &elements);
        fp8_pairs::<S, true>(simd, DType::I8, &elements);
        assert_eq!(Fp8ToBf16Table::of(DType::I8).to_bf16::<true>(0x80).to_f32(), -128.0);
        // SAFETY: both rows have 2 * LANES elements.
        let (a, b) = unsafe {
            (
                simd.load_bf16_pairs(row.as_ptr().cast(), 2 * lanes),
                simd.load_bf16_pairs(second.as_ptr().cast(), 2 * lanes),
            )
        };
        let mut sums = [0.0f32; MAX_LANES];
        // SAFETY: the array has MAX_LANES >= LANES elements.
        unsafe { simd.store(sums.as_mut_ptr(), simd.dot(a, b, simd.splat(0.5))) };
        for (i, sum) in sums[..lanes].iter().enumerate() {
            let product = |i: usize| row[i].to_f32() * second[i].to_f32();
            assert_eq!(*sum, 0.5 + product(2 * i + 1) + product(2 * i));
        }
        // Ties and their neighbours on both sides, infinities, NaN.
        for x in [1.0f32, 1.003_906_3, 1.011_718_8, 1.003_9, 1.004, -3.3e38, f32::MAX, f32::INFINITY, f32::NAN] {
            let found = elements(simd.pack_pairs(simd.splat(x), simd.splat(-2.0)));
            let same = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan());
            assert!(same(found[0], bf16::from_f32(x).to_f32()) && found[1] == -2.0, "{x}: {found:?}");
        }
    }
}

/// Every number of 8 bits of `dtype`, in pairs.
fn fp8_pairs<S: Simd, const I8: bool>(simd: S, dtype: DType, elements: &dyn Fn(S::V) -> Vec<f32>) {
    let codes: Vec<u8> = (0..=u8::MAX).collect();
    let value = |code: u8| Fp8ToBf16Table::of(dtype).to_bf16::<I8>(code).to_f32().to_bits();
    let table = simd.fp8_table(Fp8ToBf16Table::of(dtype));
    let bits = |v: S::V| elements(v).into_iter().map(f32::to_bits).collect::<Vec<_>>();
    for first in (0..=256 - 4 * S::LANES).step_by(4 * S::LANES) {
        let (from, second) = (codes[first..].as_ptr(), codes[256 - 4 * S::LANES - first..].as_ptr());
        // SAFETY: there are 4 * LANES codes from both pointers on.
        let (pairs, columns) =
            unsafe { (simd.load_fp8_pairs_2::<I8>(table, from), simd.interleave_fp8_4::<I8>(table, from, second)) };
        let found: Vec<u32> = pairs.into_iter().flat_map(bits).collect();
        assert_eq!(found, codes[first..][..4 * S::LANES].iter().map(|c| value(*c)).collect::<Vec<_>>());
        let found: Vec<u32> = columns.into_iter().flat_map(bits).collect();
        let pair = |i: usize| [codes[first + i], codes[256 - 4 * S::LANES - first + i]].map(value);
        assert_eq!(found, (0..4 * S::LANES).flat_map(pair).collect::<Vec<_>>());
    }
    for first in (0..256).step_by(2 * S::LANES) {
        for n in (8..=2 * S::LANES).step_by(8) {
            let at = |i: usize, n: usize| if i < n { value(codes[first + i]) } else { 0 };
            let from = codes[first..].as_ptr();
            // SAFETY: n <= 2 * LANES codes from `from` on.
            let found = bits(unsafe { simd.load_fp8_pairs::<I8>(table, from, n) });
            assert_eq!(found, (0..2 * S::LANES).map(|i| at(i, n)).collect::<Vec<_>>());
            let n = n.min(S::LANES);
            // SAFETY: n <= LANES codes from both pointers on, which are LANES apart.
            let found = bits(unsafe { simd.interleave_fp8::<I8>(table, from, from.add(S::LANES), n) });
            let second = |i: usize| if i < n { value(codes[first + S::LANES + i]) } else { 0 };
            assert_eq!(found, (0..S::LANES).flat_map(|i| [at(i, n), second(i)]).collect::<Vec<_>>());
        }
    }
}

/// Stores of groups of MR lanes, and stores rounded to bf16.
struct Stores;
impl SimdKernel for Stores {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let x: Vec<f32> = (0..S::LANES).map(|i| i as f32).collect();
        let mut groups = vec![-1.0f32; 8 * S::LANES];
        // SAFETY: x has LANES elements, and `groups` room for LANES / MR groups that are 2 * MR apart.
        unsafe { simd.store_groups(groups.as_mut_ptr(), 2 * S::MR, simd.load(x.as_ptr())) };
        for (group, expected) in groups.chunks(2 * S::MR).zip(x.chunks(S::MR)) {
            assert_eq!((&group[..S::MR], group[S::MR]), (expected, -1.0));
        }
        for high in (0..=u16::MAX).step_by(S::LANES) {
            for low in [0u32, 0x7fff, 0x8000, 0x8001] {
                let x: Vec<f32> =
                    (0..S::LANES as u32).map(|i| f32::from_bits((u32::from(high) + i) << 16 | low)).collect();
                let mut found = [0u16; MAX_LANES];
                // SAFETY: both arrays have at least LANES elements.
                unsafe { simd.store_bf16(found.as_mut_ptr(), simd.load(x.as_ptr())) };
                for (x, found) in x.iter().zip(found) {
                    let (want, found) = (bf16::from_f32(*x), bf16::from_bits(found));
                    assert!(want.to_bits() == found.to_bits() || (want.is_nan() && found.is_nan()), "{x}: {found}");
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_agrees_with_scalar_code() {
    for isa in Isa::available().into_iter().chain([Isa::portable_pairs()]) {
        // SAFETY: these kernels have no contract: they use their own arrays.
        unsafe {
            isa.dispatch(Operations);
            isa.dispatch(HorizontalSums);
            isa.dispatch(HalfConversions);
            isa.dispatch(Pairs);
            isa.dispatch(Stores);
        }
    }
}

#[test]
fn the_environment_variable_limits_the_instruction_set() {
    let has = Isa::available();
    assert_eq!(Isa::up_to(None), has[0]);
    assert_eq!(Isa::up_to(Some("unknown")), has[0]);
    assert_eq!(Some(&Isa::up_to(Some("portable"))), has.last());
    for (rank, name) in Isa::NAMES.iter().enumerate() {
        let widest = has.iter().find(|isa| isa.rank() <= rank);
        assert_eq!(Some(&Isa::up_to(Some(name))), widest, "{name}");
    }
}
