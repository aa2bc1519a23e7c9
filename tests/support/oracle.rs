//! The reference: what the operators compute (`docs/semantics.md`), in f64.
//!
//! [`attend`] is the definition. The error of [`attend_naively`] is the unit of the allowed error. `expected_rows`
//! applies both to whole calls.

use super::{Array, BF16, Dtype, F8E4M3FN, F16, F32, KvGeometry, Numbers, shown};
use half::{bf16, f16};
use std::ops::Range;

/// The attention mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mask {
    /// Overrides `window_right` with 0.
    pub causal: bool,
    /// Number of keys before its own position that a query attends to; negative for all.
    pub window_left: i64,
    /// Number of keys after its own position that a query attends to; negative for all.
    pub window_right: i64,
    /// The first query is aligned with the first key. Otherwise the last query is aligned with the last key.
    pub top_left: bool,
    /// The position of the first query among the keys, instead of an alignment; the sequence's `q_offset`.
    pub q_offset: Option<i32>,
}

impl Mask {
    /// No mask, and masks that hide whole blocks of keys, and parts of blocks, on either side.
    pub const BEYOND_BLOCKS: [Self; 6] = [
        Self::FULL,
        Self::CAUSAL,
        Self::window(20, -1),
        Self::window(-1, 130),
        Self::window(70, 3),
        Self { window_left: 140, ..Self::CAUSAL },
    ];

    pub const FULL: Self = Self { causal: false, window_left: -1, window_right: -1, top_left: false, q_offset: None };
    pub const CAUSAL: Self = Self { causal: true, ..Self::FULL };

    /// A window of this many keys before and after a query's own position.
    pub const fn window(left: i64, right: i64) -> Self {
        Self { window_left: left, window_right: right, ..Self::FULL }
    }

    /// Causal, limited to the last `keys` keys.
    pub const fn sliding(keys: i64) -> Self {
        Self { window_left: keys - 1, ..Self::CAUSAL }
    }

    /// The same mask, aligned with the first key.
    pub const fn top_left(self) -> Self {
        Self { top_left: true, ..self }
    }

    /// The same mask for a sequence with this `q_offset`.
    pub const fn at(self, q_offset: Option<i32>) -> Self {
        Self { q_offset, ..self }
    }

    /// The position of query row `i` among the keys.
    pub fn position(self, i: usize, len_q: usize, len_k: usize) -> i64 {
        let aligned = if self.top_left { 0 } else { len_k as i64 - len_q as i64 };
        i as i64 + self.q_offset.map_or(aligned, |offset| i64::from(offset).clamp(-(1 << 28), 1 << 28))
    }

    /// The keys that query row `i` attends to.
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

/// The keys of `visible` within a row's entries of `k_start` and `k_end`.
pub fn bounded(visible: Range<usize>, (start, end): (Option<i32>, Option<i32>)) -> Range<usize> {
    let clamped = |bound: i32| bound.max(0) as usize;
    let first = start.map_or(visible.start, |start| clamped(start).clamp(visible.start, visible.end));
    first..end.map_or(visible.end, |end| visible.end.min(clamped(end))).max(first)
}

/// Options of the scores of one query head of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    /// Factors of q·k.
    pub scales: [f32; 3],
    /// 0 means no soft cap.
    pub softcap: f32,
    /// The ALiBi slope.
    pub slope: Option<f32>,
    /// The logit of the attention sink: an additional column whose value is 0.
    pub sink: Option<f32>,
    /// Factor of the output.
    pub v_scale: f32,
    pub mask: Mask,
}

impl Score {
    /// Whether all numbers are finite. A sink of -inf is valid and has no effect.
    pub fn is_finite(&self) -> bool {
        let numbers = [self.scales[0], self.scales[1], self.scales[2], self.v_scale, self.slope.unwrap_or(0.0)];
        let sink = self.sink.unwrap_or(0.0);
        numbers.iter().all(|x| x.is_finite()) && (sink.is_finite() || sink == f32::NEG_INFINITY)
    }
}

/// A function from an index to the row of a query, key or value.
pub type RowOf<'a> = Box<dyn Fn(usize) -> &'a [f64] + 'a>;

/// A function from a query to its entries of `k_start` and `k_end`.
pub type BoundsOf<'a> = Box<dyn Fn(usize) -> (Option<i32>, Option<i32>) + 'a>;

/// Whether a query attends to the key of another one.
pub type TreeOf<'a> = Box<dyn Fn(usize, usize) -> bool + 'a>;
/// A function from a query and a key to their bias.
pub type BiasOf<'a> = Box<dyn Fn(usize, usize) -> f64 + 'a>;

/// The inputs of one query head of one sequence.
pub struct Head<'a> {
    pub len_q: usize,
    pub len_k: usize,
    pub leftpad: usize,
    /// Entries of `k_start` and `k_end` of a query.
    pub bounds: BoundsOf<'a>,
    /// The tree, if the sequence has one.
    pub tree: Option<TreeOf<'a>>,
    pub bias: Option<BiasOf<'a>>,
    /// Whether keys and values are products of codes and scales, which the naive formula rounds to its dtype.
    pub dequantized: bool,
    /// D and Dv.
    pub dims: [usize; 2],
    /// `[D]`.
    pub query: RowOf<'a>,
    /// `[D]`.
    pub key: RowOf<'a>,
    /// `[Dv]`.
    pub value: RowOf<'a>,
}

impl Head<'_> {
    pub(super) fn visible(&self, mask: Mask, i: usize) -> Vec<usize> {
        let mask = if self.tree.is_some() { mask.of_tree() } else { mask };
        let keys = bounded(mask.visible(i, self.len_q, self.len_k, self.leftpad), (self.bounds)(i));
        shown(keys, (self.len_q, self.len_k), |j| self.tree.as_ref().is_none_or(|tree| tree(i, j)))
    }

    /// The distance of query `i` and key `j`.
    pub(super) fn distance(&self, mask: Mask, i: usize, j: usize) -> f64 {
        (mask.position(i, self.len_q, self.len_k) - j as i64).abs() as f64
    }
}

/// The result for one query row of one head.
#[derive(Clone, PartialEq, Debug)]
pub struct AttentionRow {
    /// `[Dv]`.
    pub out: Vec<f64>,
    pub lse: f64,
    /// Whether the row attends to a key. Otherwise `out` is exactly 0.
    pub sees_a_key: bool,
}

impl AttentionRow {
    /// The result for a row that attends to no key. A row of no sequence has no sink either.
    pub fn of_nothing(value_dim: usize, sink: Option<f32>) -> Self {
        Self { out: vec![0.0; value_dim], lse: sink.map_or(f64::NEG_INFINITY, f64::from), sees_a_key: false }
    }
}

/// Dot product in eight partial sums, which the compiler vectorises.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        sums.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
    }
    sums.iter().sum()
}

/// Dot product in f32, summed in order, as the naive formula computes it.
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
        .iter()
        .map(|&j| {
            let s = scale * dot((head.query)(i), (head.key)(j));
            let s = if cap > 0.0 { cap * (s / cap).tanh() } else { s };
            let s = score.slope.map_or(s, |slope| s - f64::from(slope) * head.distance(score.mask, i, j));
            head.bias.as_ref().map_or(s, |bias| s + bias(i, j))
        })
        .collect();
    let sink = score.sink.map_or(f64::NEG_INFINITY, f64::from);
    let largest = scores.iter().copied().fold(sink, f64::max);
    if scores.iter().all(|s| *s == f64::NEG_INFINITY) {
        return AttentionRow::of_nothing(head.dims[1], score.sink);
    }
    let denominator: f64 = scores.iter().map(|s| (s - largest).exp()).sum::<f64>() + (sink - largest).exp();
    let mut out = vec![0.0; head.dims[1]];
    for (j, s) in visible.into_iter().zip(&scores) {
        let p = f64::from(score.v_scale) * (s - largest).exp() / denominator;
        for (o, v) in out.iter_mut().zip((head.value)(j)) {
            *o += p * v;
        }
    }
    AttentionRow { out, lse: largest + denominator.ln(), sees_a_key: true }
}

/// The largest sum of the magnitudes of q·k's terms over the visible keys, times the scales.
pub fn largest_magnitude(head: &Head, i: usize, score: &Score) -> f64 {
    let scale: f64 = score.scales.map(f64::from).iter().product();
    let magnitude = |j| (head.query)(i).iter().zip((head.key)(j)).map(|(a, b)| (a * b).abs()).sum::<f64>();
    head.visible(score.mask, i).into_iter().map(magnitude).fold(0.0, f64::max) * scale.abs()
}

/// The formula in arrays of `dtype`: products accumulate in f32, each intermediate array is rounded to `dtype`, and the
/// softmax is in f32. Its distance from [`attend`] is the unit of the allowed error. If a number overflows, the
/// intermediate arrays are f32 instead.
pub fn attend_naively(head: &Head, i: usize, score: &Score, dtype: Dtype) -> AttentionRow {
    attend_weighing(head, i, score, dtype, |x| x)
}

/// The same with fp8 products: V is multiplied by softmax weights that are rounded to fp8, the largest one being 2^8.
pub fn attend_naively_in_fp8(head: &Head, i: usize, score: &Score, dtype: Dtype) -> AttentionRow {
    attend_weighing(head, i, score, dtype, |x| F8E4M3FN.round(f64::from(256.0 * x)) as f32 / 256.0)
}

/// [`attend_naively`] with a rounding function for the unnormalised softmax weights, the largest of which is 1.
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

/// [`attend_weighing`] with a rounding function for intermediate numbers.
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
    let rounded = |row: &[f64]| row.iter().map(|x| f64::from(round(*x as f32))).collect::<Vec<_>>();
    let scores: Vec<f32> = visible
        .iter()
        .map(|&j| {
            let key = (head.key)(j);
            let key = if head.dequantized { &rounded(key) } else { key };
            let s = round(scale * round(dot_in_f32((head.query)(i), key)));
            let s = if cap > 0.0 { round(cap * round((s / cap).tanh())) } else { s };
            let s = score.slope.map_or(s, |slope| round(s - round(slope * head.distance(score.mask, i, j) as f32)));
            head.bias.as_ref().map_or(s, |bias| round(s + round(bias(i, j) as f32)))
        })
        .collect();
    let sink = score.sink.unwrap_or(f32::NEG_INFINITY);
    let largest = scores.iter().copied().fold(sink, f32::max);
    if scores.iter().all(|s| *s == f32::NEG_INFINITY) {
        return AttentionRow::of_nothing(head.dims[1], score.sink);
    }
    let denominator: f32 = scores.iter().map(|s| (s - largest).exp()).sum::<f32>() + (sink - largest).exp();
    let mut out = vec![0.0f32; head.dims[1]];
    for (j, s) in visible.into_iter().zip(&scores) {
        let p = round(weigh((s - largest).exp()) / denominator);
        let value = (head.value)(j);
        let value = if head.dequantized { &rounded(value) } else { value };
        for (o, v) in out.iter_mut().zip(value) {
            *o += p * *v as f32;
        }
    }
    AttentionRow {
        out: out.into_iter().map(|x| f64::from(round(score.v_scale * round(x)))).collect(),
        lse: f64::from(largest + denominator.ln()),
        sees_a_key: true,
    }
}

/// The caches after an update with keys and values `[T, Hkv, D]`. Rows whose slot is not in the cache are skipped. Rows
/// in the cache's dtype without a scale are copied bit by bit. Otherwise the cache holds the quotient by the head's
/// scale, computed in f32 and rounded to the cache's dtype.
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
        for (t, slot) in slots.iter().enumerate().filter_map(|(t, &slot)| Some((t, kv_geometry.valid_slot(slot)?))) {
            for head in 0..heads {
                let new = &rows.bytes[(t * heads + head) * row..][..row];
                let (buffer, at) = kv_geometry.slot_element(value, slot, head);
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
