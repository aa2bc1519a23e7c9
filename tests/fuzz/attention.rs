//! Calls of the attention operators: forward, fused with the update of the cache, and backward.

use crate::draw::Draw;
use crate::memory::Subject;
use crate::support::{
    ATTENTION_DTYPES, Alibi, Allowance, Array, BF16, Case, Dtypes, F8E4M3FN, F16, F32, FP8_DTYPES, Form, GradientCase,
    IfWrong, Invocation, LARGEST, Layout, Mask, Member, Numbers, Place, Step, Wanted, answers_of, assert_gradients,
    assert_same, assert_within, gradient_answers, members, runs_on_cpu,
};
use std::collections::HashSet;
use xla_attention::Op;

/// How large a call may be: multiplications of the definition, elements of an operand, rows, keys.
struct Limits {
    work: usize,
    elements: usize,
    rows: usize,
    keys: usize,
}

impl Limits {
    fn draw(draw: &mut Draw) -> Self {
        match draw.random.below(1000) {
            0..=749 => Self { work: 12_000, elements: 4_000, rows: 9, keys: 24 },
            750..=984 => Self { work: 100_000, elements: 20_000, rows: 40, keys: 90 },
            985..=998 => Self { work: 2_000_000, elements: 200_000, rows: 300, keys: 900 },
            _ => Self { work: 10_000_000, elements: 2_000_000, rows: 700, keys: 9000 },
        }
    }
}

/// What the operators of attention share.
struct Sizes {
    form: Form,
    alibi: Alibi,
    rows: usize,
    slots: usize,
    /// Rows of contiguous keys, or the most that a table may name.
    keys: usize,
    elements: usize,
}

impl Sizes {
    fn draw(draw: &mut Draw, dtypes: Dtypes, mask: Mask, own_value_dim: bool) -> Self {
        let limits = Limits::draw(draw);
        let kv_heads = draw.between(1, 3);
        let q_heads = kv_heads * draw.one_of(&[1, 1, 2, 3, 4, 5, 8, 17]);
        let head_dim = draw.head_dim();
        let value_dim = if own_value_dim && draw.chance(40) { draw.head_dim() } else { head_dim };
        // Few rows over many keys, many rows, or neither.
        let rows = if draw.chance(40) { draw.between(0, 4) } else { draw.between(0, limits.rows) };
        let mut rows = rows.min(limits.elements / (q_heads * head_dim.max(value_dim)));
        let mut keys = draw.between(0, limits.keys).min(limits.elements / (kv_heads * (head_dim + value_dim)));
        while rows * keys * q_heads * (head_dim + value_dim) > limits.work {
            *(if keys > 2 * rows { &mut keys } else { &mut rows }) /= 2;
        }
        let slots = draw.between(0, 7);
        let alibi = draw.one_of(&[Alibi::Off, Alibi::Off, Alibi::Off, Alibi::PerHead, Alibi::PerSequence]);
        let sinks = draw.f32s(q_heads, |random| 1.0 + 2.0 * random.normal());
        let usual_scale = (head_dim as f32).sqrt().recip();
        let form = Form {
            dtypes,
            q_heads,
            kv_heads,
            head_dim,
            value_dim,
            softmax_scale: draw.one_of(&[usual_scale, usual_scale, 0.03, if head_dim > 32 { 0.2 } else { 1.0 }]),
            mask,
            softcap: draw.one_of(&[0.0, 0.0, 0.0, 5.0]),
            sinks: draw.chance(25).then_some(sinks),
            q_scale: None,
            k_scale: None,
            v_scale: None,
            batch_invariant: draw.chance(30),
        };
        Self { form, alibi, rows, slots, keys, elements: limits.elements }
    }

    fn slopes(&self, draw: &mut Draw) -> Option<Vec<f32>> {
        let count = self.form.q_heads * if self.alibi == Alibi::PerSequence { self.slots } else { 1 };
        let slopes = draw.f32s(count, |random| random.one_of(&[0.5, 0.25, 0.0625, 0.0039, 0.7, 1.0, 0.0, -0.0039]));
        (self.alibi != Alibi::Off).then_some(slopes)
    }

    fn queries(&self, draw: &mut Draw) -> Array {
        draw.numbers(self.form.dtypes.q, &[self.rows, self.form.q_heads, self.form.head_dim])
    }
}

/// Where keys and values lie, and their numbers.
struct Stored {
    place: Place,
    kv: Vec<Array>,
    max_pages: usize,
    block_table: Vec<i32>,
}

impl Stored {
    fn draw(draw: &mut Draw, sizes: &Sizes, layout: Layout) -> Self {
        let form = &sizes.form;
        let mut place = Place {
            layout,
            num_pages: sizes.keys,
            page_size: 1,
            kv_heads: form.kv_heads,
            dims: [form.head_dim, form.value_dim],
        };
        let (mut max_pages, mut block_table) = (0, Vec::new());
        if layout != Layout::Contiguous {
            place.page_size = draw.one_of(&[1, 2, 3, 4, 8, 16, 16, 17, 32, 64]).min((2 * sizes.keys).max(1));
            let row = form.kv_heads * (form.head_dim + form.value_dim);
            let most = (sizes.elements / (row * place.page_size)).min(2 * sizes.keys.div_ceil(place.page_size) + 2);
            place.num_pages = draw.between(0, most);
            max_pages = draw.between(0, sizes.keys.div_ceil(place.page_size));
            block_table = draw.pages(sizes.slots * max_pages, place.num_pages);
        }
        let dims = |shape: &Vec<i64>| -> Vec<usize> { shape.iter().map(|&d| d as usize).collect() };
        let kv = place.shapes().iter().map(|shape| draw.numbers(form.dtypes.kv, &dims(shape))).collect();
        Self { place, kv, max_pages, block_table }
    }

    /// The most keys that a sequence may have.
    fn capacity(&self) -> usize {
        match self.place.layout {
            Layout::Contiguous => self.place.num_pages,
            _ if self.place.num_pages == 0 => 0,
            _ => self.max_pages * self.place.page_size,
        }
    }
}

fn any_mask(draw: &mut Draw) -> Mask {
    Mask {
        causal: draw.chance(50),
        window_left: draw.one_of(&[-1, -1, 0, 1, 5, 1 << 62, i64::MAX]),
        window_right: draw.one_of(&[-1, -1, 0, 3, i64::MAX]),
        top_left: draw.chance(30),
    }
}

/// A call with metadata for it. Without `paged`, it has what `flash_attn_varlen` alone has.
fn case(draw: &mut Draw, target: Op, sizes: &Sizes, stored: Stored) -> Case {
    let paged = target == Op::PagedAttention;
    let (slots, capacity) = (sizes.slots, stored.capacity());
    let q = sizes.queries(draw);
    let cu_seqlens_q = draw.starts(slots + 1, sizes.rows);
    let lengths = |draw: &mut Draw, percent: usize, limit: usize| {
        let lengths = draw.lengths(slots, limit);
        draw.chance(percent).then_some(lengths)
    };
    let seqused_k = lengths(draw, if paged { 100 } else { 50 }, capacity);
    let seqused_q = lengths(draw, if paged { 0 } else { 30 }, sizes.rows);
    let leftpad_k = lengths(draw, if paged { 0 } else { 30 }, capacity);
    let is_read = stored.place.layout == Layout::Contiguous || seqused_k.is_none();
    // Without a sequence an empty seqused_k is as good as none; then the starts have the right size.
    let starts = if is_read || slots == 0 { slots + 1 } else { draw.between(0, slots + 3) };
    let cu_seqlens_k = if starts == 0 { Vec::new() } else { draw.starts(starts, capacity) };
    let num_seqs = if draw.chance(50) { slots as i32 } else { draw.lengths(1, slots)[0] };
    Case {
        name: String::new(),
        target,
        form: sizes.form.clone(),
        place: stored.place,
        max_pages: stored.max_pages,
        q_values: q.values(),
        kv_values: stored.kv.iter().map(Array::values).collect(),
        q,
        kv: stored.kv,
        cu_seqlens_q,
        num_seqs,
        seqused_q,
        cu_seqlens_k,
        seqused_k,
        leftpad_k,
        block_table: stored.block_table,
        alibi_slopes: sizes.slopes(draw),
        alibi: sizes.alibi,
        hints: (draw.one_of(&[0, 0, 1, 1 << 62]), draw.one_of(&[0, 0, 1, 1 << 62])),
        lse: !paged || draw.chance(50),
        workspace: {
            let bytes = draw.one_of(&[0, 40, 1000, 100_000]);
            draw.chance(30).then_some(bytes)
        },
    }
}

fn with_scales(draw: &mut Draw, mut sizes: Sizes) -> Sizes {
    let heads = sizes.form.kv_heads;
    (sizes.form.q_scale, sizes.form.k_scale) = (draw.scale(heads), draw.scale(heads));
    sizes.form.v_scale = draw.scale(heads);
    sizes
}

/// How far off an output may be where the naive formula is not off at all, as a share of the largest one.
/// `docs/semantics.md#error-bounds` measures by the largest error of the naive formula; where a call has a row or two,
/// that may be none by luck. So there are two roundings of the output's type for the weights and the output, and one of
/// fp8's where weights may be fp8.
fn floor(dtypes: Dtypes) -> f64 {
    let rounding = match dtypes.out {
        F16 => 2f64.powi(-11),
        BF16 => 2f64.powi(-8),
        _ => 0.0,
    };
    let of_fp8 = if dtypes.q == F8E4M3FN && !runs_on_cpu() { 2f64.powi(-4) } else { 0.0 };
    3e-5 + 2.0 * rounding + of_fp8
}

/// Every row of `out` and `softmax_lse` is written, those of no sequence with 0 and -inf, those of a sequence of which
/// something is said with what the definition gives.
fn check(case: &Case, is_said: impl Fn(&Member) -> bool, out: &Array, lse: Option<&Array>) {
    let members = members(case);
    let answers = answers_of(case, &members, is_said);
    let allowance = Allowance::of(answers.iter().flatten().flatten(), floor(case.form.dtypes));
    assert_within(case, &answers, allowance, out, lse);
    let row = out.bytes.len() / case.rows().max(1);
    for padding in (0..case.rows()).filter(|row| !members.iter().any(|m| m.rows().contains(row))) {
        let zero = out.bytes[padding * row..(padding + 1) * row].iter().all(|&b| b == 0);
        assert!(zero, "{}: row {padding} is of no sequence and not +0", case.name);
    }
}

/// `flash_attn_varlen` and `paged_attention`.
pub(crate) fn forward(draw: &mut Draw, target: Op) -> Subject {
    let paged = target == Op::PagedAttention;
    let (mask, layout) = if paged {
        (sliding(draw), Layout::Interleaved)
    } else {
        let layout = if draw.chance(40) { Layout::Contiguous } else { draw.one_of(&Layout::PAGED) };
        (any_mask(draw), layout)
    };
    let dtypes = draw.one_of(&Dtypes::ALL);
    let sizes = Sizes::draw(draw, dtypes, mask, layout.has_two_buffers());
    let sizes = with_scales(draw, sizes);
    let stored = Stored::draw(draw, &sizes, layout);
    let case = case(draw, target, &sizes, stored);
    let call = case.invocation();
    let again = (draw.wild && draw.chance(25)).then(|| isolated(draw, &case));
    let subject = Subject::new(call, {
        let case = case.clone();
        move |found| {
            let said = |m: &Member| m.is_said(IfWrong::Clamped);
            check(&case, said, &found[0], case.lse.then(|| &found[1]));
        }
    });
    match again {
        Some(call) => subject.and(call, move |first, second| assert_isolated(&case, first, second)),
        None => subject,
    }
}

fn sliding(draw: &mut Draw) -> Mask {
    // A window of W keys counts the query's own, so that 2^62 of them begin one less before it.
    Mask { window_left: draw.one_of(&[-1, -1, 0, 1, 6, (1 << 62) - 1]), ..Mask::CAUSAL }
}

/// The same call with other special numbers in place of those that are not finite.
fn isolated(draw: &mut Draw, case: &Case) -> Invocation {
    let mut other = case.clone();
    let mut exchange = |array: &mut Array| {
        let (dtype, size) = (array.dtype, array.dtype.size());
        let nan = dtype.encode(f64::NAN);
        let sign = draw.random.below(2) as u8 * 0x80;
        for element in array.bytes.chunks_exact_mut(size) {
            let value = dtype.decode(element);
            if value.is_nan() || value.abs() > LARGEST {
                // NaN for infinities and infinities, or what is next to them, for NaN.
                let new = if value.is_nan() { dtype.encode(f64::INFINITY) } else { nan.clone() };
                element.copy_from_slice(&new);
                element[size - 1] |= sign;
            }
        }
    };
    exchange(&mut other.q);
    other.kv.iter_mut().for_each(exchange);
    other.invocation()
}

/// What is not finite has no effect on any but its own sequences: the bits of the others are those of the other call.
fn assert_isolated(case: &Case, first: &[Array], second: &[Array]) {
    let members = members(case);
    let rows = case.rows();
    let own = |row: &usize| members.iter().any(|m| !m.finite && m.rows().contains(row));
    for row in (0..rows).filter(|row| !own(row)) {
        let bytes = first[0].bytes.len() / rows;
        let of = |found: &[Array]| found[0].bytes[row * bytes..(row + 1) * bytes].to_vec();
        assert!(of(first) == of(second), "row {row} sees numbers of another sequence");
        for head in (0..case.form.q_heads).filter(|_| case.lse) {
            let of = |found: &[Array]| found[1].bytes[(head * rows + row) * 4..][..4].to_vec();
            assert!(of(first) == of(second), "the lse of row {row} sees numbers of another sequence");
        }
    }
}

/// `paged_attention_update`.
pub(crate) fn update(draw: &mut Draw) -> Subject {
    let (mask, dtypes) = (sliding(draw), draw.one_of(&Dtypes::ALL));
    let sizes = Sizes::draw(draw, dtypes, mask, false);
    let sizes = with_scales(draw, sizes);
    let stored = Stored::draw(draw, &sizes, Layout::Interleaved);
    let mut case = case(draw, Op::PagedAttention, &sizes, stored);
    case.lse = draw.chance(50);
    let dtype = if FP8_DTYPES.contains(&dtypes.kv) { draw.one_of(&ATTENTION_DTYPES) } else { dtypes.kv };
    let rows = [sizes.rows, sizes.form.kv_heads, sizes.form.head_dim];
    let (key, value) = (draw.numbers(dtype, &rows), draw.numbers(dtype, &rows));
    let wide_slots = draw.chance(50);
    let slots = slots_of(draw, &case, wide_slots);
    let before = case.kv[0].clone();
    let mut step = Step { case, before, key, value, slots, wide_slots };
    step.update();
    let call = step.invocation(draw.chance(60));
    Subject::new(call, move |found| {
        let case = &step.case;
        assert_same("the cache", &found[1], step.cache());
        let taken = taken(&step);
        let said = |m: &Member| m.is_said(IfWrong::Clamped) && reads_its_own(&step, m, &taken);
        check(case, said, &found[0], case.lse.then(|| &found[2]));
    })
}

/// The slots of the rows: each its key's place, and another or none now and then; never one twice.
fn slots_of(draw: &mut Draw, case: &Case, wide: bool) -> Vec<i64> {
    let total = case.place.num_pages * case.place.page_size;
    let mut slots = draw.slots(case.rows(), total, wide);
    if draw.hostile && draw.chance(30) {
        return slots;
    }
    for member in members(case) {
        for (i, row) in member.rows().enumerate() {
            slots[row] = key_of(&member, i).map_or(-1, |j| member.slot(case, j) as i64);
        }
    }
    let mut seen = HashSet::new();
    for slot in &mut slots {
        if (0..total as i64).contains(slot) && !seen.insert(*slot) {
            *slot = -1;
        }
    }
    slots
}

/// The key that comes with query i of a sequence.
fn key_of(member: &Member, i: usize) -> Option<usize> {
    (i + member.len_k).checked_sub(member.len_q)
}

/// Which row writes a slot.
fn taken(step: &Step) -> Vec<Option<usize>> {
    let mut taken = vec![None; step.case.place.num_pages * step.case.place.page_size];
    for (row, &slot) in step.slots.iter().enumerate() {
        if let Some(taken) = usize::try_from(slot).ok().and_then(|slot| taken.get_mut(slot)) {
            *taken = Some(row);
        }
    }
    taken
}

/// Each row of the sequence writes the place of its key, and no other row writes a key of it. What is computed is
/// unspecified otherwise (`src/problem/paged_attention_update.rs`).
fn reads_its_own(step: &Step, member: &Member, taken: &[Option<usize>]) -> bool {
    let rows = || member.rows().enumerate();
    (0..member.len_k).all(|j| {
        let row = rows().find(|(i, _)| key_of(member, *i) == Some(j)).map(|(_, row)| row);
        taken[member.slot(&step.case, j)] == row
    })
}

/// `flash_attn_varlen_bwd`.
pub(crate) fn backward(draw: &mut Draw) -> Subject {
    let (mask, dtype) = (any_mask(draw), draw.one_of(&[F32, F32, F16, BF16]));
    let sizes = Sizes::draw(draw, Dtypes::same(dtype), mask, true);
    let stored = Stored::draw(draw, &sizes, Layout::Contiguous);
    let case = case(draw, Op::FlashAttnVarlen, &sizes, stored);
    let wanted = Wanted { dlse: draw.chance(30), dsinks: draw.chance(40), deterministic: draw.chance(50) };
    let mut gradients = GradientCase::of(case, wanted);
    if draw.wild && draw.chance(30) {
        draw.make_wild(&mut gradients.dout);
    }
    let call = gradients.invocation();
    Subject::new(call, move |found| {
        let answers = gradient_answers(&gradients, IfWrong::Clamped);
        // The gradient of a weight is the difference of two sums of Dv rounded products, and there may be but one.
        let Form { dtypes, softmax_scale, value_dim, .. } = gradients.forward.form;
        let sums = 1.0 + f64::from(softmax_scale) * (value_dim as f64).sqrt();
        let floor = (1e-4 + 2.0 * floor(dtypes)) * sums;
        assert_gradients(&gradients, &answers, found, floor);
    })
}
