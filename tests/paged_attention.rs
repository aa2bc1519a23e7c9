//! `xla_gpu_paged_attention` on the CPU against the f64 reference, through its XLA FFI handler and under guard pages.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod support;

use support::array::{ATTENTION_DTYPES, Array, BF16, Dtype, F16, F32, U8};
use support::cases::{PagedCase, Shape, Storage, named_shapes};
use support::guard::{Side, for_both_sides};
use support::oracle::{IfWrong, assert_allowed, members, paged_attention};
use support::pools::{HostPool, Inline, Late, NoPool, Threads};
use support::strategies::{for_all, shapes, storages};

/// Run against both guards; the answers are allowed and have the same bits. Gives `[out, softmax_lse, workspace]`.
fn check(case: &PagedCase) -> Vec<Array> {
    assert!(members(case).iter().all(|m| m.specified), "{}: not everything is checked", case.name);
    let answers = paged_attention(case, IfWrong::Unspecified);
    let call = case.invocation();
    let mut first: Option<Vec<Array>> = None;
    for_both_sides(|side| {
        let results = call.results(side);
        assert_allowed(case, &answers, &results[0], Some(&results[1]));
        let first = first.get_or_insert_with(|| results.clone());
        assert!(first[..2] == results[..2], "{}: two runs differ", case.name);
    });
    first.unwrap()
}

fn named_case_agrees_with_the_reference(dtype: Dtype) {
    for (name, shape, storage) in named_shapes(dtype) {
        let mut case = PagedCase::store(&shape.batch(), &storage);
        case.name = format!("{name}: {}", case.name);
        check(&case);
    }
}

#[test]
fn named_cases_agree_with_the_reference_in_f32() {
    named_case_agrees_with_the_reference(F32);
}

#[test]
fn named_cases_agree_with_the_reference_in_f16() {
    named_case_agrees_with_the_reference(F16);
}

#[test]
fn named_cases_agree_with_the_reference_in_bf16() {
    named_case_agrees_with_the_reference(BF16);
}

#[test]
fn every_head_dimension_agrees_with_the_reference() {
    for (index, head_dim) in (8..=256).step_by(8).enumerate() {
        let dtype = ATTENTION_DTYPES[index % 3];
        let shape =
            Shape { dtype, head_dim, heads: (2, 1), lengths: vec![(1, 37), (18, 25), (1, 3)], ..Shape::default() };
        check(&PagedCase::store(&shape.batch(), &Storage { page_size: 7, ..Storage::default() }));
    }
}

#[test]
fn every_group_size_agrees_with_the_reference() {
    for heads in [(1, 1), (3, 1), (5, 1), (7, 1), (8, 1), (9, 3), (12, 4), (16, 16), (17, 1), (32, 8), (64, 1)] {
        let shape = Shape { heads, head_dim: 16, lengths: vec![(1, 40), (6, 21)], ..Shape::default() };
        check(&PagedCase::store(&shape.batch(), &Storage::default()));
    }
}

#[test]
fn any_shape_agrees_with_the_reference() {
    for_all(96, (shapes(), storages()), |(shape, storage)| {
        check(&PagedCase::store(&shape.batch(), &storage));
    });
}

/// A batch with decode, prefill and empty sequences, and everything to spare.
fn ordinary(dtype: Dtype) -> PagedCase {
    let shape = Shape { dtype, lengths: vec![(1, 90), (9, 9), (0, 4), (21, 64)], ..Shape::default() };
    PagedCase::store(&shape.batch(), &Storage::default())
}

#[test]
fn out_does_not_depend_on_which_optional_results_are_asked_for() {
    for dtype in ATTENTION_DTYPES {
        let case = ordinary(dtype);
        let expected = check(&case);
        let lse_dims = expected[1].dims.clone();
        let asked = [
            case.invocation_without_lse(),
            case.invocation_without_lse().result("softmax_lse", F32, &[0]),
            case.invocation_without_lse().result("softmax_lse", F32, &[0]).result("workspace", U8, &[0]),
            case.invocation_without_lse().result("softmax_lse", F32, &[0]).result("workspace", U8, &[100_000]),
        ];
        for call in asked {
            for_both_sides(|side| assert!(call.results(side)[0] == expected[0]));
        }
        for workspace in [None, Some(0), Some(1), Some(100_000)] {
            let mut call = case.invocation_without_lse().result("softmax_lse", F32, &lse_dims);
            if let Some(bytes) = workspace {
                call = call.result("workspace", U8, &[bytes]);
            }
            assert!(call.results(Side::EndsAtGuard)[..2] == expected[..2]);
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
    let mut call = case.invocation();
    call.operands[5].1 = Array::i32s(&[], &[case.num_seqs]);
    assert!(call.results(Side::BeginsAtGuard)[..2] == check(&case)[..2]);
}

#[test]
fn every_pool_gives_the_same_bits() {
    for dtype in ATTENTION_DTYPES {
        let case = ordinary(dtype);
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
    let shape = Shape { lengths: vec![], ..Shape::default() };
    let bare = Storage { rows_around: (0, 0), spare_seqs: 0, spare_entries: 0, spare_pages: 0, ..Storage::default() };
    let with = |rows, spare_seqs, spare_entries, spare_pages| {
        let storage = Storage { rows_around: (0, rows), spare_seqs, spare_entries, spare_pages, ..bare.clone() };
        check(&PagedCase::store(&shape.batch(), &storage));
    };
    with(0, 0, 0, 0);
    with(3, 0, 0, 0);
    with(3, 2, 0, 0);
    with(3, 2, 2, 0);
    with(3, 2, 2, 2);
    with(0, 2, 2, 2);
    with(3, 0, 2, 2);
}

#[test]
fn queries_over_a_pool_without_pages_see_nothing() {
    let shape = Shape { lengths: vec![(2, 0), (1, 0)], ..Shape::default() };
    for page_size in [1, 16] {
        let storage = Storage { page_size, spare_pages: 0, spare_entries: 2, ..Storage::default() };
        let mut case = PagedCase::store(&shape.batch(), &storage);
        assert_eq!(case.num_pages(), 0);
        check(&case);
        // Lengths that could be met only by a pool with pages: the capacity is 0.
        case.context_lens[..2].copy_from_slice(&[5, i32::MAX]);
        for_both_sides(|side| {
            let results = case.invocation().results(side);
            assert_allowed(&case, &paged_attention(&case, IfWrong::Clamped), &results[0], Some(&results[1]));
        });
    }
}

#[test]
fn huge_scores_neither_overflow_nor_lose_the_softmax() {
    for dtype in ATTENTION_DTYPES {
        for (sharpness, scale) in [(100.0, 100.0), (300.0, 1.0), (1.0, 1e-4), (0.0, 1.0)] {
            let shape = Shape { dtype, sharpness, lengths: vec![(1, 70), (30, 64)], ..Shape::default() };
            let mut case = PagedCase::store(&shape.batch(), &Storage::default());
            case.scale = scale;
            case.name = format!("scale {scale}, sharpness {sharpness}: {}", case.name);
            check(&case);
        }
    }
}

#[test]
fn a_nan_in_a_sequence_stays_in_it() {
    let shape = Shape { lengths: vec![(1, 30), (9, 40), (1, 50)], ..Shape::default() };
    for dtype in ATTENTION_DTYPES {
        let shape = Shape { dtype, ..shape.clone() };
        let clean = PagedCase::store(&shape.batch(), &Storage::default());
        let expected = check(&clean);
        for ill in 0..3 {
            for place in ["q", "k", "v"] {
                let mut batch = shape.batch();
                let sequence = &mut batch.sequences[ill];
                let values = match place {
                    "q" => &mut sequence.q,
                    "k" => &mut sequence.k,
                    _ => &mut sequence.v,
                };
                values[0] = f64::NAN;
                let case = PagedCase::store(&batch, &Storage::default());
                let results = case.invocation().results(Side::EndsAtGuard);
                let row_bytes = case.q_heads * case.head_dim * dtype.size();
                let rows = clean.query_start_loc[ill] as usize..clean.query_start_loc[ill + 1] as usize;
                for row in (0..case.rows()).filter(|r| !rows.contains(r)) {
                    let of = |out: &Array| out.bytes[row * row_bytes..][..row_bytes].to_vec();
                    assert!(of(&results[0]) == of(&expected[0]), "NaN in {place} of {ill} reached row {row}");
                }
            }
        }
    }
}
