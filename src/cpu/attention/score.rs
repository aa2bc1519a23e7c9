//! From a product q·k to the score that the softmax takes: logits transform, bias, mask.

use super::key_scales::KeyScales;
use super::lanes::FwdLanes;
use crate::cpu::elementary::tanh;
use crate::cpu::simd::{Simd, SimdKernel};
use crate::problem::Scale;
use crate::problem::attention::Attention;
use std::f32::consts::LOG2_E;

/// The scale of a KV head; 1 if there is none.
///
/// # Safety
/// The scale's values are readable, `kv_head` is below Hkv.
pub(super) unsafe fn scale_of_head(scale: Option<Scale>, kv_head: usize) -> f32 {
    // SAFETY: a scale has Hkv values if it is per head, and one otherwise.
    scale.map_or(1.0, |scale| unsafe { scale.values.add(if scale.per_head { kv_head } else { 0 }).read() })
}

/// How the products of one KV head become logits: FlashInfer's `LogitsTransform`.
#[derive(Clone, Copy)]
pub(super) struct LogitsTransform {
    /// Factor that brings a logit to base 2; positive, so that the largest logit stays the largest.
    pub(super) softmax_scale_log2: f32,
    /// What turns a product into a logit; `None` where the product is the logit.
    pub(super) scale_and_cap: Option<ScaleAndCap>,
}

/// `softcap * tanh(x * softmax_scale / softcap)`, or `x * softmax_scale` without a soft cap.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct ScaleAndCap {
    /// The factor of x: with a soft cap it includes the division by it.
    pub(in crate::cpu) scale: f32,
    /// The soft cap; 0 is off.
    pub(in crate::cpu) cap: f32,
}

impl ScaleAndCap {
    pub(in crate::cpu) fn new(softmax_scale: f64, cap: f32) -> Self {
        Self { scale: if cap > 0.0 { softmax_scale / f64::from(cap) } else { softmax_scale } as f32, cap }
    }

    /// The logits of a vector of products.
    #[inline(always)]
    pub(super) fn logits<S: Simd>(self, simd: S, products: S::V) -> S::V {
        let s = simd.mul(products, simd.splat(self.scale));
        if self.cap > 0.0 { simd.mul(tanh(simd, s), simd.splat(self.cap)) } else { s }
    }
}

impl LogitsTransform {
    /// Usually the scale is folded into `softmax_scale_log2`, which saves a multiplication per score. It is applied to
    /// the products first if a soft cap or a bias follows it, or if it would not keep the order of the products.
    ///
    /// # Safety
    /// The problem's scales are readable, `kv_head` is below Hkv.
    pub(super) unsafe fn of_head(problem: &Attention, kv_head: usize) -> Self {
        let score = &problem.score;
        // SAFETY: the caller guarantees readable scales and kv_head < Hkv.
        let (q_scale, k_scale) =
            unsafe { (scale_of_head(score.q_scale, kv_head), scale_of_head(score.k_scale, kv_head)) };
        let scale = f64::from(score.softmax_scale) * f64::from(q_scale) * f64::from(k_scale);
        let softmax_scale_log2 = (scale * std::f64::consts::LOG2_E) as f32;
        let keeps_order = softmax_scale_log2.is_normal() && softmax_scale_log2 > 0.0;
        if score.softcap > 0.0 || score.alibi.is_some() || score.bias.is_some() || !keeps_order {
            let scale_and_cap = Some(ScaleAndCap::new(scale, score.softcap));
            return Self { softmax_scale_log2: LOG2_E, scale_and_cap };
        }
        Self { softmax_scale_log2, scale_and_cap: None }
    }
}

/// Key positions of the steps of a block, one vector of scores each, relative to the block's first key. In the GEMV
/// layout this is the key of lane 0; [`FwdLanes`] accounts for the offsets of the other lanes.
#[derive(Clone, Copy)]
pub(super) struct KeyPositions {
    /// Number of steps.
    pub(super) steps: usize,
    /// Position of the first step.
    pub(super) first: usize,
    /// Number of consecutive steps that begin at adjacent keys, whose p share lanes.
    pub(super) alternating: usize,
    /// Distance from each such group of steps to the next.
    pub(super) stride: usize,
}

impl KeyPositions {
    #[inline(always)]
    pub(super) fn of_step(&self, step: usize) -> usize {
        self.first + step / self.alternating * self.stride + step % self.alternating
    }

    /// No key of a step, of any lane, is at this position or after it.
    #[inline(always)]
    pub(super) fn end(&self) -> usize {
        self.first + self.steps.div_ceil(self.alternating) * self.stride
    }
}

/// What happens to the scores of a block between the product and the softmax.
#[derive(Clone, Copy)]
pub(super) struct MaskAndBias<'a> {
    pub(super) transform: LogitsTransform,
    pub(super) positions: KeyPositions,
    /// Scales of the keys of the steps.
    pub(super) scales: Option<KeyScales>,
    /// The lanes of the work tile; the scores are those of lanes from `lane` on.
    pub(super) lanes: &'a FwdLanes,
    pub(super) lane: usize,
    /// Index of the KV head among those of the work tile.
    pub(super) head: usize,
    /// Position of the block's first key in the sequence.
    pub(super) first: usize,
    /// Whether some lane does not attend to all of the keys.
    pub(super) masked: bool,
}

impl MaskAndBias<'_> {
    /// Whether the scores are the products themselves.
    #[inline(always)]
    pub(super) fn is_identity(&self) -> bool {
        // There is no bias either: with a bias the scale is applied first.
        self.transform.scale_and_cap.is_none() && !self.masked && self.scales.is_none()
    }

    /// Turn products into scores, in place; scores of masked keys become -inf.
    ///
    /// # Safety
    /// `scores` has `positions.steps * vectors` vectors of the instruction set that `lanes` were made for; a bias is
    /// readable.
    #[inline(always)]
    pub(super) unsafe fn apply<S: Simd>(self, simd: S, scores: *mut f32, vectors: usize) {
        // SAFETY: the caller guarantees the vectors that `ApplyMaskAndBias` requires.
        unsafe { simd.vectorize(ApplyMaskAndBias { mask_and_bias: self, scores, vectors }) };
    }
}

/// # Safety
/// As [`MaskAndBias::apply`].
struct ApplyMaskAndBias<'a> {
    mask_and_bias: MaskAndBias<'a>,
    scores: *mut f32,
    vectors: usize,
}

impl SimdKernel for ApplyMaskAndBias<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let MaskAndBias { transform, positions, scales, lanes, head, first, masked, .. } = self.mask_and_bias;
        let hidden = simd.splat(f32::NEG_INFINITY);
        for v in 0..self.vectors {
            let lane = self.mask_and_bias.lane + v * S::LANES;
            let bias = lanes.bias(simd, head, lane, first);
            let bias_rows = lanes.bias_rows(simd, head, lane);
            let (low, high) = lanes.visible_bounds(simd, lane, first);
            for step in 0..positions.steps {
                let at = self.scores.wrapping_add((step * self.vectors + v) * S::LANES);
                // SAFETY: step < steps and v < vectors, so `at` is one of the vectors of `scores`.
                let mut s = unsafe { simd.load(at) };
                if let Some(scales) = scales {
                    // SAFETY: the scales were loaded for these steps.
                    s = simd.mul(s, unsafe { scales.k(simd, step) });
                }
                if let Some(scale_and_cap) = transform.scale_and_cap {
                    s = scale_and_cap.logits(simd, s);
                }
                let key = positions.of_step(step);
                let j = simd.splat(key as f32);
                if let Some((position, slope)) = bias {
                    let distance = simd.sub(position, j);
                    let distance = simd.max(distance, simd.sub(simd.splat(0.0), distance));
                    s = simd.sub(s, simd.mul(slope, distance));
                }
                if let Some(bias_rows) = bias_rows {
                    // SAFETY: the caller guarantees a readable bias.
                    s = simd.add(s, unsafe { bias_rows.at(simd, first + key) });
                }
                if masked {
                    s = simd.select_lt(j, high, s, hidden);
                    s = simd.select_lt(j, low, hidden, s);
                }
                // SAFETY: the vector that was loaded above.
                unsafe { simd.store(at, s) };
            }
            if masked && lanes.has_tree_before(first + positions.end()) {
                for step in 0..positions.steps {
                    let key = first + positions.of_step(step);
                    for i in (0..S::LANES).filter(|i| lanes.is_hidden_by_tree(lane + i, key)) {
                        // SAFETY: one of the vectors of `scores`, as above, which has LANES elements.
                        unsafe { self.scores.add((step * self.vectors + v) * S::LANES + i).write(f32::NEG_INFINITY) };
                    }
                }
            }
        }
    }
}
