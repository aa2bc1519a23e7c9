//! The expected results of a call of attention, and the comparison with actual ones.
//!
//! The sequences are derived from the operands by the clamping rules of `docs/semantics.md#metadata`, so that a call
//! with hostile metadata has expected results too.

use self::accuracy::{FP8_HEAD_DIMS, LSE, LSE_CAPPED, fp8_score};
use super::summary;
use super::{
    Alibi, Array, AttentionCase, AttentionConfig, AttentionRow, BF16, BiasOf, Dtypes, F8E4M3FN, F16, F32, Head, Mask,
    Score, TreeOf, attend, attend_naively, attend_naively_in_fp8, largest_magnitude, runs_on_cpu,
};
use xla_attention::Op;

/// The error bounds of the debug check mode, which apply to the tests as well.
#[allow(dead_code, reason = "the library has uses for all of it")]
#[path = "../../src/debug_check/accuracy.rs"]
mod accuracy;

/// A sequence of a ragged batch, after its metadata has been clamped.
#[derive(Clone, Copy, Debug)]
pub struct ClampedSequence {
    /// Its slot in the metadata.
    pub index: usize,
    /// Its first row of the packed queries.
    pub first_row: usize,
    /// Its first row of contiguous keys.
    pub first_key: usize,
    pub len_q: usize,
    pub len_k: usize,
    pub leftpad: usize,
    pub q_offset: Option<i32>,
    /// All numbers that its rows depend on are finite. Otherwise its rows may hold anything.
    pub finite: bool,
    /// `finite`, and all metadata that the operator reads for it is in range.
    pub specified: bool,
}

/// The sequences of `case`, clamped.
pub fn clamped_sequences(case: &AttentionCase) -> Vec<ClampedSequence> {
    let in_use = match case.target {
        Op::PagedAttention | Op::MlaPagedAttention => i64::from(case.num_seqs).clamp(0, case.slots() as i64) as usize,
        _ => case.slots(),
    };
    (0..in_use).map(|b| clamped_sequence(case, b)).collect()
}

fn clamped_sequence(case: &AttentionCase, b: usize) -> ClampedSequence {
    let (first_row, rows, rows_in_range) = slot(&case.cu_seqlens_q, b, case.rows());
    let len_q = case.seqused_q.as_ref().map_or(rows, |used| rows.min(used[b].max(0) as usize));
    let (first_key, len_k, keys_in_range) = keys(case, b);
    let leftpad = case.leftpad_k.as_ref().map_or(0, |pad| (pad[b].max(0) as usize).min(len_k));
    let q_offset = case.q_offset.as_ref().map(|offset| offset[b]);
    let (finite, specified) = (false, false);
    let sequence =
        ClampedSequence { index: b, first_row, first_key, len_q, len_k, leftpad, q_offset, finite, specified };
    let finite = computes_with_finite_numbers(case, &sequence);
    ClampedSequence { finite, specified: rows_in_range && keys_in_range && finite, ..sequence }
}

/// The first row and the length of slot b of `starts` into `total` rows, and whether both starts are used unchanged. A
/// start counts as the largest one up to it.
fn slot(starts: &[i32], b: usize, total: usize) -> (usize, usize, bool) {
    let clamped = |start: &i32| i64::from(*start).clamp(0, total as i64);
    let largest = |starts: &[i32]| starts.iter().map(clamped).fold(0, i64::max);
    let (start, end) = (largest(&starts[..=b]), largest(&starts[..b + 2]));
    (start as usize, (end - start) as usize, (i64::from(starts[b]), i64::from(starts[b + 1])) == (start, end))
}

/// The first row of contiguous keys, the number of keys, and whether all metadata of the keys is in range.
fn keys(case: &AttentionCase, b: usize) -> (usize, usize, bool) {
    let used = case.seqused_k.as_ref().map(|used| i64::from(used[b]));
    if !case.is_paged() {
        let (start, length, in_range) = slot(&case.cu_seqlens_k, b, case.kv_geometry.num_pages);
        // A `seqused_k` above the slot's length is valid and is limited to it.
        let len_k = used.map_or(length, |used| used.clamp(0, length as i64) as usize);
        return (start, len_k, in_range && used.is_none_or(|used| used >= 0));
    }
    let (pages, page_size) = (case.kv_geometry.num_pages as i64, case.kv_geometry.page_size);
    let capacity = if pages == 0 { 0 } else { (case.max_pages * page_size) as i64 };
    let difference = || i64::from(case.cu_seqlens_k[b + 1]) - i64::from(case.cu_seqlens_k[b]);
    let given = used.unwrap_or_else(difference);
    let len_k = given.clamp(0, capacity);
    let entries = (len_k as usize).div_ceil(page_size.max(1));
    let table = &case.block_table[b * case.max_pages..][..entries];
    let in_pool = table.iter().all(|&page| (0..pages).contains(&i64::from(page)));
    (0, len_k as usize, given == len_k && in_pool)
}

impl ClampedSequence {
    /// Whether its rows are compared.
    pub fn is_specified(&self, invalid_metadata: InvalidMetadata) -> bool {
        self.specified || (invalid_metadata == InvalidMetadata::Clamped && self.finite)
    }

    /// Its query rows.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.first_row..self.first_row + self.len_q
    }

    /// (page, token) of key `j`. Contiguous keys count as pages of one token.
    fn position(&self, case: &AttentionCase, j: usize) -> (usize, usize) {
        if !case.is_paged() {
            return (self.first_key + j, 0);
        }
        let entry = case.block_table[self.index * case.max_pages + j / case.kv_geometry.page_size];
        let page = i64::from(entry).clamp(0, case.kv_geometry.num_pages as i64 - 1) as usize;
        (page, j % case.kv_geometry.page_size)
    }

    /// The slot of key `j` in the cache.
    pub fn slot(&self, case: &AttentionCase, j: usize) -> usize {
        let (page, token) = self.position(case, j);
        page * case.kv_geometry.page_size + token
    }

    /// Key (`value` 0) or value (1) number `j`.
    pub(super) fn stored<'a>(&self, case: &'a AttentionCase, value: usize, j: usize, head: usize) -> &'a [f64] {
        let (page, token) = self.position(case, j);
        let (buffer, at) = case.kv_geometry.element(value, page, token, head);
        &case.kv_values[buffer][at..][..case.kv_geometry.dims[value]]
    }

    /// Query `i` of a head.
    pub(super) fn query<'a>(&self, case: &'a AttentionCase, i: usize, head: usize) -> &'a [f64] {
        let AttentionConfig { q_heads, head_dim, .. } = case.config;
        // q is [Tq, Hq, D].
        &case.q_values[((self.first_row + i) * q_heads + head) * head_dim..][..head_dim]
    }

    fn slope(&self, case: &AttentionCase, head: usize) -> Option<f32> {
        let slopes = case.alibi_slopes.as_ref()?;
        Some(if case.alibi == Alibi::PerSequence {
            slopes[self.index * case.config.q_heads + head]
        } else {
            slopes[head]
        })
    }

    /// Query `i`'s entries of `k_start` and `k_end`.
    pub fn bounds(&self, case: &AttentionCase, i: usize) -> (Option<i32>, Option<i32>) {
        let entry = |of: &Option<Vec<i32>>| of.as_ref().map(|of| of[self.first_row + i]);
        (entry(&case.k_start), entry(&case.k_end))
    }

    /// The keys that query `i` attends to.
    pub fn visible(&self, case: &AttentionCase, i: usize) -> Vec<usize> {
        self.head(case, 0).visible(self.mask(case), i)
    }

    /// Its tree, if it has one.
    fn tree<'a>(&self, case: &'a AttentionCase) -> Option<TreeOf<'a>> {
        let (mask, index) = (case.tree_mask.as_ref().filter(|mask| mask.has_tree(self.len_q))?, self.index);
        Some(Box::new(move |i, j| mask.bit(index, i, j)))
    }

    /// The bias of query `i` and key `j`; 0 past the rows and keys of the operand.
    pub fn bias(&self, case: &AttentionCase, head: usize, i: usize, j: usize) -> f64 {
        let Some(bias) = &case.bias else { return 0.0 };
        let [seqs, heads, rows, keys] = [0, 1, 2, 3].map(|axis| bias.dims[axis] as usize);
        if i >= rows || j >= keys {
            return 0.0;
        }
        let (b, h) = (if seqs == 1 { 0 } else { self.index }, if heads == 1 { 0 } else { head });
        case.bias_values[((b * heads + h) * rows + i) * keys + j]
    }

    /// The sequence's mask.
    pub fn mask(&self, case: &AttentionCase) -> Mask {
        case.config.mask.at(self.q_offset)
    }

    pub(super) fn score(&self, case: &AttentionCase, head: usize) -> Score {
        let config = &case.config;
        // A scale has one element for all KV heads, or one per KV head.
        let scale = |values: &Option<Vec<f32>>| values.as_ref().map_or(1.0, |v| v[config.kv_head(head) % v.len()]);
        Score {
            scales: [config.softmax_scale, scale(&config.q_scale), scale(&config.k_scale)],
            softcap: config.softcap,
            slope: self.slope(case, head),
            sink: config.sinks.as_ref().map(|sinks| sinks[head]),
            v_scale: scale(&config.v_scale),
            mask: self.mask(case),
        }
    }

    /// The inputs of the reference.
    pub(super) fn head<'a>(&'a self, case: &'a AttentionCase, head: usize) -> Head<'a> {
        let (&Self { len_q, len_k, leftpad, .. }, kv_head) = (self, case.config.kv_head(head));
        Head {
            len_q,
            len_k,
            leftpad,
            bounds: Box::new(move |i| self.bounds(case, i)),
            tree: self.tree(case),
            bias: case.bias.as_ref().map(|_| -> BiasOf { Box::new(move |i, j| self.bias(case, head, i, j)) }),
            dequantized: case.scale_cache.is_some(),
            dims: [case.config.head_dim, case.config.value_dim],
            query: Box::new(move |i| self.query(case, i, head)),
            key: Box::new(move |j| self.stored(case, 0, j, kv_head)),
            value: Box::new(move |j| self.stored(case, 1, j, kv_head)),
        }
    }

    fn expected_row(&self, case: &AttentionCase, row: usize, head: usize) -> ExpectedRow {
        let (i, of) = (row - self.first_row, self.head(case, head));
        let score = self.score(case, head);
        let (config, dtype) = (&case.config, case.config.dtypes.compute());
        let exact = attend(&of, i, &score);
        if may_multiply_fp8(config) {
            let score_error = fp8_score(config.head_dim, largest_magnitude(&of, i, &score));
            ExpectedRow { exact, naive: attend_naively_in_fp8(&of, i, &score, dtype), score_error }
        } else {
            ExpectedRow { exact, naive: attend_naively(&of, i, &score, dtype), score_error: 0.0 }
        }
    }
}

/// Whether the tested GPU may multiply fp8 by fp8, with softmax weights rounded to fp8.
fn may_multiply_fp8(config: &AttentionConfig) -> bool {
    let dims = [config.head_dim, config.value_dim];
    config.dtypes.q == F8E4M3FN && FP8_HEAD_DIMS.iter().any(|&dim| dims == [dim; 2]) && !runs_on_cpu()
}

/// The largest e5m2 number. Larger numbers count as infinite, because sums of their products exceed the precision of
/// f32.
pub const LARGEST: f64 = 57344.0;

/// Whether no number is NaN or counts as infinite.
pub fn are_finite(numbers: &[f64]) -> bool {
    numbers.iter().all(|x| x.abs() <= LARGEST)
}

/// Whether all queries of a sequence, all keys and values that one of them attends to, and its slopes, sinks, scales and
/// biases are finite. A sink of -inf is valid and has no effect, and a bias of -inf hides a key.
fn computes_with_finite_numbers(case: &AttentionCase, sequence: &ClampedSequence) -> bool {
    let finite = are_finite;
    let &ClampedSequence { len_q, len_k, .. } = sequence;
    let mut is_visible = vec![false; len_k];
    for i in 0..len_q {
        sequence.visible(case, i).into_iter().for_each(|j| is_visible[j] = true);
    }
    let heads = 0..case.config.q_heads;
    let mut queries = (0..len_q).flat_map(|i| heads.clone().map(move |h| (i, h)));
    let stored = |j, h| finite(sequence.stored(case, 0, j, h)) && finite(sequence.stored(case, 1, j, h));
    let mut keys = (0..len_k).filter(|&j| is_visible[j]);
    let is_bias = |x: f64| x == f64::NEG_INFINITY || finite(&[x]);
    let biases =
        |i: usize, h: usize| sequence.visible(case, i).into_iter().all(|j| is_bias(sequence.bias(case, h, i, j)));
    let has_biases = case.bias.is_none() || queries.clone().all(|(i, h)| biases(i, h));
    has_biases
        && queries.all(|(i, h)| finite(sequence.query(case, i, h)))
        && keys.all(|j| (0..case.config.kv_heads).all(|h| stored(j, h)))
        && (len_q == 0 || heads.clone().all(|h| sequence.score(case, h).is_finite()))
}

/// The expected result of one row and one head.
#[derive(Clone, Debug)]
pub struct ExpectedRow {
    pub exact: AttentionRow,
    pub naive: AttentionRow,
    /// Allowed error of the scores.
    pub score_error: f64,
}

/// What is expected of a sequence whose metadata is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidMetadata {
    /// Its rows may hold anything.
    Unspecified,
    /// Its rows are those of the clamped metadata.
    Clamped,
}

/// Expected rows, `[Tq][Hq]`; `None` where the row may hold anything.
pub type ExpectedRows = Vec<Vec<Option<ExpectedRow>>>;

/// The expected rows of a call.
pub fn expected_rows(case: &AttentionCase, invalid_metadata: InvalidMetadata) -> ExpectedRows {
    expected_rows_of(case, &clamped_sequences(case), |sequence| sequence.is_specified(invalid_metadata))
}

/// The expected rows of a call with these sequences, `None` for rows of a sequence for which `is_specified` is false.
pub fn expected_rows_of(
    case: &AttentionCase,
    sequences: &[ClampedSequence],
    is_specified: impl Fn(&ClampedSequence) -> bool,
) -> ExpectedRows {
    let expected_row = |row: usize, head: usize| -> Option<ExpectedRow> {
        let Some(sequence) = sequences.iter().find(|m| (m.first_row..m.first_row + m.len_q).contains(&row)) else {
            let empty = AttentionRow::of_nothing(case.config.value_dim, None);
            return Some(ExpectedRow { exact: empty.clone(), naive: empty, score_error: 0.0 });
        };
        is_specified(sequence).then(|| sequence.expected_row(case, row, head))
    };
    (0..case.rows()).map(|row| (0..case.config.q_heads).map(|head| expected_row(row, head)).collect()).collect()
}

/// The allowed error of an output (`docs/semantics.md#error-bounds`).
#[derive(Clone, Copy, Debug)]
pub struct ErrorBound {
    /// The largest error of the naive formula.
    pub naive_error: f64,
    /// Multiple of it that is allowed.
    pub times: f64,
    /// Error that is allowed in addition.
    pub floor: f64,
}

impl ErrorBound {
    /// The bound for rows of outputs. `floor` is relative to the largest one.
    pub fn of<'a>(expected_rows: impl Iterator<Item = &'a ExpectedRow>, floor: f64) -> Self {
        Self::of_numbers(
            expected_rows.flat_map(|a| a.exact.out.iter().copied().zip(a.naive.out.iter().copied())),
            2.0,
            floor,
        )
    }

    /// The bound for pairs of an exact number and that of the naive formula.
    pub fn of_numbers(pairs: impl Iterator<Item = (f64, f64)>, times: f64, floor: f64) -> Self {
        let larger = |(error, size): (f64, f64), (exact, naive): (f64, f64)| {
            (error.max((exact - naive).abs()), size.max(exact.abs()))
        };
        let (naive_error, size) = pairs.fold((0.0, 1.0), larger);
        Self { naive_error, times, floor: floor * size }
    }

    /// The largest allowed error.
    pub fn limit(self) -> f64 {
        self.times * self.naive_error + self.floor
    }
}

/// The largest allowed error of a log-sum-exp whose scores are exact.
pub fn lse_tolerance(exact: f64, dtypes: Dtypes, softcap: bool) -> f64 {
    let relative = match dtypes.compute() {
        F16 | BF16 if softcap => LSE_CAPPED,
        _ => LSE,
    };
    relative * exact.abs().max(1.0)
}

/// Asserts that `out [Tq, Hq, Dv]`, and `lse [Hq, Tq]` if there is one, match. The error goes into the summary.
pub fn assert_matches_expected(case: &AttentionCase, expected_rows: &ExpectedRows, out: &Array, lse: Option<&Array>) {
    let of_scales = if case.scale_cache.is_some() { case.config.dtypes.rounding() } else { 0.0 };
    let error_bound = ErrorBound::of(expected_rows.iter().flatten().flatten(), 1e-5 + of_scales);
    let largest = assert_within(case, expected_rows, error_bound, out, lse);
    summary::record(&case.name, case.config.dtypes, largest, error_bound);
}

/// The same with another error bound. Returns the largest error.
pub fn assert_within(
    case: &AttentionCase,
    expected_rows: &ExpectedRows,
    error_bound: ErrorBound,
    out: &Array,
    lse: Option<&Array>,
) -> f64 {
    let AttentionConfig { q_heads: heads, value_dim: d, dtypes, .. } = case.config;
    let rows = case.rows();
    assert_eq!((out.dtype, out.dims.as_slice()), (dtypes.out, [rows, heads, d].map(|x| x as i64).as_slice()));
    let out = out.values();
    let lse = lse.map(|l| {
        assert_eq!((l.dtype, l.dims.as_slice()), (F32, [heads, rows].map(|x| x as i64).as_slice()));
        l.values()
    });
    let mut largest = 0.0f64;
    for row in 0..rows {
        for head in 0..heads {
            let Some(allowed) = &expected_rows[row][head] else { continue };
            let actual = &out[(row * heads + head) * d..][..d];
            let found_lse = lse.as_ref().map(|l| l[head * rows + row]);
            let (off, bound) = (error(actual, &allowed.exact), error_bound.limit());
            largest = largest.max(off);
            assert!(
                off <= bound && lse_fits(case, allowed, found_lse),
                "{}: row {row}, head {head}: out is off by {off:e} (allowed {bound:e}), lse is {found_lse:?}, expected {}\n\
                 found    {:?}\nexpected {:?}",
                case.name,
                allowed.exact.lse,
                &actual[..d.min(8)],
                &allowed.exact.out[..d.min(8)],
            );
        }
    }
    largest
}

/// The largest error of an output row. A row that attends to no key must be exactly 0.
fn error(actual: &[f64], exact: &AttentionRow) -> f64 {
    let zero = || actual.iter().all(|&o| o == 0.0);
    if exact.sees_a_key || zero() { distance(actual, &exact.out) } else { f64::INFINITY }
}

fn lse_fits(case: &AttentionCase, allowed: &ExpectedRow, actual: Option<f64>) -> bool {
    let exact = allowed.exact.lse;
    let tolerance = || lse_tolerance(exact, case.config.dtypes, case.config.softcap > 0.0) + allowed.score_error;
    let same = |actual: f64| actual.to_bits() == exact.to_bits();
    actual.is_none_or(|actual| if exact.is_finite() { (actual - exact).abs() <= tolerance() } else { same(actual) })
}

/// The largest difference. NaN counts as infinity.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |largest, d| if d.is_nan() { f64::INFINITY } else { largest.max(d) })
}
