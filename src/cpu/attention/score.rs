//! From a product q·k to a score.

use super::lanes::Lanes;
use crate::cpu::elementary::tanh;
use crate::cpu::simd::{Simd, SimdKernel};
use crate::problem::Scale;
use crate::problem::attention::Attention;
use std::f32::consts::LOG2_E;

/// A factor of a KV head; 1 without one.
///
/// # Safety
/// The scale's values are readable, `kv_head` is below Hkv.
pub(super) unsafe fn scale_of_head(scale: Option<Scale>, kv_head: usize) -> f32 {
    // SAFETY: one value, or one for each head.
    scale.map_or(1.0, |scale| unsafe { scale.values.add(if scale.per_head { kv_head } else { 0 }).read() })
}

/// How the products of one KV head become scores, without mask and bias.
#[derive(Clone, Copy)]
pub(super) struct ScoreForm {
    /// Multiplies a score, to bring it to base 2; positive, so that the largest score stays the largest
    pub(super) to_base_2: f32,
    /// What makes a score of a product, where that is not the product itself.
    pub(super) modified: Option<Modified>,
}

/// `scale`, then `cap`.
#[derive(Clone, Copy)]
pub(super) struct Modified {
    scale: f32,
    /// `scale` holds the division by it already; 0 is off
    cap: f32,
}

impl ScoreForm {
    /// The scale alone is left to `to_base_2`, which saves a multiplication; where something is to be done between the
    /// scale and the softmax, or the scale does not keep the order of the products, it is applied first.
    ///
    /// # Safety
    /// The problem's scales are readable, `kv_head` is below Hkv.
    pub(super) unsafe fn of_head(problem: &Attention, kv_head: usize) -> Self {
        let score = &problem.score;
        // SAFETY: the caller's word.
        let (q_scale, k_scale) =
            unsafe { (scale_of_head(score.q_scale, kv_head), scale_of_head(score.k_scale, kv_head)) };
        let scale = f64::from(score.softmax_scale) * f64::from(q_scale) * f64::from(k_scale);
        let to_base_2 = (scale * std::f64::consts::LOG2_E) as f32;
        let cap = score.softcap;
        if cap > 0.0 {
            return Self {
                to_base_2: LOG2_E,
                modified: Some(Modified { scale: (scale / f64::from(cap)) as f32, cap }),
            };
        }
        if score.alibi.is_some() || !(to_base_2.is_normal() && to_base_2 > 0.0) {
            return Self { to_base_2: LOG2_E, modified: Some(Modified { scale: scale as f32, cap }) };
        }
        Self { to_base_2, modified: None }
    }
}

impl Modified {
    /// The scores of a vector of products.
    #[inline(always)]
    pub(super) fn scores<S: Simd>(self, simd: S, products: S::V) -> S::V {
        let s = simd.mul(products, simd.splat(self.scale));
        if self.cap > 0.0 { simd.mul(tanh(simd, s), simd.splat(self.cap)) } else { s }
    }
}

/// Positions of the keys of a block, relative to the block's first; a lane's key stands a little further on, which its
/// own numbers account for.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    pub(super) count: usize,
    pub(super) first: usize,
    /// Steps whose keys alternate: theirs begin at neighbouring positions.
    pub(super) alternating: usize,
    /// From a step to the next that does not alternate with it.
    pub(super) stride: usize,
}

impl Steps {
    #[inline(always)]
    pub(super) fn position(&self, step: usize) -> f32 {
        (self.first + step / self.alternating * self.stride + step % self.alternating) as f32
    }
}

/// What happens to the scores of a block between the product and the softmax.
#[derive(Clone, Copy)]
pub(super) struct Edits<'a> {
    pub(super) form: ScoreForm,
    pub(super) steps: Steps,
    /// Of the item, of which these scores have those from `lane` on.
    pub(super) lanes: &'a Lanes,
    pub(super) lane: usize,
    /// Index of the KV head among the item's.
    pub(super) head: usize,
    /// Position of the block's first key
    pub(super) first: usize,
    /// Some lane does not see all of the keys.
    pub(super) masked: bool,
}

impl Edits<'_> {
    /// Nothing does: scores are products.
    #[inline(always)]
    pub(super) fn are_none(&self) -> bool {
        // A bias comes with a modified form.
        self.form.modified.is_none() && !self.masked
    }

    /// Make scores of products, in place, and hide what is not seen.
    ///
    /// # Safety
    /// `scores` has `steps.count * vectors` vectors of the lanes' instruction set.
    #[inline(always)]
    pub(super) unsafe fn apply<S: Simd>(self, simd: S, scores: *mut f32, vectors: usize) {
        // SAFETY: the scores are those of this function's contract.
        unsafe { simd.vectorize(EditScores { edits: self, scores, vectors }) };
    }
}

/// # Safety
/// As [`Edits::apply`].
struct EditScores<'a> {
    edits: Edits<'a>,
    scores: *mut f32,
    vectors: usize,
}

impl SimdKernel for EditScores<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Edits { form, steps, lanes, head, first, masked, .. } = self.edits;
        let hidden = simd.splat(f32::NEG_INFINITY);
        for v in 0..self.vectors {
            let lane = self.edits.lane + v * S::LANES;
            let bias = lanes.bias(simd, head, lane, first);
            let (low, high) = lanes.visible(simd, lane, first);
            for step in 0..steps.count {
                let at = self.scores.wrapping_add((step * self.vectors + v) * S::LANES);
                // SAFETY: vector (step, v).
                let mut s = unsafe { simd.load(at) };
                if let Some(modified) = form.modified {
                    s = modified.scores(simd, s);
                }
                let j = simd.splat(steps.position(step));
                if let Some((position, slope)) = bias {
                    let distance = simd.sub(position, j);
                    let distance = simd.max(distance, simd.sub(simd.splat(0.0), distance));
                    s = simd.sub(s, simd.mul(slope, distance));
                }
                if masked {
                    s = simd.select_lt(j, high, s, hidden);
                    s = simd.select_lt(j, low, hidden, s);
                }
                // SAFETY: the vector that was read.
                unsafe { simd.store(at, s) };
            }
        }
    }
}
