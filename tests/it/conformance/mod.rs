//! The FFI conformance suite without XLA. Every case of the tables (`tests/conformance/README.md`) runs in hand-made
//! call frames with buffers that end at guard pages; further tests cover the rest of the protocol between XLA and the
//! handlers.
//!
//! `tests/python/test_conformance.py` runs the same tables through XLA.

#[cfg(feature = "cuda")]
mod cuda;
mod protocol;
mod versions;

use crate::support::conformance::{ConformanceCase, Typed, cases, driver, tables};
use crate::support::{
    Array, CPU, Frame, HandlerSet, InlinePool, Refusal, Stage, for_each_side, handler_sets, runs_on_cpu,
};
use std::collections::BTreeSet;
use xla_attention::Op;
use xla_attention::ops::AttributeKind;

/// Compares the outcome of an execute handler with the expected one; the text says how they differ.
fn mismatch(set: HandlerSet, case: &ConformanceCase, outcome: Result<Vec<Array>, Refusal>) -> Option<String> {
    let mismatch_text = |mismatch: String| Some(format!("{}: {}: {mismatch}", case.target, case.name));
    match (outcome, case.refusal.as_ref().map(|refusal| set.expected_refusal(Stage::Execute, refusal))) {
        (Ok(results), None) => {
            let wrong = case.results.iter().zip(&results).find(|((_, expected), actual)| !expected.is_met_by(actual));
            wrong.and_then(|((name, _), actual)| mismatch_text(format!("{name} is {:?}", actual.values())))
        }
        (Err(refusal), Some(expected)) if refusal == expected => None,
        (outcome, expected) => mismatch_text(format!("{:?}, expected {expected:?}", outcome.map(|_| "it worked"))),
    }
}

/// A frame whose buffers are all at the invalid address of the case.
fn frame_at_invalid_address<'a>(frame: Frame<'a>, case: &ConformanceCase) -> Frame<'a> {
    let address = std::ptr::without_provenance_mut(case.memory.unwrap());
    let frame = frame.attributes(&case.attributes);
    // SAFETY: each such case is refused because of its sizes or addresses, or has no element.
    let frame = case.operands.iter().fold(frame, |f, (_, x)| unsafe { f.operand(x.dtype, &x.dims, address) });
    // SAFETY: as for the operands.
    case.results.iter().fold(frame, |f, (_, x)| unsafe { f.result(x.dtype, &x.dims, address) })
}

#[test]
fn the_cpu_handlers_do_what_the_tables_say() {
    let (mut ran, mut mismatches) = (0, Vec::new());
    for (set, case) in handler_sets().into_iter().flat_map(|set| cases().map(move |case| (set, case))) {
        ran += 1;
        if case.memory.is_some() {
            let outcome = frame_at_invalid_address(set.frame(case.target, CPU), case).run();
            let expected =
                case.refusal.as_ref().map_or(Ok(()), |refusal| Err(set.expected_refusal(Stage::Execute, refusal)));
            if outcome != expected {
                mismatches.push(format!("{}: {}: {outcome:?}, expected {expected:?}", case.target, case.name));
            }
            continue;
        }
        for_each_side(|side| {
            let outcome = case.invocation(false).run_in(set.frame(case.target, CPU).pool(&InlinePool(4)), side);
            mismatches.extend(mismatch(set, case, outcome));
        });
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
    let frames = driver("frames");
    assert!(frames.cannot_express.is_empty(), "a frame expresses every case");
    assert!(ran >= handler_sets().len() * frames.at_least, "{ran} cases");
}

#[test]
fn working_calls_work_in_place() {
    let mut ran = BTreeSet::new();
    for case in cases().filter(|c| c.refusal.is_none() && c.memory.is_none() && !c.aliases.is_empty()) {
        ran.insert(case.target);
        for set in handler_sets() {
            for_each_side(|side| {
                let outcome = case.invocation(true).run_in(set.frame(case.target, CPU).pool(&InlinePool(4)), side);
                assert_eq!(mismatch(set, case, outcome), None);
            });
        }
    }
    assert!(ran.len() >= 5, "{ran:?}");
}

/// Runs, with `XLA_ATTENTION_TEST_DEVICE=cuda`, all cases that can be expressed without call frames, launched directly and
/// from a captured graph.
#[test]
fn the_gpu_does_what_the_tables_say() {
    if runs_on_cpu() {
        println!("skipped: XLA_ATTENTION_TEST_DEVICE does not choose a GPU");
        return;
    }
    let oldest = handler_sets()[0];
    for case in cases().filter(|c| c.fits) {
        for_each_side(|side| {
            assert_eq!(mismatch(oldest, case, case.invocation(false).run(side, &InlinePool(4))), None);
        });
    }
}

#[test]
fn the_tables_describe_every_target_as_its_signature_does() {
    for op in Op::ALL {
        let signature = op.signature();
        let table = &tables().iter().find(|t| t.interface.names[0] == signature.target).unwrap().interface;
        let names = |list: &[(&'static str, Typed)]| list.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(names(&table.operands), signature.operands);
        assert_eq!(names(&table.results), signature.results);
        let required = (signature.required_operands, signature.required_results);
        assert_eq!((table.required_operands, table.required_results), required);
        let kinds = table.attributes.iter().map(|(name, value)| match value.split(' ').next() {
            Some("i1") => (*name, AttributeKind::Bool),
            Some("i64") => (*name, AttributeKind::I64),
            _ => (*name, AttributeKind::F32),
        });
        assert_eq!(kinds.collect::<Vec<_>>(), signature.attributes);
    }
}

/// For each buffer the table must refuse a dtype, a size and a rank. Refusals of attributes are derived
/// (`conformance/derived.rs`).
#[test]
fn the_tables_have_a_refusal_for_every_part_of_every_interface() {
    let mut gaps = Vec::new();
    for table in tables() {
        let interface = &table.interface;
        let target = interface.names[0];
        let refused = || table.cases.iter().filter(|c| c.refusal.is_some() && c.memory.is_none());
        for (results, list) in [(false, &interface.operands), (true, &interface.results)] {
            for (name, declared) in list {
                let buffers = |case: &'static ConformanceCase| if results { &case.results } else { &case.operands };
                let given = || refused().filter_map(|c| buffers(c).iter().find(|(n, _)| n == name)).map(|(_, x)| x);
                let rank = declared.dims.len();
                let other_size = |x: &Typed| x.dims.len() == rank && x.dims != declared.dims && x.dims != [0];
                for (property, is_covered) in [
                    ("dtype", given().any(|x| x.dtype != declared.dtype)),
                    // A workspace may have any size.
                    ("size", *name == "workspace" || given().any(other_size)),
                    ("rank", given().any(|x| x.dims.len() != rank)),
                ] {
                    if !is_covered {
                        let part = if results { "result" } else { "operand" };
                        gaps.push(format!("{target}: {part} {name}: no wrong {property}"));
                    }
                }
            }
        }
        let wrong = table.cases.iter().find(|c| c.refusal.is_none() && c.memory.is_none() && !c.fits);
        gaps.extend(wrong.map(|c| format!("{target}: {} works and does not fit", c.name)));
    }
    assert!(gaps.is_empty(), "{}", gaps.join("\n"));
}
