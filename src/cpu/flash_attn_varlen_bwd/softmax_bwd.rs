//! The backward of the softmax for a block of keys and a micro-panel of query rows: from the products S = q . k and
//! dP = dout . v to the probabilities P and to dS, the gradients of the scores.

use super::query_panel::BwdLanes;
use crate::cpu::attention::score::ScaleAndCap;
use crate::cpu::elementary::{exp2, tanh};
use crate::cpu::simd::{Simd, SimdKernel};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// A bound of the argument of `exp2`, below its limit of 127.5. With the lse of these very scores no argument exceeds
/// 0.
const MAX_EXPONENT: f32 = 127.0;

/// Turn products, `[keys][NV]` vectors of rows, into P and dS in place; dS is taken before the factor `softmax_scale`.
/// Both are 0 where a row does not attend to a key.
///
/// Where [`Simd::ELEMENTS_PER_LANE`] is 2, P and dS are rounded to bf16, as operands of the products to come: a key's
/// rows are pairs in the first half of its vectors, and dS is also interleaved, with pairs of keys.
///
/// # Safety
/// `p` and `ds` have NV vectors for each of `keys`; NV vectors are the width of `lanes`. Where pairs are multiplied,
/// `ds_interleaved` has NV vectors for every two keys, and `keys` begin and end at even numbers. The bias of the lanes is
/// readable.
pub(super) struct SoftmaxBwd<'a, const NV: usize> {
    /// `q . k`, then P.
    pub(super) p: *mut f32,
    /// `dout . v`, then dS.
    pub(super) ds: *mut f32,
    /// dS for bf16 pairs, `[keys / 2][NV]` vectors; not written with one f32 per lane.
    pub(super) ds_interleaved: *mut f32,
    /// The keys to compute, relative to the block.
    pub(super) keys: Range<usize>,
    /// Position of the block's first key in the sequence.
    pub(super) first: usize,
    pub(super) lanes: &'a BwdLanes,
    pub(super) scale_and_cap: ScaleAndCap,
    /// dS is the gradient of what is added after the soft cap, the bias, instead of the gradient of the scores before it.
    pub(super) after_cap: bool,
}

impl<const NV: usize> SimdKernel for SoftmaxBwd<'_, NV> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let masked = !self.lanes.visible_to_all(self.first, &self.keys);
        // SAFETY: the contract of the type says that `p` and `ds` have the vectors.
        unsafe {
            match (self.scale_and_cap.cap > 0.0 || self.lanes.has_bias, masked) {
                (false, false) => self.p_and_ds::<S, false, false>(simd),
                (false, true) => self.p_and_ds::<S, false, true>(simd),
                (true, _) => self.p_and_ds::<S, true, true>(simd),
            }
        }
    }
}

impl<const NV: usize> SoftmaxBwd<'_, NV> {
    /// `CAP_OR_BIAS`: there is a soft cap or a bias. `MASKED`: some row does not attend to some key.
    ///
    /// # Safety
    /// As [`SoftmaxBwd`].
    #[inline(always)]
    unsafe fn p_and_ds<S: Simd, const CAP_OR_BIAS: bool, const MASKED: bool>(&self, simd: S) {
        let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
        let limit = simd.splat(MAX_EXPONENT);
        let (scale, cap) = (simd.splat(self.scale_and_cap.scale), simd.splat(self.scale_and_cap.cap));
        let to_base_2 = simd.splat(LOG2_E);
        for v in 0..NV {
            let lanes = self.lanes.vectors(simd, v, self.first);
            let mut ds_of_even_key = zero;
            for j in self.keys.clone() {
                let at = (j * NV + v) * S::LANES;
                // SAFETY: v < NV, and j is one of the keys for which `p` and `ds` have vectors.
                let (mut s, dp) = unsafe { (simd.load(self.p.add(at)), simd.load(self.ds.add(at))) };
                let position = simd.splat(j as f32);
                let mut tanh_derivative = one;
                if CAP_OR_BIAS {
                    s = simd.mul(s, scale);
                    if self.scale_and_cap.cap > 0.0 {
                        let t = tanh(simd, s);
                        s = simd.mul(t, cap);
                        tanh_derivative = simd.fma(simd.sub(zero, t), t, one);
                    }
                    let distance = simd.sub(lanes.position, position);
                    let distance = simd.max(distance, simd.sub(zero, distance));
                    s = simd.sub(s, simd.mul(lanes.slope, distance));
                    if self.lanes.has_bias_rows {
                        // SAFETY: the contract of the type.
                        s = simd.add(s, unsafe { self.lanes.bias(simd, v, self.first + j) });
                    }
                }
                // The factor log2(e) is not folded into the scale: rounded otherwise than the scale of the lse, it
                // would shift all probabilities of a row with large scores.
                let exponent =
                    if CAP_OR_BIAS { simd.add(s, lanes.minus_lse) } else { simd.fma(s, scale, lanes.minus_lse) };
                let exponent = simd.mul(exponent, to_base_2);
                let mut p = exp2(simd, simd.select_lt(limit, exponent, limit, exponent));
                let mut ds = simd.mul(p, simd.sub(dp, lanes.delta));
                if CAP_OR_BIAS && !self.after_cap {
                    ds = simd.mul(ds, tanh_derivative);
                }
                if MASKED {
                    for x in [&mut p, &mut ds] {
                        *x = simd.select_lt(position, lanes.high, *x, zero);
                        *x = simd.select_lt(position, lanes.low, zero, *x);
                    }
                }
                // SAFETY: the vectors that were loaded above; LANES bf16 are half of one. The first half of key j's
                // vectors is that of vector 0 where NV is 1; where it is 2, it is vector 0, which has been read before
                // vector 1 is written there. Keys j - 1 and j have their vectors in `ds_interleaved`.
                unsafe {
                    if S::ELEMENTS_PER_LANE == 1 {
                        simd.store(self.p.add(at), p);
                        simd.store(self.ds.add(at), ds);
                        continue;
                    }
                    let row = j * NV * S::LANES;
                    simd.store_bf16(self.p.add(row).cast::<u16>().add(v * S::LANES), p);
                    simd.store_bf16(self.ds.add(row).cast::<u16>().add(v * S::LANES), ds);
                    if j % 2 == 0 {
                        ds_of_even_key = ds;
                    } else {
                        let to = self.ds_interleaved.add((j / 2 * NV + v) * S::LANES);
                        simd.store(to, simd.pack_pairs(ds_of_even_key, ds));
                    }
                }
            }
        }
    }
}
