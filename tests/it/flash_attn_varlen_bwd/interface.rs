//! Operands and results that may be left out, sizes of zero, threads: what a caller may do without changing an answer.

use super::calls::{case, f32_calls, gradient_calls};
use crate::support::array::{ATTENTION_DTYPES, Array, BF16, Dtype, F32, I32, U8};
use crate::support::batch::Shape;
use crate::support::gradient_case::{GradientCase, Wanted, check_gradients};
use crate::support::guard::{Side, for_both_sides};
use crate::support::invocation::Invocation;
use crate::support::oracle::Mask;
use crate::support::pools::{HostPool, Inline, Late, NoPool, Threads};
use crate::support::storage::Storage;
use crate::support::strategies::for_all;
use xla_attention::DType;
use xla_attention::ops::workspace::AttentionSizes;

fn ordinary(dtype: Dtype, wanted: Wanted) -> GradientCase {
    let lengths = vec![(1, 90), (9, 9), (0, 4), (21, 64)];
    let shape = Shape { dtypes: dtype.into(), lengths, ..Shape::default() };
    GradientCase::store(&shape.batch(), &Storage { workspace: None, ..Storage::contiguous() }, wanted)
}

/// The workspace that a call is given as a rule.
fn wanted_workspace(case: &GradientCase) -> usize {
    let form = &case.forward.form;
    let [num_q_heads, num_kv_heads, head_dim, value_dim] =
        [form.q_heads, form.kv_heads, form.head_dim, form.value_dim].map(|x| x as i64);
    let dtype = DType(form.dtypes.q.0);
    let sizes = AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant: false };
    let wanted = sizes.gradients_workspace();
    let (rows, sequences) = (case.forward.rows() as i64, case.forward.slots() as i64);
    (wanted.fixed + rows * wanted.per_row + sequences * wanted.per_sequence) as usize
}

#[test]
fn any_workspace_serves() {
    for dtype in ATTENTION_DTYPES {
        for deterministic in [false, true] {
            let mut case = ordinary(dtype, Wanted { deterministic, ..Wanted::ALL });
            let right = wanted_workspace(&case);
            let sizes = [0, 1, 4096, right / 2, right.saturating_sub(1), right, right + 1, 3_000_000];
            for workspace in [None].into_iter().chain(sizes.map(Some)) {
                case.forward.workspace = workspace;
                check_gradients(&case);
            }
        }
    }
}

#[test]
fn optional_operands_without_an_element_count_as_left_out() {
    let case = ordinary(BF16, Wanted { dlse: false, ..Wanted::ALL });
    let expected = check_gradients(&case);
    let mut call = case.invocation();
    let optional = ["seqused_k", "seqused_q", "leftpad_k", "alibi_slopes", "sinks", "dlse"];
    for (index, name) in optional.into_iter().enumerate() {
        call = call.operand(name, Array::left_out(if index < 3 { I32 } else { F32 }));
        assert!(call.results(Side::EndsAtGuard) == expected, "up to {name}");
    }
    let without = GradientCase { wanted: Wanted { dsinks: false, ..case.wanted }, ..case.clone() };
    let call = without.invocation();
    let results = |call: &Invocation| call.results(Side::EndsAtGuard)[..3].to_vec();
    assert!(results(&call) == expected[..3]);
    let call = call.result("dsinks", F32, &[0]);
    assert!(results(&call) == expected[..3]);
    assert!(results(&call.result("workspace", U8, &[0])) == expected[..3]);
}

#[test]
fn dlse_of_0_is_none_and_dsinks_without_sinks_is_0() {
    for_all(16, f32_calls(), |(shape, storage)| {
        let mut case = case(&Shape { sinks: false, ..shape }, &storage);
        let none = GradientCase { dlse: None, ..case.clone() };
        case.dlse = case.dlse.map(|dlse| Array::filled(F32, &dlse.dims, 0));
        let [zeros, none] = [case, none].map(|case| {
            let results = case.invocation().results(Side::EndsAtGuard);
            case.computed(&results).to_vec()
        });
        assert!(zeros == none);
        assert!(zeros[3].values().iter().all(|&x| x == 0.0));
    });
}

#[test]
fn sizes_of_zero_are_answered() {
    for lengths in [vec![], vec![(0, 0)], vec![(0, 7)], vec![(5, 0)], vec![(0, 0), (3, 0), (0, 3)]] {
        for storage in [Storage::contiguous().bare(), Storage::contiguous()] {
            check_gradients(&case(&Shape { lengths: lengths.clone(), sinks: true, ..Shape::default() }, &storage));
        }
    }
}

#[test]
fn two_runs_have_the_same_bits_where_that_is_asked_for() {
    for_all(32, gradient_calls(), |(shape, storage, wanted)| {
        let wanted = Wanted { deterministic: true, ..wanted };
        let call = GradientCase::store(&shape.batch(), &storage, wanted).invocation();
        let gradients = if wanted.dsinks { 4 } else { 3 };
        let run = || call.results(Side::BeginsAtGuard)[..gradients].to_vec();
        assert!(run() == run());
    });
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let lengths = vec![(300, 300), (1, 90), (70, 200), (9, 9)];
    let late = Late::default();
    let (two, five) = (Threads::new(2), Threads::new(5));
    let pools: [&dyn HostPool; 6] = [&Inline(1), &Inline(3), &late, &NoPool, &two, &five];
    for dtype in ATTENTION_DTYPES {
        for mask in [Mask::CAUSAL, Mask::FULL] {
            let shape = Shape { dtypes: dtype.into(), lengths: lengths.clone(), mask, sinks: true, ..Shape::default() };
            let case = case(&shape, &Storage::contiguous());
            let expected = check_gradients(&case);
            let call = case.invocation();
            for pool in pools {
                for_both_sides(|side| {
                    let found = call.run(side, pool).unwrap();
                    assert!(case.computed(&found) == expected.as_slice(), "{dtype:?}, {mask:?}");
                });
            }
            late.run_all();
        }
    }
}
