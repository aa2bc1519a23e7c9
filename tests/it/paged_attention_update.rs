//! `xla_gpu_paged_attention_update`: the cache that it leaves and the attention over it.

use crate::attention::tests_of;
use crate::support::{
    ATTENTION_DTYPES, Alibi, Array, BF16, Checked, Dtypes, F8E4M3FN, F16, F32, FP8_DTYPES, Mask, Scaled, Shape, Side,
    Step, Storage, for_both_sides, put,
};

// What is checked against the reference is, bit by bit, the update and then attention too.
tests_of! { PagedAttentionUpdate:
    agreement { named_cases_agree_with_the_reference }
    interface { any_workspace_serves }
}

/// A first chunk, decode, a later chunk, a sequence without queries.
fn mixed(dtypes: impl Into<Dtypes>) -> Shape {
    Shape { dtypes: dtypes.into(), lengths: vec![(9, 9), (1, 90), (21, 64), (0, 4)], ..Shape::default() }
}

/// Sequences that decode takes, on CUDA in one launch with the update: of one query, of a few, of more than keys.
fn short(dtypes: impl Into<Dtypes>) -> Shape {
    let lengths = vec![(1, 1), (1, 17), (1, 700), (2, 2), (1, 64), (3, 90), (1, 33), (4, 650), (5, 3), (0, 4), (1, 48)];
    Shape { dtypes: dtypes.into(), heads: (8, 2), head_dim: 32, lengths, ..Shape::default() }
}

#[test]
fn decode_is_the_update_and_then_attention_under_each_option() {
    let with_room = Storage { workspace: Some(300_000), ..Storage::default() };
    let plain = short(BF16);
    let one_each = plain.lengths.iter().map(|&(_, len_k)| (1, len_k.max(1))).collect();
    for shape in [
        Shape { lengths: one_each, ..plain.clone() },
        Shape { batch_invariant: true, ..plain.clone() },
        Shape { mask: Mask::sliding(1), ..plain.clone() },
        Shape { mask: Mask::sliding(3), ..plain.clone() },
        Shape { mask: Mask::sliding(100), batch_invariant: true, ..plain.clone() },
        Shape { softcap: 2.0, alibi: Alibi::PerHead, sinks: true, ..plain.clone() },
        Shape { scales: [Scaled::PerHead, Scaled::No, Scaled::No], ..plain.clone() },
        Shape { scales: [Scaled::No, Scaled::AsAWhole, Scaled::No], ..plain.clone() },
        Shape { scales: [Scaled::No, Scaled::No, Scaled::PerHead], ..plain.clone() },
        plain,
    ] {
        for wide_slots in [false, true] {
            Step { wide_slots, ..Step::new(&shape.batch(), &with_room) }.check();
        }
    }
}

#[test]
fn decode_is_the_update_and_then_attention_in_every_type_and_width() {
    let storage = Storage { workspace: Some(300_000), ..Storage::default() };
    for dtypes in Dtypes::ALL {
        Step::new(&short(dtypes).batch(), &storage).check();
    }
    for (dtype, head_dims) in [(BF16, [8, 64, 96, 128, 192, 256]), (F32, [24, 64, 72, 128, 136, 256])] {
        for head_dim in head_dims {
            let lengths = vec![(1, 700), (3, 40), (1, 16), (1, 1)];
            Step::new(&Shape { head_dim, lengths, ..short(dtype) }.batch(), &storage).check();
        }
    }
}

#[test]
fn decode_stores_rows_of_no_sequence_whatever_room_there_is() {
    let shape = Shape { head_dim: 64, ..short(F16) };
    for page_size in [1, 2, 7, 16, 24, 64] {
        for (workspace, rows_around) in
            [(None, (3, 0)), (Some(0), (0, 70)), (Some(5000), (40, 40)), (Some(300_000), (1, 9))]
        {
            let spare_pages = 90_usize.div_ceil(page_size);
            let storage =
                Storage { page_size, workspace, rows_around, spare_pages, spare_seqs: 15, ..Storage::default() };
            Step::new(&shape.batch(), &storage).check();
        }
    }
}

#[test]
fn a_new_token_that_is_not_a_number_goes_where_it_goes_in_two_calls() {
    // So many that sequences of any length are decoded on CUDA; the last in tiles of one query, which sees one key.
    let storage = Storage { spare_seqs: 15, ..Storage::default() };
    for (mask, heads) in [(Mask::CAUSAL, (8, 2)), (Mask::sliding(2), (8, 2)), (Mask::sliding(1), (16, 1))] {
        let shape = Shape { mask, heads, lengths: vec![(7, 30), (1, 20), (5, 5)], ..short(BF16) };
        for row in 0..13 {
            let mut step = Step::new(&shape.batch(), &storage);
            let width = heads.1 * shape.head_dim;
            put(&mut step.value, row * width, &vec![f64::NAN; width]);
            step.update();
            let [_, attention] = step.in_two_calls();
            for_both_sides(|side| {
                let (found, wanted) = (step.invocation(true).results(side), attention.results(side));
                assert!(found[0] == wanted[0], "row {row}: out is not that of two calls");
            });
        }
    }
}

/// More rows than the warps of a KV head's CTAs, which read what others store.
#[test]
fn decode_of_many_sequences_is_the_update_and_then_attention() {
    for (heads, head_dim) in [((2, 1), 32), ((8, 8), 128)] {
        let lengths: Vec<_> = (0..300).map(|i| (1 + usize::from(i % 50 == 7), 1 + i * 37 % 40)).collect();
        let shape = Shape { heads, head_dim, lengths, ..short(BF16) };
        for seed in 0..2 {
            Step::new(&shape.batch(), &Storage { workspace: Some(300_000), seed, ..Storage::default() }).check();
        }
    }
}

#[test]
fn an_8_bit_cache_takes_rows_of_every_wider_type() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| FP8_DTYPES.map(|kv| (q, kv))) {
        for rows in ATTENTION_DTYPES {
            let shape = Shape { scales: [Scaled::No, Scaled::PerHead, Scaled::AsAWhole], ..mixed(Dtypes::over(q, kv)) };
            Step::of_rows(&shape.batch(), &Storage::default(), rows).check();
        }
    }
}

/// The bytes of `out` that are a sequence's rows.
fn rows_of(step: &Step, out: &Array, index: usize) -> Vec<u8> {
    let row = step.case.form.q_heads * step.case.form.value_dim * out.dtype.size();
    let [first, end] = [index, index + 1].map(|b| step.case.cu_seqlens_q[b] as usize * row);
    out.bytes[first..end].to_vec()
}

/// The cache is that of the update; sequences but those `ill` have the bits that they have in `well`.
fn assert_harmless(step: &Step, well: &Step, ill: &[usize]) {
    let expected = well.invocation(true).results(Side::EndsAtGuard);
    for_both_sides(|side| {
        for in_place in [true, false] {
            let results = step.invocation(in_place).results(side);
            assert!(results[1] == *step.cache(), "{}: the cache differs", step.case.name);
            for index in (0..well.case.num_seqs as usize).filter(|index| !ill.contains(index)) {
                let [found, wanted] = [&results[0], &expected[0]].map(|out| rows_of(well, out, index));
                assert!(found == wanted, "{}: sequence {index} has other bits", step.case.name);
            }
        }
    });
}

/// Bits that do not depend on other sequences.
fn invariant(dtypes: Dtypes) -> Step {
    Step::new(&Shape { batch_invariant: true, ..mixed(dtypes) }.batch(), &Storage::default())
}

/// Likewise of one query each, which decode alone has to do with.
fn invariant_decode(dtypes: Dtypes) -> Step {
    let lengths = vec![(1, 40), (1, 700), (1, 1), (1, 64)];
    Step::new(&Shape { batch_invariant: true, lengths, ..mixed(dtypes) }.batch(), &Storage::default())
}

#[test]
fn a_row_without_a_slot_concerns_its_own_sequence_alone() {
    for dtypes in [Dtypes::same(F32), Dtypes::same(BF16), Dtypes::over(F16, F8E4M3FN)] {
        for well in [invariant(dtypes), invariant_decode(dtypes)] {
            for (ill, nowhere) in
                (0..3).flat_map(|ill| [-1, i64::from(i32::MIN), i64::from(i32::MAX)].map(|s| (ill, s)))
            {
                let mut step = well.clone();
                let last = step.case.cu_seqlens_q[ill + 1] as usize - 1;
                step.slots[last] = nowhere;
                step.update();
                assert_harmless(&step, &well, &[ill]);
            }
        }
    }
}

#[test]
fn slots_of_64_bits_are_not_taken_for_those_of_32() {
    for well in [invariant(F32.into()), invariant_decode(F32.into())] {
        let mut step = Step { wide_slots: true, ..well.clone() };
        // Its low half is the slot of the first sequence's last key.
        let last = step.case.cu_seqlens_q[1] as usize - 1;
        step.slots[last] |= 1 << 32;
        step.update();
        assert_harmless(&step, &well, &[0]);
    }
}
