//! From the products of a block of keys with a panel of rows to the weights and the gradients of the scores.

use super::panel::Lanes;
use crate::cpu::elementary::{exp2, tanh};
use crate::cpu::simd::{Simd, SimdKernel};
use crate::problem::attention::Score;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The largest exponent that `exp2` takes, less a little: with the lse of these scores there is none above 0.
const LARGEST: f32 = 127.0;

/// How a product q·k becomes a score.
#[derive(Clone, Copy)]
pub(super) struct Form {
    /// Of the score, or of what the cap takes.
    scale: f32,
    /// 0 is off
    cap: f32,
}

impl Form {
    pub(super) fn of(score: &Score) -> Self {
        let (scale, cap) = (f64::from(score.softmax_scale), score.softcap);
        Self { scale: if cap > 0.0 { scale / f64::from(cap) } else { scale } as f32, cap }
    }
}

/// Products `[keys][NV]` of vectors of rows become, in place, the weights p and `ds`, the gradients of the scores before
/// `softmax_scale`; both are 0 where a row does not see a key.
///
/// # Safety
/// `p` and `ds` have NV vectors for each of `keys`, as many as the lanes in use.
pub(super) struct Weigh<'a, const NV: usize> {
    /// `q . k`, then p
    pub(super) p: *mut f32,
    /// `dout . v`, then ds
    pub(super) ds: *mut f32,
    /// Which of them, relative to the block.
    pub(super) keys: Range<usize>,
    /// Position of the block's first key
    pub(super) first: usize,
    pub(super) lanes: &'a Lanes,
    pub(super) form: Form,
}

impl<const NV: usize> SimdKernel for Weigh<'_, NV> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let masked = !self.lanes.all_see(self.first, &self.keys);
        // SAFETY: what the type requires.
        unsafe {
            match (self.form.cap > 0.0 || self.lanes.biased, masked) {
                (false, false) => self.weigh::<S, false, false>(simd),
                (false, true) => self.weigh::<S, false, true>(simd),
                (true, _) => self.weigh::<S, true, true>(simd),
            }
        }
    }
}

impl<const NV: usize> Weigh<'_, NV> {
    /// # Safety
    /// As [`Weigh`].
    #[inline(always)]
    unsafe fn weigh<S: Simd, const MODIFIED: bool, const MASKED: bool>(&self, simd: S) {
        let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
        let limit = simd.splat(LARGEST);
        let (scale, cap) = (simd.splat(self.form.scale), simd.splat(self.form.cap));
        let to_base_2 = simd.splat(LOG2_E);
        for v in 0..NV {
            let of_lanes = self.lanes.vector(simd, v, self.first);
            for j in self.keys.clone() {
                let at = (j * NV + v) * S::LANES;
                // SAFETY: vector v < NV of one of the keys.
                let (mut s, dp) = unsafe { (simd.load(self.p.add(at)), simd.load(self.ds.add(at))) };
                let position = simd.splat(j as f32);
                let mut slope_of_cap = one;
                if MODIFIED {
                    s = simd.mul(s, scale);
                    if self.form.cap > 0.0 {
                        let t = tanh(simd, s);
                        s = simd.mul(t, cap);
                        slope_of_cap = simd.fma(simd.sub(zero, t), t, one);
                    }
                    let distance = simd.sub(of_lanes.position, position);
                    let distance = simd.max(distance, simd.sub(zero, distance));
                    s = simd.sub(s, simd.mul(of_lanes.slope, distance));
                }
                // The scale is not brought to base 2: with another rounding than that of the lse it would shift all
                // weights of a row whose scores are large.
                let exponent =
                    if MODIFIED { simd.add(s, of_lanes.minus_lse) } else { simd.fma(s, scale, of_lanes.minus_lse) };
                let exponent = simd.mul(exponent, to_base_2);
                let mut p = exp2(simd, simd.select_lt(limit, exponent, limit, exponent));
                let mut ds = simd.mul(p, simd.sub(dp, of_lanes.delta));
                if MODIFIED {
                    ds = simd.mul(ds, slope_of_cap);
                }
                if MASKED {
                    for x in [&mut p, &mut ds] {
                        *x = simd.select_lt(position, of_lanes.high, *x, zero);
                        *x = simd.select_lt(position, of_lanes.low, zero, *x);
                    }
                }
                // SAFETY: the vectors that were read.
                unsafe {
                    simd.store(self.p.add(at), p);
                    simd.store(self.ds.add(at), ds);
                }
            }
        }
    }
}
