//! One step of the online softmax, over a block of scores.
//!
//! The scores of a block are `[steps][NV]` vectors. A lane belongs to one query row throughout; the key positions of
//! the steps are [`super::score::KeyPositions`]. Everything is in base 2: `m` is the largest score times log2(e).

use super::score::MaskAndBias;
use crate::cpu::elementary::exp2;
use crate::cpu::simd::{MAX_ELEMENTS_PER_LANE, Simd, SimdKernel};

/// Turn the scores of a block into `p = 2^(s - m)` in place, where m is the running maximum, update m and l, and set
/// `rescale` to the factor that brings o to the new m. m, l and `rescale` have NV vectors.
///
/// With scales of V p becomes the weight of V, which they multiply; l sums p without them.
///
/// Where lanes hold two elements, p becomes `[steps / 2][NV]` vectors of bf16 pairs; the number of steps is then even,
/// and l sums p before the rounding.
///
/// Lanes that are `rows` apart belong to the same query row, if `rows` is less than LANES (the GEMV layout). With
/// `row_max_known`, `rescale` holds the largest product of each lane on entry, which saves a pass over the scores
/// unless mask or bias change them.
///
/// # Safety
/// `scores` has `steps * NV` vectors; `m`, `l` and `rescale` have NV.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd, const NV: usize>(
    simd: S,
    scores: *mut f32,
    mask_and_bias: MaskAndBias,
    (rows, row_max_known): (usize, bool),
    (m, l): (*mut f32, *mut f32),
    rescale: *mut f32,
) {
    // SAFETY: the caller guarantees the vectors that `Softmax` requires.
    unsafe { simd.vectorize(Softmax::<NV> { scores, mask_and_bias, rows, row_max_known, m, l, rescale }) };
}

/// # Safety
/// As [`softmax`].
struct Softmax<'a, const NV: usize> {
    scores: *mut f32,
    mask_and_bias: MaskAndBias<'a>,
    rows: usize,
    row_max_known: bool,
    m: *mut f32,
    l: *mut f32,
    rescale: *mut f32,
}

impl<const NV: usize> SimdKernel for Softmax<'_, NV> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let changes_scores = !self.mask_and_bias.is_identity();
        // SAFETY: by the contract of the type, `scores` has NV vectors for each step, and `m`, `l` and `rescale` have
        // NV.
        unsafe {
            if changes_scores {
                self.mask_and_bias.apply(simd, self.scores, NV);
            }
            let mut row_max =
                if changes_scores || !self.row_max_known { self.row_max(simd) } else { self.load_row_max(simd) };
            if self.rows < S::LANES {
                // Not a closure, which would be compiled without the vector instructions.
                for row_max in &mut row_max {
                    *row_max = max_over_keys(simd, *row_max, self.rows);
                }
            }
            self.exponentials(simd, row_max);
        }
    }
}

impl<const NV: usize> Softmax<'_, NV> {
    /// Vector `v` of step `step`.
    #[inline(always)]
    fn at<S: Simd>(&self, _: S, step: usize, v: usize) -> *mut f32 {
        self.scores.wrapping_add((step * NV + v) * S::LANES)
    }

    /// The largest score of each lane.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn row_max<S: Simd>(&self, simd: S) -> [S::V; NV] {
        let mut row_max = [simd.splat(f32::NEG_INFINITY); NV];
        for step in 0..self.mask_and_bias.positions.steps {
            for (v, row_max) in row_max.iter_mut().enumerate() {
                // SAFETY: step < steps and v < NV, so this is one of the vectors of `scores`.
                let s = unsafe { simd.load(self.at(simd, step, v)) };
                // The score comes first: `max` then ignores a NaN, which reaches the result through its own
                // exponential.
                *row_max = simd.max(s, *row_max);
            }
        }
        row_max
    }

    /// The largest score of each lane, where `rescale` holds it.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn load_row_max<S: Simd>(&self, simd: S) -> [S::V; NV] {
        let mut row_max = [simd.splat(0.0); NV];
        for (v, row_max) in row_max.iter_mut().enumerate() {
            // SAFETY: `rescale` has NV vectors, and v < NV.
            *row_max = unsafe { simd.load(self.rescale.add(v * S::LANES)) };
        }
        row_max
    }

    /// Update m, l and `rescale`, and turn scores into p, given the largest score of each lane.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn exponentials<S: Simd>(&self, simd: S, row_max: [S::V; NV]) {
        let (zero, c) = (simd.splat(0.0), simd.splat(self.mask_and_bias.transform.softmax_scale_log2));
        let (mut minus_m, mut sums) = ([zero; NV], [zero; NV]);
        for v in 0..NV {
            let [m, l, rescale] = [self.m, self.l, self.rescale].map(|x| x.wrapping_add(v * S::LANES));
            // SAFETY: m, l and `rescale` have NV vectors, and v < NV.
            unsafe {
                let old = simd.load(m);
                let new = simd.max(simd.mul(row_max[v], c), old);
                let reference = finite_or_zero(simd, new);
                let factor = exp2(simd, simd.sub(old, reference));
                minus_m[v] = simd.sub(zero, reference);
                sums[v] = simd.mul(simd.load(l), factor);
                simd.store(m, new);
                simd.store(rescale, factor);
            }
        }
        for group in 0..self.mask_and_bias.positions.steps / S::ELEMENTS_PER_LANE {
            for v in 0..NV {
                let mut p = [zero; MAX_ELEMENTS_PER_LANE];
                for (i, p) in p[..S::ELEMENTS_PER_LANE].iter_mut().enumerate() {
                    // SAFETY: the step is below `steps` and v < NV, so this is one of the vectors of `scores`.
                    let score = unsafe { simd.load(self.at(simd, group * S::ELEMENTS_PER_LANE + i, v)) };
                    *p = exp2(simd, simd.fma(score, c, minus_m[v]));
                    sums[v] = simd.add(sums[v], *p);
                    if let Some(scales) = self.mask_and_bias.scales {
                        // SAFETY: the scales were loaded for the steps of the scores.
                        *p = unsafe { scales.weigh(simd, group * S::ELEMENTS_PER_LANE + i, *p) };
                    }
                }
                let packed = if S::ELEMENTS_PER_LANE == 1 { p[0] } else { simd.pack_pairs(p[0], p[1]) };
                // SAFETY: group <= step, so this is a vector of `scores` whose scores have been read, in this group or
                // before.
                unsafe { simd.store(self.at(simd, group, v), packed) };
            }
        }
        for (v, sum) in sums.into_iter().enumerate() {
            // SAFETY: l has NV vectors, and v < NV.
            unsafe { simd.store(self.l.wrapping_add(v * S::LANES), sum) }
        }
    }
}

/// In each lane the largest of all lanes that are a multiple of `rows` apart: the maximum over the keys of a row.
#[inline(always)]
fn max_over_keys<S: Simd>(simd: S, mut x: S::V, rows: usize) -> S::V {
    let mut by = rows;
    while by < S::LANES {
        x = simd.max(x, simd.rotate(x, by));
        by *= 2;
    }
    x
}

/// The factors that bring o of two states to their common m. The first state's m becomes the common one, its l the sum
/// of both.
///
/// # Safety
/// All four are vectors of LANES elements; those of the first state are writable.
#[inline(always)]
pub(super) unsafe fn merge_scales<S: Simd>(
    simd: S,
    (m, l): (*mut f32, *mut f32),
    (other_m, other_l): (*const f32, *const f32),
) -> (S::V, S::V) {
    // SAFETY: the caller guarantees the four vectors.
    unsafe {
        let (a, b) = (simd.load(m), simd.load(other_m));
        let new = simd.max(a, b);
        let reference = finite_or_zero(simd, new);
        let (scale, other_scale) = (exp2(simd, simd.sub(a, reference)), exp2(simd, simd.sub(b, reference)));
        simd.store(m, new);
        simd.store(l, simd.fma(simd.load(other_l), other_scale, simd.mul(simd.load(l), scale)));
        (scale, other_scale)
    }
}

/// m, or 0 where it is -inf because no key was visible: it is subtracted, and -inf - -inf would be NaN.
#[inline(always)]
fn finite_or_zero<S: Simd>(simd: S, m: S::V) -> S::V {
    simd.select_lt(simd.splat(f32::NEG_INFINITY), m, m, simd.splat(0.0))
}
