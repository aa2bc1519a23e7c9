//! One step of the online softmax over a block of scores.
//!
//! A block of scores is `[steps][NV]` vectors. A lane belongs to one query row throughout; from a step to the next the
//! key's position grows as [`super::score::Steps`] says. All is in base 2: `m` is the largest score times log2(e).

use super::score::Edits;
use crate::cpu::elementary::exp2;
use crate::cpu::simd::{MAX_ELEMENTS_PER_LANE, Simd, SimdKernel};

/// The scores of a block become `p = 2^(s - m)` in place, with m the largest so far; m and l are brought up to date,
/// and `keep` gets what o has to be multiplied with. There are NV vectors of m, l and keep. Where words hold two
/// elements, p becomes `[steps / 2][NV]` vectors of words, and `edits.steps.count` is even; l is the sum of p before it
/// is rounded.
///
/// Lanes that are `rows` apart belong to one row, where `rows` is less than a vector's lanes. If `known`, `keep` holds
/// each lane's largest product, which helps where there are no edits.
///
/// # Safety
/// `scores` has `edits.steps.count * NV` vectors, `m`, `l` and `keep` have NV.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd, const NV: usize>(
    simd: S,
    scores: *mut f32,
    edits: Edits,
    (rows, known): (usize, bool),
    (m, l): (*mut f32, *mut f32),
    keep: *mut f32,
) {
    // SAFETY: the vectors are those of this function's contract.
    unsafe { simd.vectorize(Softmax::<NV> { scores, edits, rows, known, m, l, keep }) };
}

/// # Safety
/// As [`softmax`].
struct Softmax<'a, const NV: usize> {
    scores: *mut f32,
    edits: Edits<'a>,
    rows: usize,
    known: bool,
    m: *mut f32,
    l: *mut f32,
    keep: *mut f32,
}

impl<const NV: usize> SimdKernel for Softmax<'_, NV> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let edited = !self.edits.are_none();
        // SAFETY: `scores` has NV vectors for each step, `m`, `l` and `keep` have NV.
        unsafe {
            if edited {
                self.edits.apply(simd, self.scores, NV);
            }
            let mut largest = if edited || !self.known { self.largest(simd) } else { self.known_largest(simd) };
            if self.rows < S::LANES {
                // No closure here: it would be compiled without the vector instructions.
                for largest in &mut largest {
                    *largest = over_keys(simd, *largest, self.rows);
                }
            }
            self.exponentials(simd, largest);
        }
    }
}

impl<const NV: usize> Softmax<'_, NV> {
    /// Vector `v` of step `step`.
    #[inline(always)]
    fn at<S: Simd>(&self, _: S, step: usize, v: usize) -> *mut f32 {
        self.scores.wrapping_add((step * NV + v) * S::LANES)
    }

    /// Each lane's largest score.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn largest<S: Simd>(&self, simd: S) -> [S::V; NV] {
        let mut largest = [simd.splat(f32::NEG_INFINITY); NV];
        for step in 0..self.edits.steps.count {
            for (v, largest) in largest.iter_mut().enumerate() {
                // SAFETY: vector v < NV of step < `steps.count`.
                let s = unsafe { simd.load(self.at(simd, step, v)) };
                // NaN first: it must not become the largest, it reaches the result through its own exponential.
                *largest = simd.max(s, *largest);
            }
        }
        largest
    }

    /// The same, from `keep`.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn known_largest<S: Simd>(&self, simd: S) -> [S::V; NV] {
        let mut largest = [simd.splat(0.0); NV];
        for (v, largest) in largest.iter_mut().enumerate() {
            // SAFETY: vector v < NV of `keep`.
            *largest = unsafe { simd.load(self.keep.add(v * S::LANES)) };
        }
        largest
    }

    /// The rest, where each lane's largest score is known.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn exponentials<S: Simd>(&self, simd: S, largest: [S::V; NV]) {
        let (zero, c) = (simd.splat(0.0), simd.splat(self.edits.form.to_base_2));
        let (mut minus_m, mut sums) = ([zero; NV], [zero; NV]);
        for v in 0..NV {
            let [m, l, keep] = [self.m, self.l, self.keep].map(|x| x.wrapping_add(v * S::LANES));
            // SAFETY: vector v < NV of m, l and `keep`.
            unsafe {
                let old = simd.load(m);
                let new = simd.max(simd.mul(largest[v], c), old);
                let reference = finite_or_zero(simd, new);
                let kept = exp2(simd, simd.sub(old, reference));
                minus_m[v] = simd.sub(zero, reference);
                sums[v] = simd.mul(simd.load(l), kept);
                simd.store(m, new);
                simd.store(keep, kept);
            }
        }
        for word in 0..self.edits.steps.count / S::ELEMENTS_PER_LANE {
            for v in 0..NV {
                let mut p = [zero; MAX_ELEMENTS_PER_LANE];
                for (i, p) in p[..S::ELEMENTS_PER_LANE].iter_mut().enumerate() {
                    // SAFETY: vector v < NV of one of the steps that share the word.
                    let score = unsafe { simd.load(self.at(simd, word * S::ELEMENTS_PER_LANE + i, v)) };
                    *p = exp2(simd, simd.fma(score, c, minus_m[v]));
                    sums[v] = simd.add(sums[v], *p);
                }
                let words = if S::ELEMENTS_PER_LANE == 1 { p[0] } else { simd.pack_pairs(p[0], p[1]) };
                // SAFETY: words take no more room than the scores that they are made of, which were read.
                unsafe { simd.store(self.at(simd, word, v), words) };
            }
        }
        for (v, sum) in sums.into_iter().enumerate() {
            // SAFETY: vector v < NV of l.
            unsafe { simd.store(self.l.wrapping_add(v * S::LANES), sum) }
        }
    }
}

/// The largest of all lanes that are `rows` apart, in all of them.
#[inline(always)]
fn over_keys<S: Simd>(simd: S, mut x: S::V, rows: usize) -> S::V {
    let mut by = rows;
    while by < S::LANES {
        x = simd.max(x, simd.rotate(x, by));
        by *= 2;
    }
    x
}

/// Factors that bring two states to their common m, which replaces the first's m; its l becomes the sum of both.
///
/// # Safety
/// Vectors of m and l of two states.
#[inline(always)]
pub(super) unsafe fn merge_factors<S: Simd>(
    simd: S,
    (m, l): (*mut f32, *mut f32),
    (other_m, other_l): (*const f32, *const f32),
) -> (S::V, S::V) {
    // SAFETY: the caller's word.
    unsafe {
        let (a, b) = (simd.load(m), simd.load(other_m));
        let new = simd.max(a, b);
        let reference = finite_or_zero(simd, new);
        let (keep, add) = (exp2(simd, simd.sub(a, reference)), exp2(simd, simd.sub(b, reference)));
        simd.store(m, new);
        simd.store(l, simd.fma(simd.load(other_l), add, simd.mul(simd.load(l), keep)));
        (keep, add)
    }
}

/// m as something to subtract: where no key has been seen it is -inf, and -inf - -inf is NaN.
#[inline(always)]
fn finite_or_zero<S: Simd>(simd: S, m: S::V) -> S::V {
    simd.select_lt(simd.splat(f32::NEG_INFINITY), m, m, simd.splat(0.0))
}
