//! What the operators mean (SPEC 2.1, 2.3, 2.4), in f64 and without any thought of speed, and how close to it a kernel
//! has to be.

use super::array::{Array, BF16, Dtype, F16, F32};
use super::cases::PagedCase;
use std::collections::BTreeSet;

/// How scores are made and which keys a query sees.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    pub scale: f64,
    /// 0 is off.
    pub softcap: f64,
    /// Keys that a query sees before its own position; `None` is all of them.
    pub window_left: Option<i64>,
    /// Keys that a query sees after its own position; `None` is all of them.
    pub window_right: Option<i64>,
}

/// The queries and keys of one sequence, and where they are.
pub struct Sequence<'a> {
    pub len_q: usize,
    pub len_k: usize,
    /// Query row i of a head, `[D]`.
    pub query: Box<dyn Fn(usize, usize) -> &'a [f64] + 'a>,
    /// Key j of a KV head, `[D]`.
    pub key: Box<dyn Fn(usize, usize) -> &'a [f64] + 'a>,
    /// Value j of a KV head, `[Dv]`.
    pub value: Box<dyn Fn(usize, usize) -> &'a [f64] + 'a>,
}

/// One query row of one head.
#[derive(Clone, PartialEq, Debug)]
pub struct RowAnswer {
    /// `[Dv]`
    pub out: Vec<f64>,
    pub lse: f64,
}

impl Score {
    /// The keys that query row `i` sees: those at most `window_left` before and `window_right` after the query's own
    /// position among the keys, which is such that the last query stands at the last key.
    pub fn visible(&self, i: usize, len_q: usize, len_k: usize) -> impl Iterator<Item = usize> + use<> {
        let position = i as i64 + len_k as i64 - len_q as i64;
        let first = self.window_left.map_or(0, |w| position.saturating_sub(w)).max(0);
        let last = self.window_right.map_or(i64::MAX, |w| position.saturating_add(w)).min(len_k as i64 - 1);
        (first..=last).map(|j| j as usize)
    }
}

/// A row that sees no key, or that belongs to no sequence.
pub fn nothing_seen(value_dim: usize) -> RowAnswer {
    RowAnswer { out: vec![0.0; value_dim], lse: f64::NEG_INFINITY }
}

/// Attention of query row `i` of a head, exactly.
pub fn attend(seq: &Sequence, score: &Score, (i, head, kv_head): (usize, usize, usize), value_dim: usize) -> RowAnswer {
    let q = (seq.query)(i, head);
    let visible: Vec<usize> = score.visible(i, seq.len_q, seq.len_k).collect();
    if visible.is_empty() {
        return nothing_seen(value_dim);
    }
    let scores: Vec<f64> = visible
        .iter()
        .map(|&j| {
            let dot: f64 = q.iter().zip((seq.key)(j, kv_head)).map(|(a, b)| a * b).sum();
            let s = score.scale * dot;
            if score.softcap > 0.0 { score.softcap * (s / score.softcap).tanh() } else { s }
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let denominator: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
    let mut out = vec![0.0; value_dim];
    for (&j, s) in visible.iter().zip(&scores) {
        let p = (s - largest).exp() / denominator;
        for (o, v) in out.iter_mut().zip((seq.value)(j, kv_head)) {
            *o += p * v;
        }
    }
    RowAnswer { out, lse: largest + denominator.ln() }
}

/// The same formula as somebody would write it in the operands' own type: products accumulated in f32, S and P rounded
/// to `dtype`, softmax in f32. Its distance from [`attend`] is the measure of what a kernel may be off by.
pub fn attend_naively(
    seq: &Sequence,
    score: &Score,
    (i, head, kv_head): (usize, usize, usize),
    value_dim: usize,
    dtype: Dtype,
) -> RowAnswer {
    let round = |x: f32| dtype.round(f64::from(x)) as f32;
    let q = (seq.query)(i, head);
    let visible: Vec<usize> = score.visible(i, seq.len_q, seq.len_k).collect();
    if visible.is_empty() {
        return nothing_seen(value_dim);
    }
    let scores: Vec<f32> = visible
        .iter()
        .map(|&j| {
            let dot = q.iter().zip((seq.key)(j, kv_head)).fold(0.0f32, |sum, (a, b)| sum + *a as f32 * *b as f32);
            let s = round(score.scale as f32 * round(dot));
            let cap = score.softcap as f32;
            if cap > 0.0 { round(cap * round((s / cap).tanh())) } else { s }
        })
        .collect();
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let denominator: f32 = scores.iter().map(|s| (s - largest).exp()).sum();
    let mut out = vec![0.0f32; value_dim];
    for (&j, s) in visible.iter().zip(&scores) {
        let p = round((s - largest).exp() / denominator);
        for (o, v) in out.iter_mut().zip((seq.value)(j, kv_head)) {
            *o += p * *v as f32;
        }
    }
    RowAnswer {
        out: out.into_iter().map(|x| f64::from(round(x))).collect(),
        lse: f64::from(largest + denominator.ln()),
    }
}

/// A sequence of a ragged batch after its metadata has been clamped.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Which entry of the metadata it is.
    pub index: usize,
    /// Its first row of the packed queries.
    pub first_row: usize,
    pub len_q: usize,
    pub len_k: usize,
    /// The metadata that is read for it lies in range and all numbers that it computes with are finite. If not, its
    /// rows may hold anything.
    pub specified: bool,
}

/// The sequences of `case`, by the clamping rules of SPEC 2.1.
pub fn members(case: &PagedCase) -> Vec<Member> {
    let (rows, slots) = (case.rows() as i64, case.max_seqs());
    let capacity = if case.num_pages() == 0 { 0 } else { (case.max_pages * case.page_size) as i64 };
    let used = i64::from(case.num_seqs).clamp(0, slots as i64) as usize;
    (0..used)
        .map(|b| {
            let (given_start, given_end) = (i64::from(case.query_start_loc[b]), i64::from(case.query_start_loc[b + 1]));
            let given_len = i64::from(case.context_lens[b]);
            let start = given_start.clamp(0, rows);
            let end = given_end.clamp(start, rows);
            let len_k = given_len.clamp(0, capacity) as usize;
            let entries = len_k.div_ceil(case.page_size.max(1));
            let pages = &case.block_tables[b * case.max_pages..][..entries];
            let in_pool = pages.iter().all(|&p| (0..case.num_pages() as i64).contains(&i64::from(p)));
            let in_range = given_start == start && given_end == end && given_len == len_k as i64 && in_pool;
            let (first_row, len_q) = (start as usize, (end - start) as usize);
            let member = Member { index: b, first_row, len_q, len_k, specified: in_range };
            Member { specified: in_range && computes_with_finite_numbers(case, &member), ..member }
        })
        .collect()
}

/// What may stand in one row of one head, exactly and as the naive formula has it.
pub struct Allowed {
    pub exact: RowAnswer,
    pub naive: RowAnswer,
}

/// All queries of a sequence, and all keys and values that one of them sees, are numbers.
fn computes_with_finite_numbers(case: &PagedCase, member: &Member) -> bool {
    let (sequence, score) = (sequence(case, member), score(case));
    let finite = |row: &[f64]| row.iter().all(|x| x.is_finite());
    let seen: BTreeSet<usize> = (0..member.len_q).flat_map(|i| score.visible(i, member.len_q, member.len_k)).collect();
    (0..member.len_q).all(|i| (0..case.q_heads).all(|h| finite((sequence.query)(i, h))))
        && seen
            .iter()
            .all(|&j| (0..case.kv_heads).all(|h| finite((sequence.key)(j, h)) && finite((sequence.value)(j, h))))
}

/// What is expected of a sequence whose own metadata is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IfWrong {
    /// Its rows may hold anything.
    Unspecified,
    /// Its rows hold what the clamped metadata gives.
    Clamped,
}

/// `[T][Hq]`: what may stand in a row of a head. More than one answer if sequences claim the same row, none at all if
/// nothing is said of it.
pub type Answers = Vec<Vec<Vec<Allowed>>>;

/// The answers to a paged attention call (SPEC 2.1).
pub fn paged_attention(case: &PagedCase, if_wrong: IfWrong) -> Answers {
    let members = members(case);
    let answers = |row: usize, head: usize| -> Vec<Allowed> {
        let by = || members.iter().filter(|m| (m.first_row..m.first_row + m.len_q).contains(&row));
        if by().next().is_none() {
            let empty = nothing_seen(case.head_dim);
            vec![Allowed { exact: empty.clone(), naive: empty }]
        } else if if_wrong == IfWrong::Unspecified && !by().all(|m| m.specified) {
            Vec::new()
        } else {
            by().map(|m| answer_of(case, m, row, head)).collect()
        }
    };
    (0..case.rows()).map(|row| (0..case.q_heads).map(|head| answers(row, head)).collect()).collect()
}

/// The queries and keys of a member of a batch.
fn sequence<'a>(case: &'a PagedCase, member: &Member) -> Sequence<'a> {
    let (heads, kv_heads, d) = (case.q_heads, case.kv_heads, case.head_dim);
    let (index, first_row) = (member.index, member.first_row);
    // kv_cache [P, page_size, 2*Hkv, D], K of head h at 2h, V at 2h+1
    let stored = move |j: usize, kv: usize| {
        let entry = case.block_tables[index * case.max_pages + j / case.page_size];
        let page = i64::from(entry).clamp(0, case.num_pages() as i64 - 1) as usize;
        &case.cache_values[((page * case.page_size + j % case.page_size) * 2 * kv_heads + kv) * d..][..d]
    };
    Sequence {
        len_q: member.len_q,
        len_k: member.len_k,
        // query [T, Hq, D]
        query: Box::new(move |i, h| &case.query_values[((first_row + i) * heads + h) * d..][..d]),
        key: Box::new(move |j, h| stored(j, 2 * h)),
        value: Box::new(move |j, h| stored(j, 2 * h + 1)),
    }
}

/// The options of a call.
fn score(case: &PagedCase) -> Score {
    Score {
        scale: f64::from(case.scale),
        softcap: f64::from(case.soft_cap),
        // A window of W keys counts the query's own; causal: no key after it.
        window_left: case.window.map(|w| w - 1),
        window_right: Some(0),
    }
}

fn answer_of(case: &PagedCase, member: &Member, row: usize, head: usize) -> Allowed {
    let (sequence, score, d) = (sequence(case, member), score(case), case.head_dim);
    let (i, kv_head) = (row - member.first_row, head / (case.q_heads / case.kv_heads));
    Allowed {
        exact: attend(&sequence, &score, (i, head, kv_head), d),
        naive: attend_naively(&sequence, &score, (i, head, kv_head), d, case.dtype),
    }
}

/// Largest difference that passes, of outputs, for a set of answers (SPEC 2.1, accuracy).
pub fn out_tolerance<'a>(answers: impl Iterator<Item = &'a Allowed>) -> f64 {
    let (mut naive_error, mut size) = (0.0f64, 1.0f64);
    for a in answers {
        for (exact, naive) in a.exact.out.iter().zip(&a.naive.out) {
            naive_error = naive_error.max((exact - naive).abs());
            size = size.max(exact.abs());
        }
    }
    2.0 * naive_error + 1e-5 * size
}

/// Largest difference that passes, of one log-sum-exp.
pub fn lse_tolerance(exact: f64, dtype: Dtype, softcap: bool) -> f64 {
    let relative = if softcap && [F16, BF16].contains(&dtype) { 2e-2 } else { 1e-4 };
    relative * exact.abs().max(1.0)
}

/// `out [T, Hq, D]`, and `lse [Hq, T]` if there is one, are what `answers [T][Hq]` allow.
pub fn assert_allowed(case: &PagedCase, answers: &[Vec<Vec<Allowed>>], out: &Array, lse: Option<&Array>) {
    let (rows, heads, d) = (case.rows(), case.q_heads, case.head_dim);
    assert_eq!(out.dims, [rows as i64, heads as i64, d as i64]);
    let out = out.values();
    let lse = lse.map(|l| {
        assert_eq!((l.dtype, l.dims.as_slice()), (F32, [heads as i64, rows as i64].as_slice()));
        l.values()
    });
    let tolerance = out_tolerance(answers.iter().flatten().flatten());
    for row in 0..rows {
        for head in 0..heads {
            let found = &out[(row * heads + head) * d..][..d];
            let found_lse = lse.as_ref().map(|l| l[head * rows + row]);
            let allowed = &answers[row][head];
            if allowed.is_empty() {
                continue;
            }
            let fits = allowed.iter().any(|a| {
                let distance = distance(found, &a.exact.out);
                let empty = a.exact.lse == f64::NEG_INFINITY;
                let out_fits = if empty { found.iter().all(|&o| o == 0.0) } else { distance <= tolerance };
                let lse_fits = found_lse.is_none_or(|l| {
                    if empty {
                        l == f64::NEG_INFINITY
                    } else {
                        (l - a.exact.lse).abs() <= lse_tolerance(a.exact.lse, case.dtype, case.soft_cap > 0.0)
                    }
                });
                out_fits && lse_fits
            });
            assert!(
                fits,
                "{}: row {row}, head {head}: out is off by {:e} (allowed {tolerance:e}), lse is {found_lse:?}, expected {}\n\
                 found    {:?}\nexpected {:?}",
                case.name,
                distance(found, &allowed[0].exact.out),
                allowed[0].exact.lse,
                &found[..d.min(8)],
                &allowed[0].exact.out[..d.min(8)],
            );
        }
    }
}

/// Largest difference; NaN counts as infinitely far.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |most, d| if d.is_nan() { f64::INFINITY } else { most.max(d) })
}

/// A paged cache before and after new rows: `cache` is the operand's bytes, the answer the result's.
///
/// `row_of(slot, head)` is the element at which the row of a slot begins; rows whose slot lies outside
/// `[0, slots)` are skipped. Without a scale rows are copied bit by bit, otherwise divided by the scale of their head.
pub fn kv_cache_update(
    cache: &Array,
    rows: &Array,
    slot_mapping: &[i64],
    slots: usize,
    scale: Option<&[f64]>,
    row_of: impl Fn(usize, usize) -> usize,
) -> Array {
    let (heads, d) = (rows.dims[1] as usize, rows.dims[2] as usize);
    let size = rows.dtype.size();
    let mut after = cache.clone();
    for (t, &slot) in slot_mapping.iter().enumerate() {
        if slot < 0 || slot >= slots as i64 {
            continue;
        }
        for head in 0..heads {
            // rows [T, Hkv, D]
            let new = &rows.bytes[(t * heads + head) * d * size..][..d * size];
            let stored: Vec<u8> = match scale {
                None => new.to_vec(),
                Some(scale) => {
                    let divisor = scale[head % scale.len()];
                    new.chunks_exact(size).flat_map(|x| rows.dtype.encode(rows.dtype.decode(x) / divisor)).collect()
                }
            };
            after.bytes[row_of(slot as usize, head) * size..][..d * size].copy_from_slice(&stored);
        }
    }
    after
}
