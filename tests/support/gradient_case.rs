//! Complete calls of `flash_attn_varlen_bwd`. Everything that belongs to no sequence holds NaN or infinities.
//!
//! A [`GradientCase`] is an [`AttentionCase`] over contiguous keys with the cotangents of its results. A test may
//! change the metadata of the forward case before the cotangents are drawn.

use super::summary;
use super::{
    Array, AttentionCase, AttentionConfig, Attr, Batch, ClampedSequence, Comparison, Dtype, Dtypes, ErrorBound,
    ExpectedRow, F32, ForwardResults, HeadGradients, InvalidMetadata, Invocation, KvLayout, MemoryLayout, Numbers,
    Random, ReferenceCase, U8, are_finite, clamped_sequences, differentiate, differentiate_naively, expected_rows,
    poisoned, put, runs_on_cpu,
};
use xla_attention::Op;

/// Which cotangents and gradients a call has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of the call")]
pub struct GradientOptions {
    /// Whether `softmax_lse` has a cotangent.
    pub dlse: bool,
    /// Whether `dsinks` is a result.
    pub dsinks: bool,
    /// Whether the gradient of a bias, if there is one, is a result.
    pub dbias: bool,
    pub deterministic: bool,
    /// The dtype of the gradients, f32; `None` for that of the operands.
    pub dtype: Option<Dtype>,
}

impl GradientOptions {
    pub const ALL: Self = Self { dlse: true, dsinks: true, dbias: true, deterministic: true, dtype: None };

    /// All options for seed 1, a combination of them for other seeds.
    pub fn from_seed(seed: u64) -> Self {
        Self {
            dlse: seed & 2 == 0,
            dsinks: seed & 4 == 0,
            dbias: seed % 5 != 3,
            deterministic: seed & 8 == 0,
            dtype: (seed & 16 != 0).then_some(F32),
        }
    }

    /// The gradients of `out` only.
    pub const MINIMAL: Self = Self { dlse: false, dsinks: false, dbias: false, deterministic: false, dtype: None };
}

/// A call of `flash_attn_varlen_bwd`.
#[derive(Clone, Debug)]
pub struct GradientCase {
    /// The forward call that is differentiated.
    pub forward: AttentionCase,
    pub options: GradientOptions,
    /// The reference's output, `[Tq, Hq, Dv]`.
    pub out: Array,
    /// The reference's log-sum-exp, `f32[Hq, Tq]`.
    pub lse: Array,
    /// `[Tq, Hq, Dv]`.
    pub dout: Array,
    /// `f32[Hq, Tq]`.
    pub dlse: Option<Array>,
}

impl GradientCase {
    /// The gradients of `batch` in this memory layout with contiguous keys.
    pub fn store(batch: &Batch, memory_layout: &MemoryLayout, options: GradientOptions) -> Self {
        let memory_layout = MemoryLayout { layout: KvLayout::Contiguous, ..memory_layout.clone() };
        Self::of(AttentionCase::flash(batch, &memory_layout), options)
    }

    /// The gradients of a forward call. A query's cotangents are a function of the query, so that they do not depend on
    /// its row. Operands have NaN in rows of no sequence.
    pub fn of(forward: AttentionCase, options: GradientOptions) -> Self {
        let AttentionConfig { q_heads: heads, head_dim, value_dim, dtypes, .. } = forward.config;
        let rows = forward.rows();
        let mut random = Random::new(rows as u64);
        let wide = [rows, heads, value_dim].map(|x| x as i64);
        let narrow = [heads, rows].map(|x| x as i64);
        let [mut out, mut dout] = [0, 1].map(|_| poisoned(&mut random, dtypes.out, &wide));
        let [mut lse, mut dlse] = [0, 1].map(|_| poisoned(&mut random, F32, &narrow));
        let expected_rows = expected_rows(&forward, InvalidMetadata::Clamped);
        for row in clamped_sequences(&forward).iter().flat_map(|m| m.first_row..m.first_row + m.len_q) {
            for (head, expected) in expected_rows[row].iter().enumerate() {
                let query = &forward.q_values[(row * heads + head) * head_dim..][..head_dim];
                let seed = query.iter().fold(head_dim as u64, |seed, x| seed.rotate_left(7) ^ x.to_bits());
                let mut random = Random::new(seed);
                let cotangent: Vec<f64> = (0..value_dim).map(|_| dtypes.out.round(random.normal())).collect();
                let Some(ExpectedRow { exact: forward, .. }) = expected else { continue };
                put(&mut dout, (row * heads + head) * value_dim, &cotangent);
                put(&mut out, (row * heads + head) * value_dim, &forward.out);
                put(&mut lse, head * rows + row, &[forward.lse]);
                put(&mut dlse, head * rows + row, &[F32.round(random.normal())]);
            }
        }
        Self { forward, options, out, lse, dout, dlse: options.dlse.then_some(dlse) }
    }

    /// A call with random forward results and cotangents, for tests that do not compare with the reference, which takes
    /// much longer than the call.
    pub fn of_any_results(forward: AttentionCase, options: GradientOptions) -> Self {
        let AttentionConfig { q_heads: heads, value_dim, dtypes, .. } = forward.config;
        let rows = forward.rows();
        let mut random = Random::new(rows as u64);
        let mut numbers = |dtype, dims: &[i64], offset: f64| {
            let mut array = Array::filled(dtype, dims, 0);
            let values: Vec<f64> = (0..dims.iter().product()).map(|_| offset + random.normal()).collect();
            put(&mut array, 0, &values);
            array
        };
        let wide = [rows, heads, value_dim].map(|x| x as i64);
        let narrow = [heads, rows].map(|x| x as i64);
        let [out, dout] = [0, 1].map(|_| numbers(dtypes.out, &wide, 0.0));
        // A plausible log-sum-exp of some thousand keys.
        let lse = numbers(F32, &narrow, 8.0);
        let dlse = options.dlse.then(|| numbers(F32, &narrow, 0.0));
        Self { forward, options, out, lse, dout, dlse }
    }

    pub fn invocation(&self) -> Invocation {
        let case = &self.forward;
        let operand = |name: &str| match name {
            "dout" => Some(self.dout.clone()),
            "out" => Some(self.out.clone()),
            "softmax_lse" => Some(self.lse.clone()),
            "dlse" => self.dlse.clone(),
            _ => case.operand(name),
        };
        let attribute = |name: &str| match name {
            "deterministic" => Attr::Bool(self.options.deterministic),
            _ => case.attribute(name),
        };
        let dtype = self.options.dtype.unwrap_or(case.config.dtypes.q);
        let mut call = Invocation::of(Op::FlashAttnVarlenBwd, operand, attribute)
            .result("dq", dtype, &case.q.dims)
            .result("dk", dtype, &case.kv[0].dims)
            .result("dv", dtype, &case.kv[1].dims);
        if self.options.dsinks || case.workspace.is_some() {
            let heads = if self.options.dsinks { case.config.q_heads as i64 } else { 0 };
            call = call.result("dsinks", F32, &[heads]);
        }
        if let Some(bytes) = case.workspace {
            call = call.result("workspace", U8, &[bytes as i64]);
        }
        if let Some(bias) = case.bias.as_ref().filter(|_| self.options.dbias) {
            for (name, dtype) in [("dsinks", F32), ("workspace", U8)] {
                if !call.results.iter().any(|result| result.name == name) {
                    call = call.result(name, dtype, &[0]);
                }
            }
            call = call.result("dbias", self.options.dtype.unwrap_or(bias.dtype), &bias.dims);
        }
        call.description = format!("{:?} of {}", self.options, case.name);
        call
    }

    /// Whether the output and the cotangents of all rows of a sequence are finite.
    fn has_finite_cotangents(&self, values: &Values, sequence: &ClampedSequence) -> bool {
        let AttentionConfig { q_heads, value_dim, .. } = self.forward.config;
        let elements =
            sequence.first_row * q_heads * value_dim..(sequence.first_row + sequence.len_q) * q_heads * value_dim;
        let dlse = |head: usize, dlse: &[f64]| are_finite(&dlse[head * self.forward.rows()..][sequence.rows()]);
        are_finite(&values.out[elements.clone()])
            && are_finite(&values.dout[elements])
            && values.dlse.as_ref().is_none_or(|values| (0..q_heads).all(|head| dlse(head, values)))
    }

    /// The contribution of one head of a sequence to the gradients, exact and naive.
    fn head_gradients(&self, values: &Values, sequence: &ClampedSequence, head: usize) -> [HeadGradients; 2] {
        let case = &self.forward;
        let AttentionConfig { q_heads, value_dim, dtypes, .. } = case.config;
        let packed = move |i: usize| (sequence.first_row + i) * q_heads + head;
        let (score, of) = (sequence.score(case, head), sequence.head(case, head));
        let dlse = move |i| values.dlse.as_ref().map_or(0.0, |dlse| dlse[head * case.rows() + sequence.first_row + i]);
        let results = ForwardResults {
            out: Box::new(move |i| of_row(&values.out, packed(i), value_dim)),
            dout: Box::new(move |i| of_row(&values.dout, packed(i), value_dim)),
            dlse: Box::new(dlse),
        };
        [differentiate(&of, &results, &score), differentiate_naively(&of, &results, &score, dtypes.compute())]
    }
}

/// Row `row` of rows of `d` elements.
fn of_row(all: &[f64], row: usize, d: usize) -> &[f64] {
    &all[row * d..][..d]
}

/// Operands as f64.
struct Values {
    out: Vec<f64>,
    dout: Vec<f64>,
    dlse: Option<Vec<f64>>,
}

/// The expected values of one gradient.
#[derive(Clone, Debug)]
pub struct ExpectedGradient {
    pub name: &'static str,
    /// Elements per row.
    row: usize,
    /// The values of the definition and of the naive formula.
    pub exact: Vec<f64>,
    naive: Vec<f64>,
    /// What is expected of each row.
    rows: Vec<RowExpectation>,
}

/// What is expected of one row of a gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RowExpectation {
    /// All elements are 0.
    Zero,
    /// The elements are the computed numbers, within the error bound.
    Computed,
    /// The row may hold anything.
    Any,
}

impl RowExpectation {
    /// A sequence contributes to the row.
    fn add(&mut self) {
        if *self == Self::Zero {
            *self = Self::Computed;
        }
    }
}

/// The expected dq, dk, dv, dsinks and dbias.
pub type ExpectedGradients = [ExpectedGradient; 5];

/// The expected gradients of a call.
pub fn expected_gradients(case: &GradientCase, invalid_metadata: InvalidMetadata) -> ExpectedGradients {
    let forward = &case.forward;
    let AttentionConfig { q_heads, kv_heads, head_dim, value_dim, dtypes, .. } = forward.config;
    let (rows, keys) = (forward.rows(), forward.kv_geometry.num_pages);
    let bias_dims = forward.bias.as_ref().map_or([0; 4], |bias| [0, 1, 2, 3].map(|axis| bias.dims[axis] as usize));
    let nothing = |name, count: usize, row: usize| ExpectedGradient {
        name,
        row,
        exact: vec![0.0; count * row],
        naive: vec![0.0; count * row],
        rows: vec![RowExpectation::Zero; count],
    };
    let mut expected = [
        nothing("dq", rows, q_heads * head_dim),
        nothing("dk", keys, kv_heads * head_dim),
        nothing("dv", keys, kv_heads * value_dim),
        nothing("dsinks", 1, q_heads),
        nothing("dbias", bias_dims[..3].iter().product(), bias_dims[3]),
    ];
    let numbers =
        Values { out: case.out.values(), dout: case.dout.values(), dlse: case.dlse.as_ref().map(Array::values) };
    // Keys of a sequence without queries have no gradient.
    let sequences: Vec<ClampedSequence> = clamped_sequences(forward).into_iter().filter(|m| m.len_q > 0).collect();
    for sequence in &sequences {
        let known = sequence.is_specified(invalid_metadata) && case.has_finite_cotangents(&numbers, sequence);
        let visible_keys = |i: usize| sequence.visible(forward, i);
        record_contributions(&mut expected, sequence, known, visible_keys);
        let [seqs, bias_heads, bias_rows, bias_keys] = bias_dims;
        let row_of_bias = |head: usize, i: usize| {
            let (b, h) = (if seqs == 1 { 0 } else { sequence.index }, if bias_heads == 1 { 0 } else { head });
            (b * bias_heads + h) * bias_rows + i
        };
        for (head, i) in (0..q_heads).flat_map(|head| (0..sequence.len_q.min(bias_rows)).map(move |i| (head, i))) {
            let row = &mut expected[4].rows[row_of_bias(head, i)];
            row.add();
            if !known {
                *row = RowExpectation::Any;
            }
        }
        if forward.config.sinks.is_some() {
            expected[3].rows[0].add();
        }
        for head in (0..q_heads).filter(|_| known) {
            let gradients = case.head_gradients(&numbers, sequence, head);
            for (index, HeadGradients { dq, dk, dv, dsink, dbias }) in gradients.into_iter().enumerate() {
                if !dbias.is_empty() {
                    let to = if index == 0 { &mut expected[4].exact } else { &mut expected[4].naive };
                    for (i, part) in dbias.chunks_exact(sequence.len_k).take(bias_rows).enumerate() {
                        let to = &mut to[row_of_bias(head, i) * bias_keys..][..bias_keys];
                        to.iter_mut().zip(part).for_each(|(to, x)| *to += x);
                    }
                }
                let heads = (head, forward.config.kv_head(head));
                let parts = [
                    (dq, sequence.first_row, q_heads, heads.0, head_dim),
                    (dk, sequence.first_key, kv_heads, heads.1, head_dim),
                    (dv, sequence.first_key, kv_heads, heads.1, value_dim),
                    (vec![if forward.config.sinks.is_some() { dsink } else { 0.0 }], 0, q_heads, heads.0, 1),
                ];
                for (expected, (part, first, heads, head, d)) in expected.iter_mut().zip(parts) {
                    let to = if index == 0 { &mut expected.exact } else { &mut expected.naive };
                    for (i, part) in part.chunks_exact(d).enumerate() {
                        let to = &mut to[((first + i) * heads + head) * d..][..d];
                        to.iter_mut().zip(part).for_each(|(to, x)| *to += x);
                    }
                }
            }
        }
    }
    // The naive formula would store the sum over the heads of a group in an array, too.
    for index in [1, 2, 4] {
        for x in &mut expected[index].naive {
            *x = dtypes.out.round(*x);
        }
    }
    expected
}

/// Records to which rows a sequence contributes, and that they may hold anything if it is not `known`.
fn record_contributions(
    expected: &mut ExpectedGradients,
    sequence: &ClampedSequence,
    known: bool,
    visible_keys: impl Fn(usize) -> Vec<usize>,
) {
    let [dq, dk, dv, dsinks, _] = expected;
    for i in 0..sequence.len_q {
        let visible = visible_keys(i);
        if !visible.is_empty() {
            dq.rows[sequence.first_row + i].add();
        }
        for j in visible {
            dk.rows[sequence.first_key + j].add();
            dv.rows[sequence.first_key + j].add();
        }
    }
    if !known {
        dq.rows[sequence.first_row..][..sequence.len_q].fill(RowExpectation::Any);
        dk.rows[sequence.first_key..][..sequence.len_k].fill(RowExpectation::Any);
        dv.rows[sequence.first_key..][..sequence.len_k].fill(RowExpectation::Any);
        dsinks.rows[0] = RowExpectation::Any;
    }
}

impl ExpectedGradient {
    /// The elements of rows with an expected value.
    fn specified(&self) -> impl Iterator<Item = usize> {
        (0..self.exact.len()).filter(|i| self.rows[i / self.row] != RowExpectation::Any)
    }

    /// The bound of `docs/semantics.md#error-bounds`. `floor` is relative to the largest expected value. Of a few numbers, as
    /// dsinks of few heads are, the naive formula's error says little, so two roundings are allowed besides.
    fn error_bound(&self, floor: f64, dtypes: Dtypes) -> ErrorBound {
        let floor = if self.specified().take(4).count() < 4 { floor + 2.0 * dtypes.rounding() } else { floor };
        ErrorBound::of_numbers(self.specified().map(|i| (self.exact[i], self.naive[i])), 3.0, floor)
    }

    /// Asserts that `actual` matches. Returns the largest error.
    fn assert_within(&self, case: &AttentionCase, error_bound: ErrorBound, actual: &Array) -> f64 {
        let (actual, mut largest) = (actual.values(), 0.0f64);
        assert_eq!(actual.len(), self.exact.len(), "{}: {}", case.name, self.name);
        for i in self.specified() {
            let (row, off) = (i / self.row, (actual[i] - self.exact[i]).abs());
            let off = if off.is_nan() { f64::INFINITY } else { off };
            let zero = self.rows[row] == RowExpectation::Zero;
            assert!(!zero || actual[i] == 0.0, "{}: {} of row {row} is {}, not 0", case.name, self.name, actual[i]);
            assert!(
                off <= error_bound.limit(),
                "{}: {} of row {row}, element {} is {}, expected {} (allowed {:e})",
                case.name,
                self.name,
                i % self.row,
                actual[i],
                self.exact[i],
                error_bound.limit()
            );
            largest = largest.max(off);
        }
        largest
    }
}

/// Asserts that the results of a call match. `floor` is relative to the largest expected value of each gradient. The
/// error goes into the summary.
pub fn assert_gradients(case: &GradientCase, expected: &ExpectedGradients, results: &[Array], floor: f64) {
    for (result, actual) in case.invocation().results.iter().zip(results) {
        let Some(gradient) = expected.iter().find(|of| of.name == result.name) else { continue };
        if result.dims == [0] {
            continue;
        }
        let error_bound = gradient.error_bound(floor, case.forward.config.dtypes);
        let largest = gradient.assert_within(&case.forward, error_bound, actual);
        summary::record(&case.forward.name, case.forward.config.dtypes, largest, error_bound);
    }
}

impl ReferenceCase for GradientCase {
    fn case(&self) -> &AttentionCase {
        &self.forward
    }

    fn case_mut(&mut self) -> &mut AttentionCase {
        &mut self.forward
    }

    fn call(&self) -> Invocation {
        self.invocation()
    }

    fn computed(&self, results: &[Array]) -> Vec<Array> {
        results.iter().filter(|result| result.dtype != U8 && result.dims != [0]).cloned().collect()
    }

    fn comparison(&self, invalid_metadata: InvalidMetadata) -> Comparison<'_> {
        let expected = expected_gradients(self, invalid_metadata);
        Box::new(move |actual| assert_gradients(self, &expected, actual, 1e-4))
    }

    fn is_deterministic(&self) -> bool {
        self.options.deterministic || runs_on_cpu()
    }
}
