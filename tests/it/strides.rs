//! The strides of every operand and result that each operator accepts and refuses (`xla_attention::call`), as eager
//! torch and Rust pass them.

use crate::support::conformance::{ConformanceCase, cases};
use crate::support::valid_calls;
use crate::support::{Array, BufferView, INVALID_ARGUMENT, InlinePool, Invocation, Side, may_be_strided};
use std::ptr::without_provenance_mut;
use xla_attention::{Action, Error, Op, Pool, RayonPool, SingleThread};

/// The conformance case of this name.
fn case(op: Op, name: &str) -> Option<&'static ConformanceCase> {
    cases().find(|case| case.target == op.signature().target && case.name == name)
}

/// A valid call with every optional operand and result, without memory. Scales have one element per head, because the
/// strides of a single element do not matter.
fn valid_call(op: Op) -> Invocation {
    let fullest = |name| case(op, name).or(case(op, "the valid call")).unwrap().invocation(false);
    let mut call = fullest("every optional operand");
    for (_, operand) in call.operands.iter_mut().filter(|(name, _)| name.ends_with("_scale") && *name != "kv_scale") {
        *operand = Array::filled(operand.dtype, &[2], 0);
    }
    call.results = fullest("every optional result").results;
    call
}

/// Strides of a tensor with `gap` elements between its rows, whose elements are `last` elements apart.
fn strides(dims: &[i64], last: i64, gap: i64) -> Vec<i64> {
    let mut strides = vec![last; dims.len()];
    let mut row = last * dims.last().copied().unwrap_or(1) + gap;
    for axis in (0..dims.len().saturating_sub(1)).rev() {
        strides[axis] = row;
        row *= dims[axis];
    }
    strides
}

/// Validates the valid call with these strides of one operand, one result, or both buffers of a cache.
fn outcome(op: Op, of: &[(usize, usize)], strides: &[i64]) -> Result<(), Error> {
    let call = valid_call(op);
    // A cache is updated in place if both of its buffers have the strides.
    let in_place = of.len() > 1;
    let views = |part: usize, count: usize| -> Vec<BufferView> {
        let data = without_provenance_mut(if part == 0 || in_place { 64 } else { 0 });
        (0..count).map(|index| BufferView { data, strides: of.contains(&(part, index)).then_some(strides) }).collect()
    };
    // SAFETY: validation accesses no memory.
    unsafe { call.run_action(Action::Check, &views(0, call.operands.len()), &views(1, call.results.len())) }
}

#[test]
fn every_buffer_accepts_or_refuses_strides_as_its_operator_requires() {
    let mut checked = 0;
    for op in Op::ALL {
        let (call, strided, target) = (valid_call(op), may_be_strided(op), op.signature().target);
        let operands = call.operands.iter().map(|(name, array)| (*name, array.dims.clone())).collect();
        let buffers: [Vec<(&str, Vec<i64>)>; 2] =
            [operands, call.results.iter().map(|result| (result.name, result.dims.clone())).collect()];
        outcome(op, &[], &[]).unwrap();
        for (part, index) in
            [0, 1].into_iter().flat_map(|part| (0..buffers[part].len()).map(move |index| (part, index)))
        {
            let (name, dims) = &buffers[part][index];
            // A dimension of size 1 may have any stride, and a buffer without elements is left out.
            if dims.last().is_none_or(|size| *size < 2) {
                continue;
            }
            checked += 1;
            let alias = buffers[1 - part].iter().position(|(alias, _)| alias == name).map(|index| (1 - part, index));
            let is_followed = strided.contains(name) && (part == 0 || alias.is_some());
            let shown = if part == 1 && alias.is_some() { format!("result {name}") } else { (*name).to_owned() };
            let apart = strides(dims, 2, 0);
            let error = outcome(op, &[(part, index)], &apart).unwrap_err();
            let expected = if is_followed { "1 for the last dimension" } else { "a dense tensor" };
            let text = format!("{target}: {shown} has strides Some({apart:?}), expected {expected}");
            assert_eq!((error.code as i32, error.message), (INVALID_ARGUMENT, text));
            let rows = strides(dims, 1, 16);
            let both: Vec<_> = [(part, index)].into_iter().chain(alias).collect();
            match outcome(op, &both, &rows) {
                Ok(()) => assert!(is_followed || dims.len() == 1, "{target}: {shown} follows {rows:?}"),
                Err(error) => assert!(!is_followed && error.message.ends_with("expected a dense tensor"), "{error}"),
            }
            // A strided cache must be updated in place.
            if part == 0 && alias.is_some() {
                let text = "is strided and not updated in place; alias the result to the operand";
                let error = outcome(op, &[(part, index)], &rows).unwrap_err();
                assert_eq!(error.message, format!("{target}: {name} {text}"));
            }
        }
    }
    assert!(checked >= 80, "{checked} buffers");
}

#[test]
fn the_number_of_strides_must_be_the_rank() {
    let error = outcome(Op::PagedAttention, &[(0, 0)], &[64, 16]).unwrap_err();
    assert_eq!(error.message, "xla_gpu_paged_attention: query has 2 strides, expected 3");
}

#[test]
fn every_operator_reads_strided_operands() {
    for call in valid_calls::with_numbers() {
        let expected = call.run_on_cpu(Side::EndsAtGuard, &InlinePool(4)).unwrap();
        let strided = may_be_strided(call.op());
        for (side, pool) in [(Side::EndsAtGuard, &SingleThread as &dyn Pool), (Side::BeginsAtGuard, &RayonPool)] {
            // A different gap for each operand.
            let gap = |name: &str| strided.iter().position(|s| *s == name).map_or(0, |at| [16, 3, 8, 5, 40][at]);
            let actual = call.run_strided(side, pool, gap).unwrap();
            for ((actual, expected), result) in actual.iter().zip(&expected).zip(&call.results) {
                assert!(
                    result.name == "workspace" || actual == expected,
                    "{} {}: {}",
                    call.target,
                    call.description,
                    result.name
                );
            }
        }
    }
}
