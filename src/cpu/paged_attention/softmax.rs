//! One step of the online softmax over a block of scores.
//!
//! A block of scores is `[steps][NV]` vectors. A lane belongs to one query row throughout; from a step to the next the
//! key's position grows by [`Mask::stride`]. All is in base 2: `m` is the largest score times log2(e).

use crate::cpu::elementary::{exp2, tanh};
use crate::cpu::simd::Simd;
use std::f32::consts::LOG2_E;

/// From a product q·k to a score in base 2.
#[derive(Clone, Copy)]
pub(super) struct ScoreForm {
    /// Multiplies what `cap` leaves
    to_base_2: f32,
    /// (scale / softcap, softcap)
    cap: Option<(f32, f32)>,
}

impl ScoreForm {
    pub(super) fn new(scale: f32, soft_cap: f32) -> Self {
        if soft_cap > 0.0 {
            Self { to_base_2: LOG2_E, cap: Some((scale / soft_cap, soft_cap)) }
        } else {
            Self { to_base_2: (f64::from(scale) * std::f64::consts::LOG2_E) as f32, cap: None }
        }
    }
}

/// Which keys a lane sees, in positions relative to the block, where they are exact in f32.
#[derive(Clone, Copy)]
pub(super) struct Mask<V, const NV: usize> {
    /// A lane sees position j if `low <= j < high`
    pub(super) low: [V; NV],
    pub(super) high: [V; NV],
    /// Position of the first step
    pub(super) first: f32,
    /// Positions from a step to the next
    pub(super) stride: f32,
}

/// Cap and mask the scores in place; each lane's largest.
///
/// # Safety
/// `scores` has `steps * NV` vectors.
#[inline(always)]
pub(super) unsafe fn largest<S: Simd, const NV: usize>(
    simd: S,
    scores: *mut f32,
    steps: usize,
    form: ScoreForm,
    mask: Option<Mask<S::V, NV>>,
) -> [S::V; NV] {
    let hidden = simd.splat(f32::NEG_INFINITY);
    let mut largest = [hidden; NV];
    for step in 0..steps {
        for (v, largest) in largest.iter_mut().enumerate() {
            // SAFETY: vector (step, v).
            unsafe {
                let at = scores.add((step * NV + v) * S::LANES);
                let mut s = simd.load(at);
                if let Some((inner, outer)) = form.cap {
                    s = simd.mul(tanh(simd, simd.mul(s, simd.splat(inner))), simd.splat(outer));
                }
                if let Some(mask) = mask {
                    let j = simd.splat(mask.first + step as f32 * mask.stride);
                    s = simd.select_lt(j, mask.high[v], s, hidden);
                    s = simd.select_lt(j, mask.low[v], hidden, s);
                }
                if form.cap.is_some() || mask.is_some() {
                    simd.store(at, s);
                }
                // NaN first: it must not become the largest, it reaches the result through its own exponential.
                *largest = simd.max(s, *largest);
            }
        }
    }
    largest
}

/// Scores become `p = 2^(s - m)` in place, with m the larger of the old one and `largest`; m and l are brought up to
/// date. Returns what o has to be multiplied with.
///
/// # Safety
/// `scores` has `steps * NV` vectors, `m` and `l` have NV.
#[inline(always)]
pub(super) unsafe fn exponentials<S: Simd, const NV: usize>(
    simd: S,
    scores: *mut f32,
    steps: usize,
    form: ScoreForm,
    largest: [S::V; NV],
    m: *mut f32,
    l: *mut f32,
) -> [S::V; NV] {
    let (zero, c) = (simd.splat(0.0), simd.splat(form.to_base_2));
    let (mut keep, mut minus_m, mut sums) = ([zero; NV], [zero; NV], [zero; NV]);
    for v in 0..NV {
        // SAFETY: vector v of m and l.
        unsafe {
            let old = simd.load(m.add(v * S::LANES));
            let new = simd.max(simd.mul(largest[v], c), old);
            let reference = finite_or_zero(simd, new);
            keep[v] = exp2(simd, simd.sub(old, reference));
            minus_m[v] = simd.sub(zero, reference);
            sums[v] = simd.mul(simd.load(l.add(v * S::LANES)), keep[v]);
            simd.store(m.add(v * S::LANES), new);
        }
    }
    for step in 0..steps {
        for v in 0..NV {
            // SAFETY: vector (step, v).
            unsafe {
                let at = scores.add((step * NV + v) * S::LANES);
                let p = exp2(simd, simd.fma(simd.load(at), c, minus_m[v]));
                simd.store(at, p);
                sums[v] = simd.add(sums[v], p);
            }
        }
    }
    for (v, sum) in sums.into_iter().enumerate() {
        // SAFETY: vector v of l.
        unsafe { simd.store(l.add(v * S::LANES), sum) }
    }
    keep
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
