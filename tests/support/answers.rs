//! What may stand in every row of a call's results, and whether it does.
//!
//! The sequences are read off the operands by the clamping rules of `docs/semantics.md#metadata`, so that a case whose
//! metadata is hostile has answers like any other.

use self::accuracy::{FP8_HEAD_DIMS, LSE, LSE_CAPPED, fp8_score};
use super::summary;
use super::{
    Alibi, Array, BF16, Case, Dtypes, F8E4M3FN, F16, F32, Form, Head, RowAnswer, Score, attend, attend_naively,
    attend_naively_in_fp8, largest_magnitude, runs_on_cpu,
};
use xla_attention::Op;

/// What the check of the library allows too.
#[allow(dead_code, reason = "the library has uses for all of it")]
#[path = "../../src/debug_check/accuracy.rs"]
mod accuracy;

/// A sequence of a ragged batch after its metadata has been clamped.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Which slot of the metadata it is.
    pub index: usize,
    /// Its first row of the packed queries.
    pub first_row: usize,
    /// Its first row of contiguous keys.
    pub first_key: usize,
    pub len_q: usize,
    pub len_k: usize,
    pub leftpad: usize,
    /// All numbers that it computes with are finite. If not, its rows may hold anything.
    pub finite: bool,
    /// They are, and the metadata that is read for it lies in range.
    pub specified: bool,
}

/// The sequences of `case`.
pub fn members(case: &Case) -> Vec<Member> {
    let in_use = match case.target {
        Op::PagedAttention => i64::from(case.num_seqs).clamp(0, case.slots() as i64) as usize,
        _ => case.slots(),
    };
    (0..in_use).map(|b| member(case, b)).collect()
}

fn member(case: &Case, b: usize) -> Member {
    let (first_row, rows, rows_in_range) = slot(&case.cu_seqlens_q, b, case.rows());
    let len_q = case.seqused_q.as_ref().map_or(rows, |used| rows.min(used[b].max(0) as usize));
    let (first_key, len_k, keys_in_range) = keys(case, b);
    let leftpad = case.leftpad_k.as_ref().map_or(0, |pad| (pad[b].max(0) as usize).min(len_k));
    let member = Member { index: b, first_row, first_key, len_q, len_k, leftpad, finite: false, specified: false };
    let finite = computes_with_finite_numbers(case, &member);
    Member { finite, specified: rows_in_range && keys_in_range && finite, ..member }
}

/// Slot b of `starts` into `total` rows: its first row, its length, and whether both starts are read as they are given.
/// Each counts as the largest up to it.
fn slot(starts: &[i32], b: usize, total: usize) -> (usize, usize, bool) {
    let clamped = |start: &i32| i64::from(*start).clamp(0, total as i64);
    let largest = |starts: &[i32]| starts.iter().map(clamped).fold(0, i64::max);
    let (start, end) = (largest(&starts[..=b]), largest(&starts[..b + 2]));
    (start as usize, (end - start) as usize, (i64::from(starts[b]), i64::from(starts[b + 1])) == (start, end))
}

/// The first row of contiguous keys, the number of keys, and whether all metadata behind them lies in range.
fn keys(case: &Case, b: usize) -> (usize, usize, bool) {
    let used = case.seqused_k.as_ref().map(|used| i64::from(used[b]));
    if !case.is_paged() {
        let (start, length, in_range) = slot(&case.cu_seqlens_k, b, case.place.num_pages);
        // More than the slot has is no mistake.
        let len_k = used.map_or(length, |used| used.clamp(0, length as i64) as usize);
        return (start, len_k, in_range && used.is_none_or(|used| used >= 0));
    }
    let (pages, page_size) = (case.place.num_pages as i64, case.place.page_size);
    let capacity = if pages == 0 { 0 } else { (case.max_pages * page_size) as i64 };
    let difference = || i64::from(case.cu_seqlens_k[b + 1]) - i64::from(case.cu_seqlens_k[b]);
    let given = used.unwrap_or_else(difference);
    let len_k = given.clamp(0, capacity);
    let entries = (len_k as usize).div_ceil(page_size.max(1));
    let table = &case.block_table[b * case.max_pages..][..entries];
    let in_pool = table.iter().all(|&page| (0..pages).contains(&i64::from(page)));
    (0, len_k as usize, given == len_k && in_pool)
}

impl Member {
    /// Something is said of its rows.
    pub fn is_said(&self, if_wrong: IfWrong) -> bool {
        self.specified || (if_wrong == IfWrong::Clamped && self.finite)
    }

    /// Its query rows.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.first_row..self.first_row + self.len_q
    }

    /// (page, token) of key `j`; contiguous keys are pages of one token.
    fn position(&self, case: &Case, j: usize) -> (usize, usize) {
        if !case.is_paged() {
            return (self.first_key + j, 0);
        }
        let entry = case.block_table[self.index * case.max_pages + j / case.place.page_size];
        let page = i64::from(entry).clamp(0, case.place.num_pages as i64 - 1) as usize;
        (page, j % case.place.page_size)
    }

    /// The slot of key `j` in the cache.
    pub fn slot(&self, case: &Case, j: usize) -> usize {
        let (page, token) = self.position(case, j);
        page * case.place.page_size + token
    }

    /// The row of K (`value` 0) or V (1) of key `j`.
    pub(super) fn stored<'a>(&self, case: &'a Case, value: usize, j: usize, head: usize) -> &'a [f64] {
        let (page, token) = self.position(case, j);
        let (buffer, at) = case.place.of(value, page, token, head);
        &case.kv_values[buffer][at..][..case.place.dims[value]]
    }

    /// Query row `i` of a head.
    pub(super) fn query<'a>(&self, case: &'a Case, i: usize, head: usize) -> &'a [f64] {
        let Form { q_heads, head_dim, .. } = case.form;
        // q [Tq, Hq, D]
        &case.q_values[((self.first_row + i) * q_heads + head) * head_dim..][..head_dim]
    }

    fn slope(&self, case: &Case, head: usize) -> Option<f32> {
        let slopes = case.alibi_slopes.as_ref()?;
        Some(if case.alibi == Alibi::PerSequence {
            slopes[self.index * case.form.q_heads + head]
        } else {
            slopes[head]
        })
    }

    pub(super) fn score(&self, case: &Case, head: usize) -> Score {
        let form = &case.form;
        // One for all KV heads, or one each.
        let scale = |values: &Option<Vec<f32>>| values.as_ref().map_or(1.0, |v| v[form.kv_head(head) % v.len()]);
        Score {
            scales: [form.softmax_scale, scale(&form.q_scale), scale(&form.k_scale)],
            softcap: form.softcap,
            slope: self.slope(case, head),
            sink: form.sinks.as_ref().map(|sinks| sinks[head]),
            v_scale: scale(&form.v_scale),
            mask: form.mask,
        }
    }

    /// Of the reference.
    pub(super) fn head<'a>(&'a self, case: &'a Case, head: usize) -> Head<'a> {
        let (&Self { len_q, len_k, leftpad, .. }, kv_head) = (self, case.form.kv_head(head));
        Head {
            len_q,
            len_k,
            leftpad,
            dims: [case.form.head_dim, case.form.value_dim],
            query: Box::new(move |i| self.query(case, i, head)),
            key: Box::new(move |j| self.stored(case, 0, j, kv_head)),
            value: Box::new(move |j| self.stored(case, 1, j, kv_head)),
        }
    }

    fn answer(&self, case: &Case, row: usize, head: usize) -> Allowed {
        let (i, of) = (row - self.first_row, self.head(case, head));
        let score = self.score(case, head);
        let (form, dtype) = (&case.form, case.form.dtypes.compute());
        let exact = attend(&of, i, &score);
        if may_multiply_fp8(form) {
            let score_error = fp8_score(form.head_dim, largest_magnitude(&of, i, &score));
            Allowed { exact, naive: attend_naively_in_fp8(&of, i, &score, dtype), score_error }
        } else {
            Allowed { exact, naive: attend_naively(&of, i, &score, dtype), score_error: 0.0 }
        }
    }
}

/// The GPU at hand may multiply fp8 by fp8, weights included.
fn may_multiply_fp8(form: &Form) -> bool {
    let dims = [form.head_dim, form.value_dim];
    form.dtypes.q == F8E4M3FN && FP8_HEAD_DIMS.iter().any(|&dim| dims == [dim; 2]) && !runs_on_cpu()
}

/// The largest e5m2. Numbers beyond count as infinite: sums of their products leave what f32 tells apart.
pub const LARGEST: f64 = 57344.0;

/// None is NaN or infinite.
pub fn are_finite(numbers: &[f64]) -> bool {
    numbers.iter().all(|x| x.abs() <= LARGEST)
}

/// All queries of a sequence, all keys and values that one of them sees, its slopes, sinks and scales are numbers; a sink
/// of -inf is none.
fn computes_with_finite_numbers(case: &Case, member: &Member) -> bool {
    let finite = are_finite;
    let &Member { len_q, len_k, leftpad, .. } = member;
    let mut seen = vec![false; len_k];
    for i in 0..len_q {
        seen[case.form.mask.visible(i, len_q, len_k, leftpad)].fill(true);
    }
    let heads = 0..case.form.q_heads;
    let mut queries = (0..len_q).flat_map(|i| heads.clone().map(move |h| (i, h)));
    let stored = |j, h| finite(member.stored(case, 0, j, h)) && finite(member.stored(case, 1, j, h));
    let mut keys = (0..len_k).filter(|&j| seen[j]);
    queries.all(|(i, h)| finite(member.query(case, i, h)))
        && keys.all(|j| (0..case.form.kv_heads).all(|h| stored(j, h)))
        && (len_q == 0 || heads.clone().all(|h| member.score(case, h).is_finite()))
}

/// What may stand in one row of one head, exactly and as the naive formula has it.
#[derive(Clone, Debug)]
pub struct Allowed {
    pub exact: RowAnswer,
    pub naive: RowAnswer,
    /// How far off its scores may be.
    pub score_error: f64,
}

/// What is expected of a sequence whose own metadata is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IfWrong {
    /// Its rows may hold anything.
    Unspecified,
    /// Its rows hold what the clamped metadata gives.
    Clamped,
}

/// `[Tq][Hq]`: what may stand in a row of a head; `None` if nothing is said of it.
pub type Answers = Vec<Vec<Option<Allowed>>>;

/// The answers to a call.
pub fn answers(case: &Case, if_wrong: IfWrong) -> Answers {
    answers_of(case, &members(case), |member| member.is_said(if_wrong))
}

/// The answers to a call with these sequences, for those of which something is said.
pub fn answers_of(case: &Case, members: &[Member], is_said: impl Fn(&Member) -> bool) -> Answers {
    let answer = |row: usize, head: usize| -> Option<Allowed> {
        let Some(member) = members.iter().find(|m| (m.first_row..m.first_row + m.len_q).contains(&row)) else {
            let empty = RowAnswer::of_nothing(case.form.value_dim, None);
            return Some(Allowed { exact: empty.clone(), naive: empty, score_error: 0.0 });
        };
        is_said(member).then(|| member.answer(case, row, head))
    };
    (0..case.rows()).map(|row| (0..case.form.q_heads).map(|head| answer(row, head)).collect()).collect()
}

/// How far from the exact answers an output may be (`docs/semantics.md#error-bounds`).
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Largest error of the naive formula.
    pub naive_error: f64,
    /// How many times that is allowed.
    pub times: f64,
    /// What is allowed whatever the naive formula does.
    pub floor: f64,
}

impl Allowance {
    /// Of rows of outputs; the floor is a share of the largest one.
    pub fn of<'a>(answers: impl Iterator<Item = &'a Allowed>, floor: f64) -> Self {
        Self::of_numbers(answers.flat_map(|a| a.exact.out.iter().copied().zip(a.naive.out.iter().copied())), 2.0, floor)
    }

    /// Of pairs of an exact number and that of the naive formula.
    pub fn of_numbers(pairs: impl Iterator<Item = (f64, f64)>, times: f64, floor: f64) -> Self {
        let larger = |(error, size): (f64, f64), (exact, naive): (f64, f64)| {
            (error.max((exact - naive).abs()), size.max(exact.abs()))
        };
        let (naive_error, size) = pairs.fold((0.0, 1.0), larger);
        Self { naive_error, times, floor: floor * size }
    }

    /// Largest difference that passes.
    pub fn most(self) -> f64 {
        self.times * self.naive_error + self.floor
    }
}

/// Largest difference that passes, of one log-sum-exp whose scores are exact.
pub fn lse_tolerance(exact: f64, dtypes: Dtypes, softcap: bool) -> f64 {
    let relative = match dtypes.compute() {
        F16 | BF16 if softcap => LSE_CAPPED,
        _ => LSE,
    };
    relative * exact.abs().max(1.0)
}

/// `out [Tq, Hq, Dv]`, and `lse [Hq, Tq]` if there is one, are what `answers` allow. The error goes into the summary.
pub fn assert_allowed(case: &Case, answers: &Answers, out: &Array, lse: Option<&Array>) {
    let allowance = Allowance::of(answers.iter().flatten().flatten(), 1e-5);
    let largest = assert_within(case, answers, allowance, out, lse);
    summary::record(&case.name, case.form.dtypes, largest, allowance);
}

/// The same with another allowance; the largest error.
pub fn assert_within(case: &Case, answers: &Answers, allowance: Allowance, out: &Array, lse: Option<&Array>) -> f64 {
    let Form { q_heads: heads, value_dim: d, dtypes, .. } = case.form;
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
            let Some(allowed) = &answers[row][head] else { continue };
            let found = &out[(row * heads + head) * d..][..d];
            let found_lse = lse.as_ref().map(|l| l[head * rows + row]);
            let (off, most) = (error(found, &allowed.exact), allowance.most());
            largest = largest.max(off);
            assert!(
                off <= most && lse_fits(case, allowed, found_lse),
                "{}: row {row}, head {head}: out is off by {off:e} (allowed {most:e}), lse is {found_lse:?}, expected {}\n\
                 found    {:?}\nexpected {:?}",
                case.name,
                allowed.exact.lse,
                &found[..d.min(8)],
                &allowed.exact.out[..d.min(8)],
            );
        }
    }
    largest
}

/// Largest error of an output row; a row that sees no key is exactly 0 or wrong.
fn error(found: &[f64], exact: &RowAnswer) -> f64 {
    let zero = || found.iter().all(|&o| o == 0.0);
    if exact.sees_a_key || zero() { distance(found, &exact.out) } else { f64::INFINITY }
}

fn lse_fits(case: &Case, allowed: &Allowed, found: Option<f64>) -> bool {
    let exact = allowed.exact.lse;
    let tolerance = || lse_tolerance(exact, case.form.dtypes, case.form.softcap > 0.0) + allowed.score_error;
    let same = |found: f64| found.to_bits() == exact.to_bits();
    found.is_none_or(|found| if exact.is_finite() { (found - exact).abs() <= tolerance() } else { same(found) })
}

/// Largest difference; NaN counts as infinitely far.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |most, d| if d.is_nan() { f64::INFINITY } else { most.max(d) })
}
