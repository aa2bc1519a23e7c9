//! Attention by its definition (`docs/semantics.md#attention`) in f64, one row and key at a time. Results of the CPU
//! backend are compared with it.

use super::accuracy;
use super::metadata::Sequence;
use super::numbers::{read, write};
use crate::error::Result;
use crate::pool::{Pool, parallel_for};
use crate::problem::attention::{Attention, KeyStorage, position_of_query_0};
use crate::problem::{KvScaleCache, KvView, Scale};

/// Computes `out`, and `softmax_lse` if the problem has it.
///
/// # Errors
/// `INTERNAL` if a task panicked.
///
/// # Safety
/// The problem's views are valid host memory, `out` and `lse` are writable, and `sequences` are the sequences of its
/// metadata.
pub(crate) unsafe fn attend(problem: &Attention, sequences: &[Sequence], pool: &dyn Pool) -> Result {
    let heads = problem.num_q_heads;
    let task = |(): &mut (), task: usize| {
        let (row, head) = (task / heads, task % heads);
        let owner = sequences.iter().find(|s| (s.first_row..s.first_row + s.len_q).contains(&row));
        // SAFETY: the caller guarantees valid memory; each task writes another row and head.
        unsafe {
            let (out, lse) = owner.map_or_else(
                || (vec![0.0; problem.value_dim], f64::NEG_INFINITY),
                |sequence| Row { problem, sequence, i: row - sequence.first_row, head }.attend(),
            );
            for (d, x) in out.into_iter().enumerate() {
                // out [Tq, Hq, Dv]
                let at = ((row * heads + head) * problem.value_dim + d) * problem.out.dtype.size();
                write(problem.out.dtype, problem.out.data.add(at), x);
            }
            if let Some(to) = problem.lse {
                // lse [Hq, Tq]
                to.add(head * problem.num_rows + row).write(lse as f32);
            }
        }
    };
    parallel_for(pool, problem.num_rows * heads, || (), task)
}

/// The additional error of a row and head if tensor cores multiply fp8 by fp8 ([`accuracy`]): of each element of `out`,
/// and of the lse.
///
/// # Safety
/// As [`attend`], and `row` is below Tq.
pub(crate) unsafe fn fp8_excess(
    problem: &Attention,
    sequences: &[Sequence],
    row: usize,
    head: usize,
) -> (Vec<f64>, f64) {
    let owner = sequences.iter().find(|s| (s.first_row..s.first_row + s.len_q).contains(&row));
    owner.map_or_else(
        || (vec![0.0; problem.value_dim], 0.0),
        // SAFETY: the caller guarantees valid memory and a row of the results.
        |sequence| unsafe { Row { problem, sequence, i: row - sequence.first_row, head }.fp8_excess() },
    )
}

/// Query i of a sequence and one of its heads.
struct Row<'a> {
    problem: &'a Attention<'a>,
    sequence: &'a Sequence,
    i: usize,
    head: usize,
}

impl Row<'_> {
    /// The output row and its lse.
    ///
    /// # Safety
    /// As [`attend`].
    unsafe fn attend(&self) -> (Vec<f64>, f64) {
        let problem = self.problem;
        let mut out = vec![0.0; problem.value_dim];
        // SAFETY: the caller guarantees valid memory.
        let (weights, lse) = unsafe { self.weights() };
        // SAFETY: the caller guarantees that the problem's scales are readable.
        let v_scale = unsafe { self.scale(problem.v_scale) };
        // SAFETY: the caller guarantees valid memory.
        for (j, weight) in unsafe { self.visible() }.into_iter().zip(weights) {
            // SAFETY: visible keys are below `len_k`.
            let (value, scale) = unsafe { (self.row(&problem.v, j), self.row_scale(|scales| scales.v, j)) };
            for (d, o) in out.iter_mut().enumerate() {
                // SAFETY: d is below Dv, the length of a row of V.
                *o += v_scale
                    * scale
                    * weight
                    * unsafe { read(problem.kv_dtype, value.add(d * problem.kv_dtype.size())) };
            }
        }
        (out, lse)
    }

    /// The softmax weights of the visible keys, and the lse.
    ///
    /// # Safety
    /// As [`attend`].
    unsafe fn weights(&self) -> (Vec<f64>, f64) {
        // SAFETY: `sinks` is `[Hq]`.
        let sink = self.problem.score.sinks.map(|sinks| f64::from(unsafe { sinks.add(self.head).read() }));
        let sink = sink.unwrap_or(f64::NEG_INFINITY);
        // SAFETY: the caller guarantees valid memory.
        let visible = unsafe { self.visible() };
        if visible.is_empty() {
            return (Vec::new(), sink);
        }
        // SAFETY: visible keys are below `len_k`.
        let scores: Vec<f64> = visible.into_iter().map(|j| unsafe { self.score(j) }).collect();
        let largest = scores.iter().copied().fold(sink, f64::max);
        if largest == f64::NEG_INFINITY {
            // A bias of -inf hides every key.
            return (vec![0.0; scores.len()], largest);
        }
        let sum = scores.iter().map(|s| (s - largest).exp()).sum::<f64>() + (sink - largest).exp();
        (scores.into_iter().map(|s| (s - largest).exp() / sum).collect(), largest + sum.ln())
    }

    /// # Safety
    /// As [`fp8_excess`].
    unsafe fn fp8_excess(&self) -> (Vec<f64>, f64) {
        let problem = self.problem;
        let mut out = vec![0.0; problem.value_dim];
        // SAFETY: the caller guarantees valid memory, and visible keys are below `len_k`.
        let (weights, magnitude) = unsafe {
            let magnitudes = self.visible().into_iter().map(|j| self.scaled_product(j, f64::abs).abs());
            (self.weights().0, magnitudes.fold(0.0, f64::max))
        };
        let score_error = accuracy::fp8_score(problem.head_dim, magnitude);
        let smallest = accuracy::FP8_SMALL_WEIGHT * weights.iter().copied().fold(0.0, f64::max);
        // SAFETY: the caller guarantees that the problem's scales are readable.
        let v_scale = unsafe { self.scale(problem.v_scale) }.abs();
        // SAFETY: the caller guarantees valid memory.
        for (j, weight) in unsafe { self.visible() }.into_iter().zip(weights) {
            // The score's error affects the weight and the sum that divides it.
            let by_scores = (weight * (2.0 * score_error).exp_m1()).min(1.0);
            let off = (accuracy::FP8_WEIGHT * weight).max(smallest) + by_scores;
            // SAFETY: visible keys are below `len_k`.
            let value = unsafe { self.row(&problem.v, j) };
            for (d, o) in out.iter_mut().enumerate() {
                // SAFETY: d is below Dv, the length of a row of V.
                *o += v_scale * off * unsafe { read(problem.kv_dtype, value.add(d * problem.kv_dtype.size())) }.abs();
            }
        }
        (out, score_error)
    }

    /// The key position that the query is aligned with (bottom-right, top-left or by `q_offset`).
    fn position(&self) -> i64 {
        let Sequence { len_q, len_k, offset, .. } = *self.sequence;
        self.i as i64 + position_of_query_0(&self.problem.score, offset, len_q, len_k)
    }

    /// # Safety
    /// As [`attend`].
    unsafe fn visible(&self) -> Vec<usize> {
        let (score, position) = (&self.problem.score, self.position());
        let first = if score.window_left < 0 { 0 } else { position.saturating_sub(score.window_left) };
        let last = if score.window_right < 0 { i64::MAX } else { position.saturating_add(score.window_right) };
        let first = first.max(self.sequence.leftpad as i64);
        let Sequence { index, len_q, len_k, first_row, .. } = *self.sequence;
        let tree = self.problem.queries.tree.and_then(|tree| Some((tree.of_sequence(index, len_q)?, tree.query_words)));
        // A tree takes the place of the causal mask.
        let last = if tree.is_some() { i64::MAX } else { last };
        let end = last.saturating_add(1).min(len_k as i64).max(first);
        let ranges = &self.problem.queries.key_ranges;
        // SAFETY: the bounds are `[Tq]`, of which the query is one.
        let bound = |of: Option<*const i32>| of.map(|of| unsafe { of.add(first_row + self.i).read() });
        let first = bound(ranges.start).map_or(first, |start| first.max(start.into()));
        let end = bound(ranges.end).map_or(end, |bound| end.min(bound.into())).max(first);
        let is_shown = |j: &usize| {
            let (Some((words, query_words)), Ok(bit)) =
                (tree, usize::try_from(*j as i64 - len_k as i64 + len_q as i64))
            else {
                return true;
            };
            // SAFETY: the query is one of the sequence, whose words are readable; bit < len_q, which the words have room for.
            unsafe { words.add(self.i * query_words + bit / 32).read() >> (bit % 32) & 1 == 1 }
        };
        (first as usize..end as usize).filter(is_shown).collect()
    }

    /// The scaled sum of `of(q_d * k_d)` over the products of the query and key j.
    ///
    /// # Safety
    /// As [`attend`], and j is below `len_k`.
    unsafe fn scaled_product(&self, j: usize, of: impl Fn(f64) -> f64) -> f64 {
        let &Self { problem, sequence, i, head } = self;
        let (score, q, size) = (&problem.score, &problem.q, problem.kv_dtype.size());
        let query = (sequence.first_row + i) as i64 * q.stride(0) + head as i64 * q.stride(1);
        // SAFETY: the caller guarantees valid memory and a key of the sequence; d is below D.
        unsafe {
            let query = q.data.offset(query as isize * q.dtype.size() as isize);
            let key = self.row(&problem.k, j);
            let element = |d| read(q.dtype, query.add(d * q.dtype.size())) * read(problem.kv_dtype, key.add(d * size));
            let product: f64 = (0..problem.head_dim).map(|d| of(element(d))).sum();
            let k_scale = self.scale(score.k_scale) * self.row_scale(|scales| scales.k, j);
            f64::from(score.softmax_scale) * self.scale(score.q_scale) * k_scale * product
        }
    }

    /// The score of key j, with softcap, `ALiBi` and bias.
    ///
    /// # Safety
    /// As [`attend`], and j is below `len_k`.
    unsafe fn score(&self, j: usize) -> f64 {
        let &Self { problem, sequence, head, .. } = self;
        let score = &problem.score;
        // SAFETY: the caller guarantees valid memory and a key of the sequence; slopes are `[Hq]` or `[B, Hq]`.
        unsafe {
            let s = self.scaled_product(j, |x| x);
            let cap = f64::from(score.softcap);
            let s = if cap > 0.0 { cap * (s / cap).tanh() } else { s };
            let distance = (self.position() - j as i64).abs() as f64;
            let slope = |at: usize| score.alibi.map_or(0.0, |alibi| f64::from(alibi.slopes.add(at).read()));
            let is_per_sequence = score.alibi.is_some_and(|alibi| alibi.per_sequence);
            let s = s - slope(head + if is_per_sequence { sequence.index * problem.num_q_heads } else { 0 }) * distance;
            let row = score.bias.and_then(|bias| Some((bias, bias.row(sequence.index, head, self.i)?)));
            let of_key = row.filter(|(bias, _)| j < bias.keys);
            s + of_key.map_or(0.0, |(bias, row)| read(bias.dtype, row.add(j * bias.dtype.size())))
        }
    }

    fn kv_head(&self) -> usize {
        self.head / (self.problem.num_q_heads / self.problem.num_kv_heads)
    }

    /// # Safety
    /// The scale is readable.
    unsafe fn scale(&self, scale: Option<Scale>) -> f64 {
        let at = |scale: Scale| if scale.per_head { self.kv_head() } else { 0 };
        // SAFETY: `values` has one element, or with `per_head` one per KV head.
        scale.map_or(1.0, |scale| f64::from(unsafe { scale.values.add(at(scale)).read() }))
    }

    /// The address of row j of K or V.
    ///
    /// # Safety
    /// As [`attend`], and j is below `len_k`.
    unsafe fn row(&self, view: &KvView, j: usize) -> *const u8 {
        // SAFETY: this function has the same contract.
        unsafe { self.element_of_row(view, j, self.problem.kv_dtype.size()) }
    }

    /// The scale of row j of K or V, whose view is `of`; 1 of a cache without scales.
    ///
    /// # Safety
    /// As [`attend`], and j is below `len_k`.
    unsafe fn row_scale(&self, of: impl Fn(&KvScaleCache) -> KvView, j: usize) -> f64 {
        self.problem.scale_cache.as_ref().map_or(1.0, |scales| {
            // SAFETY: the caller guarantees valid memory and a key of the sequence.
            f64::from(unsafe { self.element_of_row(&of(scales), j, size_of::<f32>()).cast::<f32>().read() })
        })
    }

    /// The address of the first element of row j, in a view of elements of `size` bytes.
    ///
    /// # Safety
    /// As [`attend`], and j is below `len_k`.
    unsafe fn element_of_row(&self, view: &KvView, j: usize, size: usize) -> *const u8 {
        let sequence = self.sequence;
        let (page, token) = match self.problem.keys.storage {
            KeyStorage::Contiguous { .. } => (0, sequence.first_key + j),
            KeyStorage::Paged(table) => {
                let entry = sequence.index as isize * table.stride as isize + (j / table.page_size) as isize;
                // SAFETY: the entry is below `ceil(len_k / page_size)`.
                (i64::from(unsafe { table.entries.offset(entry).read() }), j % table.page_size)
            }
        };
        let at = page * view.page_stride + token as i64 * view.token_stride + self.kv_head() as i64 * view.head_stride;
        // SAFETY: page, token and head are within the view.
        unsafe { view.data.cast_const().offset(at as isize * size as isize) }
    }
}
