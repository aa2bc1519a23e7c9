//! What the operators mean (`docs/semantics.md`), in f64 and without any thought of speed.
//!
//! [`attend`] is the definition, [`attend_naively`] the measure of what a kernel may be off by; `answers` applies both
//! to whole calls.

use super::{Array, BF16, Dtype, F8E4M3FN, F16, F32, KvGeometry, Numbers};
use half::{bf16, f16};
use std::ops::Range;

/// Which keys a query sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mask {
    /// `window_right` is 0, whatever it says.
    pub causal: bool,
    /// Keys that a query sees before its own position; negative is all of them.
    pub window_left: i64,
    /// Keys that a query sees after its own position; negative is all of them.
    pub window_right: i64,
    /// The first query stands at the first key, not the last at the last.
    pub top_left: bool,
}

impl Mask {
    /// No limit, and limits on each side that leave out whole blocks of keys and parts of them.
    pub const BEYOND_BLOCKS: [Self; 6] = [
        Self::FULL,
        Self::CAUSAL,
        Self::window(20, -1),
        Self::window(-1, 130),
        Self::window(70, 3),
        Self { window_left: 140, ..Self::CAUSAL },
    ];

    pub const FULL: Self = Self { causal: false, window_left: -1, window_right: -1, top_left: false };
    pub const CAUSAL: Self = Self { causal: true, ..Self::FULL };

    /// This many keys before and after a query's own position.
    pub const fn window(left: i64, right: i64) -> Self {
        Self { window_left: left, window_right: right, ..Self::FULL }
    }

    /// Causal, and no more than the `keys` last ones.
    pub const fn sliding(keys: i64) -> Self {
        Self { window_left: keys - 1, ..Self::CAUSAL }
    }

    /// The same, aligned at the first key.
    pub const fn top_left(self) -> Self {
        Self { top_left: true, ..self }
    }

    /// Where query row `i` stands among the keys.
    pub fn position(self, i: usize, len_q: usize, len_k: usize) -> i64 {
        i as i64 + if self.top_left { 0 } else { len_k as i64 - len_q as i64 }
    }

    /// The keys that query row `i` sees.
    pub fn visible(self, i: usize, len_q: usize, len_k: usize, leftpad: usize) -> Range<usize> {
        let position = self.position(i, len_q, len_k);
        let right = if self.causal { 0 } else { self.window_right };
        let first = if self.window_left < 0 { 0 } else { position.saturating_sub(self.window_left) };
        let last = if right < 0 { i64::MAX } else { position.saturating_add(right) };
        let first = first.max(leftpad as i64).min(len_k as i64);
        let end = last.saturating_add(1).min(len_k as i64).max(first);
        first as usize..end as usize
    }
}

/// How the scores of one query head of one sequence are made.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    /// Multiply q·k.
    pub scales: [f32; 3],
    /// 0 is off.
    pub softcap: f32,
    /// Of the linear bias, if there is one.
    pub slope: Option<f32>,
    /// The logit of one more column whose value is 0, if there is one.
    pub sink: Option<f32>,
    /// Multiplies the output.
    pub v_scale: f32,
    pub mask: Mask,
}

impl Score {
    /// All its numbers are finite; a sink of -inf is no column.
    pub fn is_finite(&self) -> bool {
        let numbers = [self.scales[0], self.scales[1], self.scales[2], self.v_scale, self.slope.unwrap_or(0.0)];
        let sink = self.sink.unwrap_or(0.0);
        numbers.iter().all(|x| x.is_finite()) && (sink.is_finite() || sink == f32::NEG_INFINITY)
    }
}

/// Row i, or that of key i.
pub type RowOf<'a> = Box<dyn Fn(usize) -> &'a [f64] + 'a>;

/// One query head of one sequence, and the keys and values of its KV head.
pub struct Head<'a> {
    pub len_q: usize,
    pub len_k: usize,
    pub leftpad: usize,
    /// D, Dv
    pub dims: [usize; 2],
    /// `[D]`
    pub query: RowOf<'a>,
    /// `[D]`
    pub key: RowOf<'a>,
    /// `[Dv]`
    pub value: RowOf<'a>,
}

impl Head<'_> {
    pub(super) fn visible(&self, mask: Mask, i: usize) -> Range<usize> {
        mask.visible(i, self.len_q, self.len_k, self.leftpad)
    }

    /// From the position of query `i` to key `j`.
    pub(super) fn distance(&self, mask: Mask, i: usize, j: usize) -> f64 {
        (mask.position(i, self.len_q, self.len_k) - j as i64).abs() as f64
    }
}

/// The answer for one query row of one head.
#[derive(Clone, PartialEq, Debug)]
pub struct AttentionRow {
    /// `[Dv]`
    pub out: Vec<f64>,
    pub lse: f64,
    /// It sees a key; otherwise `out` is 0 whatever else.
    pub sees_a_key: bool,
}

impl AttentionRow {
    /// A row that sees no key, or that belongs to no sequence and so has no sink either.
    pub fn of_nothing(value_dim: usize, sink: Option<f32>) -> Self {
        Self { out: vec![0.0; value_dim], lse: sink.map_or(f64::NEG_INFINITY, f64::from), sees_a_key: false }
    }
}

/// In eight partial sums, which a compiler can add at a time.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        sums.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
    }
    sums.iter().sum()
}

/// One after the other: the measure of what a kernel may be off by.
pub(super) fn dot_in_f32(a: &[f64], b: &[f64]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + *a as f32 * *b as f32)
}

/// Attention of one query row, exactly.
pub fn attend(head: &Head, i: usize, score: &Score) -> AttentionRow {
    let visible = head.visible(score.mask, i);
    if visible.is_empty() {
        return AttentionRow::of_nothing(head.dims[1], score.sink);
    }
    let scale: f64 = score.scales.map(f64::from).iter().product();
    let cap = f64::from(score.softcap);
    let scores: Vec<f64> = visible
        .clone()
        .map(|j| {
            let s = scale * dot((head.query)(i), (head.key)(j));
            let s = if cap > 0.0 { cap * (s / cap).tanh() } else { s };
            score.slope.map_or(s, |slope| s - f64::from(slope) * head.distance(score.mask, i, j))
        })
        .collect();
    let sink = score.sink.map_or(f64::NEG_INFINITY, f64::from);
    let largest = scores.iter().copied().fold(sink, f64::max);
    let denominator: f64 = scores.iter().map(|s| (s - largest).exp()).sum::<f64>() + (sink - largest).exp();
    let mut out = vec![0.0; head.dims[1]];
    for (j, s) in visible.zip(&scores) {
        let p = f64::from(score.v_scale) * (s - largest).exp() / denominator;
        for (o, v) in out.iter_mut().zip((head.value)(j)) {
            *o += p * v;
        }
    }
    AttentionRow { out, lse: largest + denominator.ln(), sees_a_key: true }
}

/// The largest sum of the magnitudes of a visible key's products with the query, by the scales.
pub fn largest_magnitude(head: &Head, i: usize, score: &Score) -> f64 {
    let scale: f64 = score.scales.map(f64::from).iter().product();
    let magnitude = |j| (head.query)(i).iter().zip((head.key)(j)).map(|(a, b)| (a * b).abs()).sum::<f64>();
    head.visible(score.mask, i).map(magnitude).fold(0.0, f64::max) * scale.abs()
}

/// The same formula as somebody would write it with arrays of `dtype`: products accumulated in f32, every intermediate
/// array rounded to `dtype`, the softmax in f32. Its distance from [`attend`] is the measure of what a kernel may be
/// off by. Where its numbers overflow it measures nothing, and the intermediate arrays are taken in f32.
pub fn attend_naively(head: &Head, i: usize, score: &Score, dtype: Dtype) -> AttentionRow {
    attend_weighing(head, i, score, dtype, |x| x)
}

/// The same with products of fp8: V's rows are multiplied by weights that are fp8 too, the largest one 2^8.
pub fn attend_naively_in_fp8(head: &Head, i: usize, score: &Score, dtype: Dtype) -> AttentionRow {
    attend_weighing(head, i, score, dtype, |x| F8E4M3FN.round(f64::from(256.0 * x)) as f32 / 256.0)
}

/// `weigh` is what becomes of a weight beside one of 1.
fn attend_weighing(head: &Head, i: usize, score: &Score, dtype: Dtype, weigh: impl Fn(f32) -> f32) -> AttentionRow {
    let round = |x: f32| match dtype {
        F16 => f16::from_f32(x).to_f32(),
        BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    };
    let naive = attend_rounding(head, i, score, round, &weigh);
    if naive.out.iter().all(|x| x.is_finite()) {
        return naive;
    }
    let AttentionRow { out, lse, sees_a_key } = attend_rounding(head, i, score, |x| x, &weigh);
    AttentionRow { out: out.into_iter().map(|x| f64::from(round(x as f32))).collect(), lse, sees_a_key }
}

/// [`attend_weighing`] with what becomes of an intermediate number.
fn attend_rounding(
    head: &Head,
    i: usize,
    score: &Score,
    round: impl Fn(f32) -> f32,
    weigh: &impl Fn(f32) -> f32,
) -> AttentionRow {
    let visible = head.visible(score.mask, i);
    if visible.is_empty() {
        return AttentionRow::of_nothing(head.dims[1], score.sink);
    }
    let scale: f32 = score.scales.iter().product();
    let cap = score.softcap;
    let scores: Vec<f32> = visible
        .clone()
        .map(|j| {
            let s = round(scale * round(dot_in_f32((head.query)(i), (head.key)(j))));
            let s = if cap > 0.0 { round(cap * round((s / cap).tanh())) } else { s };
            score.slope.map_or(s, |slope| round(s - round(slope * head.distance(score.mask, i, j) as f32)))
        })
        .collect();
    let sink = score.sink.unwrap_or(f32::NEG_INFINITY);
    let largest = scores.iter().copied().fold(sink, f32::max);
    let denominator: f32 = scores.iter().map(|s| (s - largest).exp()).sum::<f32>() + (sink - largest).exp();
    let mut out = vec![0.0f32; head.dims[1]];
    for (j, s) in visible.zip(&scores) {
        let p = round(weigh((s - largest).exp()) / denominator);
        for (o, v) in out.iter_mut().zip((head.value)(j)) {
            *o += p * *v as f32;
        }
    }
    AttentionRow {
        out: out.into_iter().map(|x| f64::from(round(score.v_scale * round(x)))).collect(),
        lse: f64::from(largest + denominator.ln()),
        sees_a_key: true,
    }
}

/// A paged cache after new rows of keys and of values `[T, Hkv, D]`; those whose slot the cache has not are skipped. Rows of the
/// cache's own type and without a scale are copied bit by bit; else what is stored is the quotient, in f32, by the scale of
/// the head, as the cache's type holds it.
pub fn kv_cache_update(
    caches: &[Array],
    kv_geometry: &KvGeometry,
    rows: &[Array; 2],
    slots: &[i64],
    scales: &[Option<Vec<f32>>; 2],
) -> Vec<Array> {
    let mut after = caches.to_vec();
    for (value, (rows, scale)) in rows.iter().zip(scales).enumerate() {
        let (heads, row) = (kv_geometry.kv_heads, kv_geometry.dims[value] * rows.dtype.size());
        for (t, slot) in slots.iter().enumerate().filter_map(|(t, &slot)| Some((t, kv_geometry.slot(slot)?))) {
            for head in 0..heads {
                let new = &rows.bytes[(t * heads + head) * row..][..row];
                let (buffer, at) = kv_geometry.of_slot(value, slot, head);
                let dtype = after[buffer].dtype;
                let stored = if scale.is_none() && rows.dtype == dtype {
                    new.to_vec()
                } else {
                    let divisor = scale.as_ref().map_or(1.0, |scale| f64::from(scale[head % scale.len()]));
                    let numbers = new.chunks_exact(rows.dtype.size()).map(|x| rows.dtype.decode(x));
                    numbers.flat_map(|x| dtype.encode(F32.round(x / divisor))).collect()
                };
                after[buffer].bytes[at * dtype.size()..][..stored.len()].copy_from_slice(&stored);
            }
        }
    }
    after
}
