//! Damaged calls: each case of the conformance tables, changed at random in up to three places.
//!
//! The tables are the corpus: what is found here becomes a case there. A run tries the same calls every time;
//! `PROPTEST_CASES=5000000 cargo test --test fuzz` goes on to others.

use crate::mutation::{Plan, Sizes, mutations};
use crate::support::array::{Array, BF16, Dtype, F16, F32, F64, I32};
use crate::support::frame::{CPU, Frame, INVALID_ARGUMENT, Refusal, UNIMPLEMENTED};
use crate::support::guard::{Guarded, Side};
use crate::support::invocation::{Attr, Invocation, POISON};
use crate::support::pools::Inline;
use crate::support::random::Random;
use crate::support::strategies::for_all;
use crate::table::{Case, cases};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use std::cell::Cell;
use std::collections::BTreeMap;
use xla_attention::ops::AttributeKind;
use xla_attention::{Action, Attribute, Call, DType, Op, Tensor, call};

/// An accepted call with more elements than this in one of its buffers is not run.
const MOST_ELEMENTS: i64 = 4096;

fn operator(target: &str) -> Op {
    let target = if target == "XlaGpuSimpleAdd" { "xla_gpu_simple_add" } else { target };
    Op::ALL.into_iter().find(|op| op.signature().target == target).unwrap()
}

/// The attributes as the operator wants them, if their names and types are right.
fn attributes(plan: &Plan) -> Option<Vec<Attribute>> {
    let wanted = operator(plan.target).signature().attributes;
    // As in a frame, a later one replaces an earlier one of the same name.
    let given: BTreeMap<&str, &Attr> = plan.attributes.iter().map(|(name, value)| (*name, value)).collect();
    let typed = |(name, kind): &(&str, AttributeKind)| match (kind, given.get(name)?) {
        (AttributeKind::Bool, Attr::Bool(v)) => Some(Attribute::Bool(*v)),
        (AttributeKind::I64, Attr::I64(v)) => Some(Attribute::I64(*v)),
        (AttributeKind::F32, Attr::F32(v)) => Some(Attribute::F32(*v)),
        _ => None,
    };
    if given.len() == wanted.len() { wanted.iter().map(typed).collect() } else { None }
}

fn view(buffer: &Sizes) -> Tensor<'_> {
    Tensor::dense(DType(buffer.dtype.0), std::ptr::null_mut(), &buffer.dims)
}

/// What the operator says of the sizes; `None` where the decoding of the frame refuses the call before.
fn checked(plan: &Plan) -> Option<Result<(), Refusal>> {
    let op = operator(plan.target);
    let signature = op.signature();
    let counts = (signature.required_operands..=signature.operands.len()).contains(&plan.operands.len())
        && (signature.required_results..=signature.results.len()).contains(&plan.results.len());
    let attributes = attributes(plan).filter(|_| counts)?;
    let operands: Vec<Tensor> = plan.operands.iter().map(view).collect();
    let results: Vec<Tensor> = plan.results.iter().map(view).collect();
    let action = Action::Check;
    // SAFETY: nothing is touched where sizes alone are checked.
    let outcome =
        unsafe { call(&Call { op, action, operands: &operands, results: &results, attributes: &attributes }) };
    Some(outcome.map_err(|e| Refusal { code: e.code as i32, text: e.message }))
}

/// What the handler says if every buffer lies at an address that faults.
fn claimed(plan: &Plan) -> Result<(), Refusal> {
    let nowhere = Guarded::new("a buffer of a refused call", Side::EndsAtGuard, &[]);
    let frame = Frame::new(plan.target, CPU).attributes(&plan.attributes);
    // SAFETY: the call is one that has to be refused.
    let operand = |f: Frame<'static>, x: &Sizes| unsafe { f.claimed_operand(x.dtype.0, &x.dims, nowhere.data()) };
    // SAFETY: as above.
    let result = |f: Frame<'static>, x: &Sizes| unsafe { f.claimed_result(x.dtype.0, &x.dims, nowhere.data()) };
    plan.results.iter().fold(plan.operands.iter().fold(frame, operand), result).run()
}

/// Finite numbers; integers are as hostile as they can be.
fn contents(random: &mut Random, sizes: &Sizes) -> Array {
    let count = sizes.elements().unwrap() as usize;
    if sizes.dtype == I32 {
        let values: Vec<i32> = (0..count).map(|_| random.hostile_i32()).collect();
        return Array::i32s(&sizes.dims, &values);
    }
    let values: Vec<f64> = (0..count).map(|_| random.normal()).collect();
    Array::new(sizes.dtype, &sizes.dims, &values)
}

/// The call with memory; its updates in place, if they can be.
fn invocation(plan: &Plan, aliases: &[(usize, usize)], seed: u64) -> Invocation {
    let mut random = Random::new(seed);
    let call = Invocation { what: format!("{plan:?} seed {seed}"), ..Invocation::new(plan.target) };
    let call = plan.operands.iter().fold(call, |call, x| call.operand(x.name, contents(&mut random, x)));
    let call = plan.attributes.iter().fold(call, |call, (name, value)| call.attribute(name, value.clone()));
    let in_place = random.below(2) == 0;
    plan.results.iter().enumerate().fold(call, |call, (index, x)| {
        let operand = aliases.iter().find(|(operand, result)| {
            let given = plan.operands.get(*operand);
            in_place && *result == index && given.is_some_and(|o| (o.dtype, &o.dims) == (x.dtype, &x.dims))
        });
        match operand {
            Some((operand, _)) => call.result_in_place(x.name, *operand),
            None => call.result(x.name, x.dtype, &x.dims),
        }
    })
}

/// An element that was never written: bits that no arithmetic on finite floats gives.
fn unwritten(result: &Array) -> Option<usize> {
    let is_float = [F16, BF16, F32, F64].contains(&result.dtype);
    let untouched = |element: &[u8]| is_float && element.iter().all(|&b| b == POISON);
    result.bytes.chunks_exact(result.dtype.size()).position(untouched)
}

fn run(plan: &Plan, aliases: &[(usize, usize)], seed: u64) {
    let call = invocation(plan, aliases, seed);
    let side = if seed.is_multiple_of(2) { Side::EndsAtGuard } else { Side::BeginsAtGuard };
    let results =
        call.run(side, &Inline(3)).unwrap_or_else(|e| panic!("the sizes were accepted, the call was not: {e:?}"));
    for (outcome, result) in call.results.iter().zip(&results).filter(|(outcome, _)| outcome.name != "workspace") {
        assert_eq!(unwritten(result), None, "{} has an element that was not written", outcome.name);
    }
}

/// A type of which [`contents`] can make numbers.
fn is_known(dtype: Dtype) -> bool {
    (1..=20).contains(&dtype.0) && dtype.name() != "unknown"
}

#[test]
fn damaged_calls_are_refused_alike_or_run_within_their_memory() {
    let seeds: Vec<&'static Case> = cases().filter(|c| c.memory.is_none()).collect();
    let right: Vec<&'static Case> = seeds.iter().copied().filter(|c| c.refusal.is_none()).collect();
    let (decoding, refused, too_large, ran) = (Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0));
    let count = |cell: &Cell<usize>| cell.set(cell.get() + 1);
    let damaged = (any::<(Index, bool)>(), vec(mutations(), 0..4), any::<u64>());
    for_all(20_000, damaged, |((seed, of_all), changes, contents)| {
        let case = *seed.get(if of_all { &seeds } else { &right });
        let mut plan = Plan::new(case);
        for change in changes {
            change.damage(&mut plan);
        }
        match checked(&plan) {
            None => {
                count(&decoding);
                let refusal = claimed(&plan).expect_err("a frame that cannot be decoded");
                assert_eq!(refusal.code, INVALID_ARGUMENT, "{plan:?}: {refusal:?}");
            }
            Some(Err(refusal)) => {
                count(&refused);
                assert!([INVALID_ARGUMENT, UNIMPLEMENTED].contains(&refusal.code), "{plan:?}: {refusal:?}");
                let target = operator(plan.target).signature().target;
                assert!(refusal.text.starts_with(&format!("{target}: ")), "{plan:?}: {refusal:?}");
                assert_eq!(claimed(&plan), Err(refusal), "{plan:?}");
            }
            Some(Ok(())) => {
                let buffers = || plan.operands.iter().chain(&plan.results);
                if !buffers().all(|b| is_known(b.dtype) && b.elements().is_some_and(|n| n <= MOST_ELEMENTS)) {
                    return count(&too_large);
                }
                count(&ran);
                run(&plan, &case.aliases, contents);
            }
        }
    });
    let (decoding, refused, too_large, ran) = (decoding.get(), refused.get(), too_large.get(), ran.get());
    println!("{decoding} not decoded, {refused} refused, {too_large} too large to be run, {ran} ran");
    let all = decoding + refused + too_large + ran;
    assert!([decoding, refused, ran].into_iter().all(|n| n > all / 20), "one kind of call is hardly tried");
}
