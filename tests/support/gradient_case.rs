//! Complete calls for the gradients of attention, with everything that belongs to no sequence poisoned.
//!
//! A call is what a [`Case`] over contiguous keys computes, with the cotangents of its results. Its metadata may be
//! changed before the cotangents are drawn, and so be hostile.

use super::summary;
use super::{
    Allowance, Allowed, Array, Attr, Batch, Case, Checked, F32, Form, HeadGradients, IfWrong, Invocation, Judge,
    Layout, Member, Numbers, Random, Results, Storage, U8, answers, are_finite, differentiate, differentiate_naively,
    members, poisoned, put, runs_on_cpu,
};
use xla_attention::Op;

/// What a call for gradients is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// `softmax_lse` has a cotangent.
    pub dlse: bool,
    /// `dsinks` is a result.
    pub dsinks: bool,
    pub deterministic: bool,
}

impl Wanted {
    pub const ALL: Self = Self { dlse: true, dsinks: true, deterministic: true };

    /// All for seed 1, any for another.
    pub fn drawn(seed: u64) -> Self {
        Self { dlse: seed & 2 == 0, dsinks: seed & 4 == 0, deterministic: seed & 8 == 0 }
    }

    /// The gradients of `out` alone.
    pub const LEAST: Self = Self { dlse: false, dsinks: false, deterministic: false };
}

/// A call.
#[derive(Clone, Debug)]
pub struct GradientCase {
    /// The call whose gradients are wanted.
    pub forward: Case,
    pub wanted: Wanted,
    /// `[Tq, Hq, Dv]`, as the reference has it.
    pub out: Array,
    /// `f32[Hq, Tq]`, likewise.
    pub lse: Array,
    /// `[Tq, Hq, Dv]`
    pub dout: Array,
    /// `f32[Hq, Tq]`
    pub dlse: Option<Array>,
}

impl GradientCase {
    /// Lay `batch` out as `storage` says, over contiguous keys.
    pub fn store(batch: &Batch, storage: &Storage, wanted: Wanted) -> Self {
        let storage = Storage { layout: Layout::Contiguous, ..storage.clone() };
        Self::of(Case::flash(batch, &storage), wanted)
    }

    /// The gradients of a call. A query's cotangents are drawn from the query itself, so that they go with it wherever
    /// it lies. Rows of no sequence are NaN in all that the call is given.
    pub fn of(forward: Case, wanted: Wanted) -> Self {
        let Form { q_heads: heads, head_dim, value_dim, dtypes, .. } = forward.form;
        let rows = forward.rows();
        let mut random = Random::new(rows as u64);
        let wide = [rows, heads, value_dim].map(|x| x as i64);
        let narrow = [heads, rows].map(|x| x as i64);
        let [mut out, mut dout] = [0, 1].map(|_| poisoned(&mut random, dtypes.out, &wide));
        let [mut lse, mut dlse] = [0, 1].map(|_| poisoned(&mut random, F32, &narrow));
        let answers = answers(&forward, IfWrong::Clamped);
        for row in members(&forward).iter().flat_map(|m| m.first_row..m.first_row + m.len_q) {
            for (head, answer) in answers[row].iter().enumerate() {
                let query = &forward.q_values[(row * heads + head) * head_dim..][..head_dim];
                let seed = query.iter().fold(head_dim as u64, |seed, x| seed.rotate_left(7) ^ x.to_bits());
                let mut random = Random::new(seed);
                let cotangent: Vec<f64> = (0..value_dim).map(|_| dtypes.out.round(random.normal())).collect();
                let Some(Allowed { exact: forward, .. }) = answer else { continue };
                put(&mut dout, (row * heads + head) * value_dim, &cotangent);
                put(&mut out, (row * heads + head) * value_dim, &forward.out);
                put(&mut lse, head * rows + row, &[forward.lse]);
                put(&mut dlse, head * rows + row, &[F32.round(random.normal())]);
            }
        }
        Self { forward, wanted, out, lse, dout, dlse: wanted.dlse.then_some(dlse) }
    }

    /// A call with any results of the forward pass and any cotangents: for what does not compare with the reference, which
    /// takes much longer than the call.
    pub fn of_any_results(forward: Case, wanted: Wanted) -> Self {
        let Form { q_heads: heads, value_dim, dtypes, .. } = forward.form;
        let rows = forward.rows();
        let mut random = Random::new(rows as u64);
        let mut numbers = |dtype, dims: &[i64], least: f64| {
            let mut array = Array::filled(dtype, dims, 0);
            let values: Vec<f64> = (0..dims.iter().product()).map(|_| least + random.normal()).collect();
            put(&mut array, 0, &values);
            array
        };
        let wide = [rows, heads, value_dim].map(|x| x as i64);
        let narrow = [heads, rows].map(|x| x as i64);
        let [out, dout] = [0, 1].map(|_| numbers(dtypes.out, &wide, 0.0));
        // Of a sum of some thousand weights.
        let lse = numbers(F32, &narrow, 8.0);
        let dlse = wanted.dlse.then(|| numbers(F32, &narrow, 0.0));
        Self { forward, wanted, out, lse, dout, dlse }
    }

    /// The call.
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
            "deterministic" => Attr::Bool(self.wanted.deterministic),
            _ => case.attribute(name),
        };
        let dtype = case.form.dtypes.q;
        let mut call = Invocation::of(Op::FlashAttnVarlenBwd, operand, attribute)
            .result("dq", dtype, &case.q.dims)
            .result("dk", dtype, &case.kv[0].dims)
            .result("dv", dtype, &case.kv[1].dims);
        if self.wanted.dsinks || case.workspace.is_some() {
            let heads = if self.wanted.dsinks { case.form.q_heads as i64 } else { 0 };
            call = call.result("dsinks", F32, &[heads]);
        }
        if let Some(bytes) = case.workspace {
            call = call.result("workspace", U8, &[bytes as i64]);
        }
        call.what = format!("{:?} of {}", self.wanted, case.name);
        call
    }

    /// All that comes back to the rows of a sequence are numbers.
    fn has_finite_cotangents(&self, values: &Values, member: &Member) -> bool {
        let Form { q_heads, value_dim, .. } = self.forward.form;
        let elements = member.first_row * q_heads * value_dim..(member.first_row + member.len_q) * q_heads * value_dim;
        let dlse = |head: usize, dlse: &[f64]| are_finite(&dlse[head * self.forward.rows()..][member.rows()]);
        are_finite(&values.out[elements.clone()])
            && are_finite(&values.dout[elements])
            && values.dlse.as_ref().is_none_or(|values| (0..q_heads).all(|head| dlse(head, values)))
    }

    /// What a head of a sequence adds, exactly and naively.
    fn head_gradients(&self, values: &Values, member: &Member, head: usize) -> [HeadGradients; 2] {
        let case = &self.forward;
        let Form { q_heads, value_dim, dtypes, .. } = case.form;
        let packed = move |i: usize| (member.first_row + i) * q_heads + head;
        let (score, of) = (member.score(case, head), member.head(case, head));
        let dlse = move |i| values.dlse.as_ref().map_or(0.0, |dlse| dlse[head * case.rows() + member.first_row + i]);
        let results = Results {
            out: Box::new(move |i| of_row(&values.out, packed(i), value_dim)),
            dout: Box::new(move |i| of_row(&values.dout, packed(i), value_dim)),
            dlse: Box::new(dlse),
        };
        [differentiate(&of, &results, &score), differentiate_naively(&of, &results, &score, dtypes.compute())]
    }
}

/// Row `row` of rows of `d` numbers.
fn of_row(all: &[f64], row: usize, d: usize) -> &[f64] {
    &all[row * d..][..d]
}

/// The operands of a call as numbers.
struct Values {
    out: Vec<f64>,
    dout: Vec<f64>,
    dlse: Option<Vec<f64>>,
}

/// What may stand in one result.
#[derive(Clone, Debug)]
pub struct Expected {
    pub name: &'static str,
    /// Elements of a row.
    row: usize,
    /// Exactly, and as the naive formula has it.
    pub exact: Vec<f64>,
    naive: Vec<f64>,
    /// Of each row.
    rows: Vec<Say>,
}

/// What is said of a row of a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Say {
    /// All of it is 0.
    Zero,
    /// It is what was computed, or nearly.
    Number,
    /// It may hold anything.
    Nothing,
}

impl Say {
    /// Something was added to the row.
    fn add(&mut self) {
        if *self == Self::Zero {
            *self = Self::Number;
        }
    }
}

/// dq, dk, dv, dsinks.
pub type GradientAnswers = [Expected; 4];

/// What a call for gradients has to give.
pub fn gradient_answers(case: &GradientCase, if_wrong: IfWrong) -> GradientAnswers {
    let forward = &case.forward;
    let Form { q_heads, kv_heads, head_dim, value_dim, dtypes, mask, .. } = forward.form;
    let (rows, keys) = (forward.rows(), forward.place.num_pages);
    let nothing = |name, count: usize, row: usize| Expected {
        name,
        row,
        exact: vec![0.0; count * row],
        naive: vec![0.0; count * row],
        rows: vec![Say::Zero; count],
    };
    let mut expected = [
        nothing("dq", rows, q_heads * head_dim),
        nothing("dk", keys, kv_heads * head_dim),
        nothing("dv", keys, kv_heads * value_dim),
        nothing("dsinks", 1, q_heads),
    ];
    let numbers =
        Values { out: case.out.values(), dout: case.dout.values(), dlse: case.dlse.as_ref().map(Array::values) };
    // The keys of a sequence without a query have no gradient.
    let members: Vec<Member> = members(forward).into_iter().filter(|m| m.len_q > 0).collect();
    for member in &members {
        let known = member.is_said(if_wrong) && case.has_finite_cotangents(&numbers, member);
        let seen = |i: usize| mask.visible(i, member.len_q, member.len_k, member.leftpad);
        say(&mut expected, member, known, seen);
        if forward.form.sinks.is_some() {
            expected[3].rows[0].add();
        }
        for head in (0..q_heads).filter(|_| known) {
            let gradients = case.head_gradients(&numbers, member, head);
            for (index, HeadGradients { dq, dk, dv, dsink }) in gradients.into_iter().enumerate() {
                let heads = (head, forward.form.kv_head(head));
                let parts = [
                    (dq, member.first_row, q_heads, heads.0, head_dim),
                    (dk, member.first_key, kv_heads, heads.1, head_dim),
                    (dv, member.first_key, kv_heads, heads.1, value_dim),
                    (vec![if forward.form.sinks.is_some() { dsink } else { 0.0 }], 0, q_heads, heads.0, 1),
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
    // A sum over the heads of a group is an array too.
    for Expected { naive, .. } in &mut expected[1..3] {
        for x in naive {
            *x = dtypes.out.round(*x);
        }
    }
    expected
}

/// Which rows a sequence adds something to, or spoils.
fn say(expected: &mut GradientAnswers, member: &Member, known: bool, seen: impl Fn(usize) -> std::ops::Range<usize>) {
    let [dq, dk, dv, dsinks] = expected;
    for i in 0..member.len_q {
        let visible = seen(i);
        if !visible.is_empty() {
            dq.rows[member.first_row + i].add();
        }
        for j in visible {
            dk.rows[member.first_key + j].add();
            dv.rows[member.first_key + j].add();
        }
    }
    if !known {
        dq.rows[member.first_row..][..member.len_q].fill(Say::Nothing);
        dk.rows[member.first_key..][..member.len_k].fill(Say::Nothing);
        dv.rows[member.first_key..][..member.len_k].fill(Say::Nothing);
        dsinks.rows[0] = Say::Nothing;
    }
}

impl Expected {
    /// The elements of rows of which something is said.
    fn said(&self) -> impl Iterator<Item = usize> {
        (0..self.exact.len()).filter(|i| self.rows[i / self.row] != Say::Nothing)
    }

    /// As `docs/semantics.md#error-bounds` has it; the floor is this share of the largest answer.
    fn allowance(&self, floor: f64) -> Allowance {
        Allowance::of_numbers(self.said().map(|i| (self.exact[i], self.naive[i])), 3.0, floor)
    }

    /// `found` is what is expected; the largest error.
    fn assert_within(&self, case: &Case, allowance: Allowance, found: &Array) -> f64 {
        let (found, mut largest) = (found.values(), 0.0f64);
        assert_eq!(found.len(), self.exact.len(), "{}: {}", case.name, self.name);
        for i in self.said() {
            let (row, off) = (i / self.row, (found[i] - self.exact[i]).abs());
            let off = if off.is_nan() { f64::INFINITY } else { off };
            let zero = self.rows[row] == Say::Zero;
            assert!(!zero || found[i] == 0.0, "{}: {} of row {row} is {}, not 0", case.name, self.name, found[i]);
            assert!(
                off <= allowance.most(),
                "{}: {} of row {row}, element {} is {}, expected {} (allowed {:e})",
                case.name,
                self.name,
                i % self.row,
                found[i],
                self.exact[i],
                allowance.most()
            );
            largest = largest.max(off);
        }
        largest
    }
}

/// A call's results are what `answers` allow, with this floor as a share of the largest one. The error goes into the summary.
pub fn assert_gradients(case: &GradientCase, answers: &GradientAnswers, results: &[Array], floor: f64) {
    for (found, expected) in case.computed(results).iter().zip(answers) {
        let allowance = expected.allowance(floor);
        let largest = expected.assert_within(&case.forward, allowance, found);
        summary::record(&case.forward.name, case.forward.form.dtypes, largest, allowance);
    }
}

impl Checked for GradientCase {
    fn case(&self) -> &Case {
        &self.forward
    }

    fn case_mut(&mut self) -> &mut Case {
        &mut self.forward
    }

    fn call(&self) -> Invocation {
        self.invocation()
    }

    fn judge(&self, if_wrong: IfWrong) -> Judge<'_> {
        let answers = gradient_answers(self, if_wrong);
        Box::new(move |found| assert_gradients(self, &answers, found, 1e-4))
    }

    fn repeats(&self) -> bool {
        self.wanted.deterministic || runs_on_cpu()
    }
}
