//! Rotations and merges through `xla_attention::call`: the strides that they follow, and the sizes that they refuse.

use crate::support::array::{ATTENTION_DTYPES, Array, BF16, Dtype, F16, F32, I32};
use crate::support::cache_updates::Update;
use crate::support::frame::INVALID_ARGUMENT;
use crate::support::guard::{Side, for_both_sides};
use crate::support::invocation::POISON;
use crate::support::rotations::Rope;
use crate::support::spread::Spread;
use crate::support::states::{ANY_LSE, State};
use std::ptr::null_mut;
use xla_attention::{Action, Attribute, Call, DType, Error, Op, SingleThread, Tensor, call};

/// What a tensor claims to be; without memory.
fn claim(dtype: Dtype, dims: &[i64]) -> Tensor<'_> {
    Tensor::dense(DType(dtype.0), null_mut(), dims)
}

fn check(op: Op, operands: &[Tensor], results: &[Tensor], attributes: &[Attribute]) -> Result<(), Error> {
    // SAFETY: a check touches no memory.
    unsafe { call(&Call { op, action: Action::Check, operands, results, attributes }) }
}

fn refused(outcome: Result<(), Error>, text: &str) {
    let error = outcome.unwrap_err();
    assert_eq!((error.code as i32, error.message.as_str()), (INVALID_ARGUMENT, text));
}

#[test]
fn rope_kv_cache_update_follows_the_strides_of_rows_cache_and_table() {
    for layout in [1, 2, 3] {
        for (dtype, interleaved) in [(F16, false), (BF16, true), (F32, true)] {
            for gap in [3, 16] {
                let update = Update { layout, dtype, ..Update::default() };
                let rope = Rope { update, interleaved, ..Rope::default() };
                let (invocation, expected) = (rope.invocation(true), rope.expected());
                for_both_sides(|side| {
                    let gaps = [gap, 2 * gap, gap, 5 * gap, 0, 0, gap];
                    let operands = invocation.operands.iter().zip(gaps);
                    let operands: Vec<Spread> =
                        operands.map(|((name, x), gap)| Spread::new(name, side, x, gap)).collect();
                    let poison = Array::filled(dtype, &expected[1].dims, POISON);
                    let query_out = Spread::new("query_out", side, &poison, 0);
                    let request = Call {
                        op: Op::RopeKvCacheUpdate,
                        action: Action::RunOnCpu(&SingleThread),
                        operands: &operands.iter().map(Spread::tensor).collect::<Vec<_>>(),
                        results: &[operands[0].tensor(), query_out.tensor()],
                        attributes: &[Attribute::Bool(interleaved), Attribute::I64(layout)],
                    };
                    // SAFETY: the tensors describe the memory above; the result cache and its operand are one.
                    unsafe { call(&request) }.unwrap();
                    assert!(operands[0].packed() == expected[0].bytes, "layout {layout}, {dtype:?}");
                    assert!(query_out.packed() == expected[1].bytes, "layout {layout}, {dtype:?}");
                });
            }
        }
    }
}

#[test]
fn merge_attention_states_follows_the_strides_of_its_parts() {
    for dtype in ATTENTION_DTYPES {
        for (gap, d) in [(8, 64), (5, 24), (3, 7)] {
            let (a, b) = (State::random(dtype, (5, 3, d), &ANY_LSE, 1), State::random(dtype, (5, 3, d), &ANY_LSE, 2));
            let invocation = a.merge(&b);
            let expected = invocation.results(Side::EndsAtGuard);
            for_both_sides(|side| {
                let gaps = [gap, 0, 2 * gap, 0];
                let spread = invocation.operands.iter().zip(gaps);
                let operands: Vec<Spread> = spread.map(|((name, x), gap)| Spread::new(name, side, x, gap)).collect();
                let poison = |r: &Array| Array::filled(r.dtype, &r.dims, POISON);
                let results: Vec<Spread> =
                    expected.iter().map(|r| Spread::new("result", side, &poison(r), 0)).collect();
                let request = Call {
                    op: Op::MergeAttentionStates,
                    action: Action::RunOnCpu(&SingleThread),
                    operands: &operands.iter().map(Spread::tensor).collect::<Vec<_>>(),
                    results: &results.iter().map(Spread::tensor).collect::<Vec<_>>(),
                    attributes: &[],
                };
                // SAFETY: the tensors describe the memory above.
                unsafe { call(&request) }.unwrap();
                assert!(results[0].packed() == expected[0].bytes && results[1].packed() == expected[1].bytes);
            });
        }
    }
}

#[test]
fn sizes_that_kernels_could_not_count_are_refused() {
    const TOO_MANY: i64 = i32::MAX as i64;
    let (cache, row, tokens) = (claim(F16, &[1, 1, 2, 8]), claim(F16, &[1, 1, 8]), claim(I32, &[1]));
    let operands = [cache, row, row, row, tokens, tokens, claim(F32, &[TOO_MANY, 8])];
    let attributes = [Attribute::Bool(false), Attribute::I64(1)];
    let outcome = check(Op::RopeKvCacheUpdate, &operands, &[cache, row], &attributes);
    refused(outcome, "xla_gpu_rope_kv_cache_update: max_pos is 2147483647, expected below 2^31");
    let merge = |[n, h, d]: [i64; 3]| {
        let (out, lse) = ([n, h, d], [h, n]);
        let (out, lse) = (claim(F16, &out), claim(F32, &lse));
        check(Op::MergeAttentionStates, &[out, lse, out, lse], &[out, lse], &[])
    };
    let prefix = "xla_gpu_merge_attention_states:";
    refused(merge([TOO_MANY, 1, 1]), &format!("{prefix} n is 2147483647, expected below 2^31"));
    refused(merge([1, TOO_MANY, 1]), &format!("{prefix} h is 2147483647, expected below 2^31"));
    refused(merge([1, 1, TOO_MANY]), &format!("{prefix} d is 2147483647, expected below 2^31"));
    let text = format!("{prefix} out_a has rows of 65536 x 32768 elements, expected below 2^31");
    refused(merge([1, 1 << 16, 1 << 15]), &text);
    merge([0, TOO_MANY - 1, 1]).unwrap();
}
