//! What the operator computes, against the f64 reference.

use crate::support::answers::IfWrong;
use crate::support::array::{ATTENTION_DTYPES, Array, BF16, F8E4M3FN, F16, F32, FP8_DTYPES, U8};
use crate::support::batch::{Alibi, Dtypes, Scaled, Shape};
use crate::support::case::Case;
use crate::support::check::{check, check_against, check_named};
use crate::support::guard::{Side, for_both_sides};
use crate::support::named_shapes::named_shapes;
use crate::support::oracle::Mask;
use crate::support::pools::{HostPool, Inline, Late, NoPool, Threads};
use crate::support::storage::Storage;
use crate::support::strategies::{for_all, paged_shapes, paged_storages};

fn named_cases_agree_with_the_reference(dtypes: Dtypes) {
    for (name, shape, storage) in named_shapes(dtypes) {
        check_named(name, Case::paged(&shape.batch(), &storage));
    }
}

#[test]
fn named_cases_agree_with_the_reference_in_f32() {
    named_cases_agree_with_the_reference(F32.into());
}

#[test]
fn named_cases_agree_with_the_reference_in_f16() {
    named_cases_agree_with_the_reference(F16.into());
}

#[test]
fn named_cases_agree_with_the_reference_in_bf16() {
    named_cases_agree_with_the_reference(BF16.into());
}

#[test]
fn every_head_dimension_agrees_with_the_reference_in_every_type() {
    for (index, head_dim) in (8..=256).step_by(8).enumerate() {
        // Each head dimension with three types, one of them without 8-bit floats.
        for dtypes in [index % 3, 3 + index % 4, 7 + index % 2].map(|i| Dtypes::ALL[i]) {
            let lengths = vec![(1, 37), (18, 25), (1, 3)];
            let shape = Shape { dtypes, head_dim, heads: (2, 1), lengths, ..Shape::default() };
            check(&Case::paged(&shape.batch(), &Storage { page_size: 7, ..Storage::default() }));
        }
    }
}

#[test]
fn every_group_size_agrees_with_the_reference() {
    for heads in [(1, 1), (3, 1), (5, 1), (7, 1), (8, 1), (9, 3), (12, 4), (16, 16), (17, 1), (32, 8), (64, 1)] {
        let shape = Shape { heads, head_dim: 16, lengths: vec![(1, 40), (6, 21)], ..Shape::default() };
        check(&Case::paged(&shape.batch(), &Storage::default()));
    }
}

#[test]
fn a_row_without_keys_may_have_any_number_of_heads() {
    // K and V of a token are longer than the CPU takes at a time: 2^19 elements.
    let shape = Shape { heads: (1025, 1025), head_dim: 256, lengths: vec![(1, 0), (1, 2), (0, 0)], ..Shape::default() };
    check(&Case::paged(&shape.batch(), &Storage { page_size: 1, ..Storage::default() }));
}

#[test]
fn long_contexts_are_merged_from_pieces() {
    for (dtype, heads, head_dim, mask) in
        [(F32, (8, 4), 128, Mask::CAUSAL), (BF16, (8, 4), 64, Mask::CAUSAL), (F32, (3, 1), 256, Mask::sliding(2300))]
    {
        let lengths = vec![(1, 3000), (20, 2500)];
        let shape = Shape { dtypes: dtype.into(), heads, head_dim, mask, lengths, ..Shape::default() };
        check(&Case::paged(&shape.batch(), &Storage::default()));
    }
}

#[test]
fn any_shape_agrees_with_the_reference() {
    for_all(96, (paged_shapes(), paged_storages()), |(shape, storage)| {
        check(&Case::paged(&shape.batch(), &storage));
    });
}

/// Decode, prefill and a sequence without queries.
fn ordinary_shape(dtypes: Dtypes) -> Shape {
    Shape { dtypes, lengths: vec![(1, 90), (9, 9), (0, 4), (21, 64)], ..Shape::default() }
}

fn ordinary(dtypes: impl Into<Dtypes>) -> Case {
    Case::paged(&ordinary_shape(dtypes.into()).batch(), &Storage::default())
}

#[test]
fn each_option_alone_agrees_with_the_reference_in_every_type() {
    for dtypes in Dtypes::ALL {
        let plain = ordinary_shape(dtypes);
        let options = [
            plain.clone(),
            Shape { mask: Mask::sliding(13), ..plain.clone() },
            Shape { softcap: 2.0, ..plain.clone() },
            Shape { alibi: Alibi::PerHead, ..plain.clone() },
            Shape { alibi: Alibi::PerSequence, ..plain.clone() },
            Shape { sinks: true, ..plain.clone() },
            Shape { scales: [Scaled::AsAWhole; 3], ..plain.clone() },
            Shape { scales: [Scaled::PerHead; 3], ..plain.clone() },
            Shape { scales: [Scaled::PerHead, Scaled::No, Scaled::No], ..plain.clone() },
            Shape { scales: [Scaled::No, Scaled::PerHead, Scaled::No], ..plain.clone() },
            Shape { scales: [Scaled::No, Scaled::No, Scaled::PerHead], ..plain.clone() },
            Shape { batch_invariant: true, ..plain },
        ];
        for shape in options {
            check(&Case::paged(&shape.batch(), &Storage::default()));
        }
    }
}

#[test]
fn out_does_not_depend_on_which_optional_results_are_asked_for() {
    for dtype in ATTENTION_DTYPES {
        let case = ordinary(dtype);
        let expected = check(&case);
        for (lse, workspace) in [(false, None), (false, Some(0)), (false, Some(100_000)), (true, Some(0))] {
            let asking = case.asking(lse, workspace);
            for_both_sides(|side| assert!(asking.invocation().results(side)[0] == expected[0]));
        }
        // An lse and a workspace of no element, and an lse alone.
        let nothing =
            case.asking(false, None).invocation().result("softmax_lse", F32, &[0]).result("workspace", U8, &[0]);
        assert!(nothing.results(Side::EndsAtGuard)[0] == expected[0]);
        for workspace in [None, Some(0), Some(1), Some(100_000)] {
            assert!(case.asking(true, workspace).invocation().results(Side::EndsAtGuard)[..2] == expected[..2]);
        }
    }
}

#[test]
fn optional_operands_without_an_element_count_as_left_out() {
    let case = ordinary(BF16);
    let expected = check(&case);
    let mut call = case.invocation();
    for name in ["alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale"] {
        call = call.operand(name, Array::left_out(F32));
        assert!(call.results(Side::EndsAtGuard)[..2] == expected[..2], "up to {name}");
    }
}

#[test]
fn num_seqs_may_be_a_scalar() {
    let case = ordinary(F32);
    let call = case.invocation().with_operand("num_seqs", Array::i32s(&[], &[case.num_seqs]));
    assert!(call.results(Side::BeginsAtGuard)[..2] == check(&case)[..2]);
}

#[test]
fn every_pool_gives_the_same_bits() {
    // Work that is worth several threads, and some that is not.
    let lengths = vec![(1, 2500), (1, 30), (7, 900), (60, 700)];
    let long = [F32, BF16].map(|dtype| Shape { dtypes: dtype.into(), lengths: lengths.clone(), ..Shape::default() });
    let long = long.map(|shape| Case::paged(&shape.batch(), &Storage::default()));
    for case in Dtypes::ALL.map(ordinary).into_iter().chain(long) {
        let expected = check(&case);
        let late = Late::default();
        let pools: [&dyn HostPool; 6] = [&Inline(1), &Inline(3), &Inline(64), &Threads::new(3), &late, &NoPool];
        for pool in pools {
            let results = case.invocation().run(Side::EndsAtGuard, pool).unwrap();
            assert!(results[..2] == expected[..2]);
        }
        // Helpers that arrive after the call has returned and its memory is gone.
        late.run_all();
    }
}

#[test]
fn sizes_of_zero_are_calls_like_any_other() {
    let with = |sinks, rows, spare_seqs, spare_entries, spare_pages| {
        let shape = Shape { lengths: vec![], sinks, ..Shape::default() };
        let around = Storage { rows_around: (0, rows), spare_seqs, spare_entries, spare_pages, ..Storage::default() };
        check(&Case::paged(&shape.batch(), &around));
    };
    for sinks in [false, true] {
        with(sinks, 0, 0, 0, 0);
        with(sinks, 3, 0, 0, 0);
        with(sinks, 3, 2, 0, 0);
        with(sinks, 3, 2, 2, 0);
        with(sinks, 3, 2, 2, 2);
        with(sinks, 0, 2, 2, 2);
        with(sinks, 3, 0, 2, 2);
    }
}

#[test]
fn queries_over_a_pool_without_pages_see_nothing() {
    for (page_size, sinks) in [(1, false), (16, true)] {
        let shape = Shape { lengths: vec![(2, 0), (1, 0)], sinks, ..Shape::default() };
        let storage = Storage { page_size, spare_pages: 0, spare_entries: 2, ..Storage::default() };
        let mut case = Case::paged(&shape.batch(), &storage);
        assert_eq!(case.place.num_pages, 0);
        check(&case);
        // Lengths that could be met only by a pool with pages: the capacity is 0.
        case.seqused_k.as_mut().unwrap()[..2].copy_from_slice(&[5, i32::MAX]);
        check_against(&case, IfWrong::Clamped);
    }
}

#[test]
fn huge_scores_neither_overflow_nor_lose_the_softmax() {
    for dtypes in Dtypes::ALL {
        for (sharpness, scale) in [(100.0, 100.0), (300.0, 1.0), (1.0, 1e-4), (0.0, 1.0)] {
            let shape = Shape { dtypes, sharpness, lengths: vec![(1, 70), (30, 64)], ..Shape::default() };
            let mut case = Case::paged(&shape.batch(), &Storage::default());
            case.form.softmax_scale = scale;
            check_named(&format!("scale {scale}, sharpness {sharpness}"), case);
        }
    }
}

#[test]
fn every_number_of_8_bits_counts_as_what_it_is() {
    for (q, kv) in [F16, BF16].into_iter().flat_map(|q| FP8_DTYPES.map(|kv| (q, kv))) {
        let numbers: Vec<f64> =
            (0..=u8::MAX).map(|code| kv.decode(&[code])).map(|x| if x.is_finite() { x } else { 0.0 }).collect();
        // Query i picks out column i of K.
        let (dtypes, lengths) = (Dtypes::over(q, kv), vec![(1, 1); numbers.len()]);
        let mut batch = Shape { dtypes, lengths, heads: (1, 1), head_dim: 256, ..Shape::default() }.batch();
        for (i, sequence) in batch.sequences.iter_mut().enumerate() {
            sequence.q = (0..numbers.len()).map(|column| f64::from(u8::from(column == i))).collect();
            (sequence.k, sequence.v) = (numbers.clone(), numbers.clone());
        }
        // Logits of 57344 are past what lse is told apart by.
        batch.form.softmax_scale = if kv == F8E4M3FN { 1.0 } else { 1.0 / 128.0 };
        let results = check(&Case::paged(&batch, &Storage::default()));
        for row in results[0].values().chunks(numbers.len()).take(numbers.len()) {
            assert!(row == numbers, "{dtypes:?}: {row:?}");
        }
    }
}

#[test]
fn a_nan_in_a_sequence_stays_in_it() {
    for dtypes in Dtypes::ALL {
        let shape = Shape { dtypes, lengths: vec![(1, 30), (9, 40), (1, 50)], ..Shape::default() };
        let clean = Case::paged(&shape.batch(), &Storage::default());
        let expected = check(&clean);
        for (ill, place) in (0..3).flat_map(|ill| ["q", "k", "v"].map(|place| (ill, place))) {
            let mut batch = shape.batch();
            let sequence = &mut batch.sequences[ill];
            let values = match place {
                "q" => &mut sequence.q,
                "k" => &mut sequence.k,
                _ => &mut sequence.v,
            };
            values[0] = f64::NAN;
            let results = Case::paged(&batch, &Storage::default()).invocation().results(Side::EndsAtGuard);
            let row_bytes = clean.form.q_heads * clean.form.value_dim * dtypes.out.size();
            let rows = clean.cu_seqlens_q[ill] as usize..clean.cu_seqlens_q[ill + 1] as usize;
            for row in (0..clean.rows()).filter(|r| !rows.contains(r)) {
                let of = |out: &Array| out.bytes[row * row_bytes..][..row_bytes].to_vec();
                assert!(of(&results[0]) == of(&expected[0]), "NaN in {place} of {ill} reached row {row}");
            }
        }
    }
}
