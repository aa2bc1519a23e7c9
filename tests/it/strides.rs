//! The strides that each operator follows, and those that it refuses, of every operand and result (`xla_attention::call`).

use crate::support::conformance::{Case, Typed, cases};
use crate::support::frame::INVALID_ARGUMENT;
use std::ptr::null_mut;
use xla_attention::{Action, Call, DType, Error, Op, Tensor, call};

/// Operands whose rows may lie apart. Everything else is dense; a result that is an operand's memory has its strides.
fn may_be_strided(op: Op) -> &'static [&'static str] {
    match op {
        Op::PagedAttention => &["query", "kv_cache", "block_tables"],
        Op::PagedAttentionUpdate => &["query", "kv_cache", "block_tables", "key", "value"],
        Op::FlashAttnVarlen => &["q", "k", "v", "block_table"],
        Op::FlashAttnVarlenBwd => &["dout", "q", "k", "v", "out"],
        Op::KvCacheUpdate => &["kv_cache", "key", "value"],
        Op::KvCacheUpdateSplit => &["k_cache", "v_cache", "key", "value"],
        Op::RopeKvCacheUpdate => &["kv_cache", "query", "key", "value", "cos_sin"],
        Op::MergeAttentionStates => &["out_a", "out_b"],
        Op::GatherKvCache => &["k_cache", "v_cache", "block_tables"],
        Op::SimpleAdd => &[],
    }
}

/// The case of this name of a target.
fn case(op: Op, name: &str) -> Option<&'static Case> {
    cases().find(|case| case.target == op.signature().target && case.name == name)
}

/// Types and shapes of a right call with every operand and result that may be given. One number for all heads has no strides
/// to speak of, so there is one a head.
fn right(op: Op) -> [Vec<(&'static str, Typed)>; 2] {
    let fullest = |name| case(op, name).or(case(op, "the right call")).unwrap();
    let mut operands = fullest("every optional operand").operands.clone();
    for (name, buffer) in &mut operands {
        if name.ends_with("_scale") {
            buffer.dims = vec![2];
        }
    }
    [operands, fullest("every optional result").results.clone()]
}

/// Strides of a tensor whose rows have `gap` elements between them, and whose elements lie `last` apart.
fn strides(dims: &[i64], last: i64, gap: i64) -> Vec<i64> {
    let mut strides = vec![last; dims.len()];
    let mut row = last * dims.last().copied().unwrap_or(1) + gap;
    for axis in (0..dims.len().saturating_sub(1)).rev() {
        strides[axis] = row;
        row *= dims[axis];
    }
    strides
}

/// What a check says of the right call with these strides of one operand, or of one result, or of both of a cache.
fn outcome(op: Op, of: &[(usize, usize)], strides: &[i64]) -> Result<(), Error> {
    let buffers = right(op);
    let mut views = [vec![], vec![]];
    for (part, list) in buffers.iter().enumerate() {
        for (index, (_, buffer)) in list.iter().enumerate() {
            let dense = Tensor::dense(DType(buffer.dtype.0), null_mut(), &buffer.dims);
            views[part].push(Tensor { strides: of.contains(&(part, index)).then_some(strides), ..dense });
        }
    }
    let invocation = case(op, "the right call").unwrap().invocation(false);
    let attributes = invocation.sorted_attributes();
    // SAFETY: a check touches no memory.
    unsafe {
        call(&Call { op, action: Action::Check, operands: &views[0], results: &views[1], attributes: &attributes })
    }
}

#[test]
fn every_buffer_follows_or_refuses_strides_as_its_operator_says() {
    let mut checked = 0;
    for op in Op::ALL {
        let (buffers, strided, target) = (right(op), may_be_strided(op), op.signature().target);
        outcome(op, &[], &[]).unwrap();
        for (part, index) in
            [0, 1].into_iter().flat_map(|part| (0..buffers[part].len()).map(move |index| (part, index)))
        {
            let (name, Typed { dims, .. }) = &buffers[part][index];
            // A size of 1 may carry any stride, and what has no element is left out.
            if dims.last().is_none_or(|size| *size < 2) {
                continue;
            }
            checked += 1;
            let other = buffers[1 - part].iter().position(|(other, _)| other == name).map(|index| (1 - part, index));
            let is_followed = strided.contains(name) && (part == 0 || other.is_some());
            let shown = if part == 1 && other.is_some() { format!("result {name}") } else { (*name).to_owned() };
            let apart = strides(dims, 2, 0);
            let error = outcome(op, &[(part, index)], &apart).unwrap_err();
            let expected = if is_followed { "1 for the last dimension" } else { "a dense tensor" };
            let text = format!("{target}: {shown} has strides Some({apart:?}), expected {expected}");
            assert_eq!((error.code as i32, error.message), (INVALID_ARGUMENT, text));
            let rows = strides(dims, 1, 16);
            let both: Vec<_> = [(part, index)].into_iter().chain(other).collect();
            match outcome(op, &both, &rows) {
                Ok(()) => assert!(is_followed || dims.len() == 1, "{target}: {shown} follows {rows:?}"),
                Err(error) => assert!(!is_followed && error.message.ends_with("expected a dense tensor"), "{error}"),
            }
        }
    }
    assert!(checked >= 80, "{checked} buffers");
}

#[test]
fn strides_are_as_many_as_sizes() {
    let error = outcome(Op::PagedAttention, &[(0, 0)], &[64, 16]).unwrap_err();
    assert_eq!(error.message, "xla_gpu_paged_attention: query has 2 strides, expected 3");
}
