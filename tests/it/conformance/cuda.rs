//! The handlers for the platform `CUDA`, which find the same mistakes, before they look for a driver.

use super::claimed;
use crate::support::conformance::{ConformanceCase, cases};
use crate::support::{CUDA, Frame, HandlerSet, Refusal, Side, Stage, handler_sets};

/// A refusal as the initialize handler gives it: it names its stage, and binds no context that would count as operand.
fn at_initialize(refusal: &Refusal) -> Refusal {
    let Some(rest) =
        refusal.text.strip_prefix("[execute] Failed to decode all FFI handler operands (bad operands at: ")
    else {
        return refusal.clone();
    };
    let (at, rest) = rest.split_once(')').unwrap();
    let at: usize = at.parse().unwrap();
    let text = format!("[initialize] Failed to decode all FFI handler operands (bad operands at: {}){rest}", at - 1);
    Refusal { text, ..refusal.clone() }
}

fn refusal(set: HandlerSet, case: &ConformanceCase, stage: Stage) -> Option<Refusal> {
    let row = set.target(case.target, CUDA);
    let handler = if stage == Stage::Initialize { row.initialize } else { row.execute };
    let frame = Frame::of(handler.unwrap(), stage).stream(0);
    let outcome = match case.memory {
        Some(_) => claimed(frame, case).run(),
        None => case.invocation(false).run_in(frame, Side::EndsAtGuard).map(|_| ()),
    };
    outcome.err()
}

#[test]
fn the_cuda_handlers_refuse_what_the_tables_refuse() {
    let (mut ran, mut complaints) = (0, Vec::new());
    for case in cases() {
        let Some(expected) = &case.refusal else { continue };
        ran += 1;
        for set in handler_sets() {
            for (stage, expected) in [(Stage::Initialize, at_initialize(expected)), (Stage::Execute, expected.clone())]
            {
                let (actual, expected) = (refusal(set, case, stage), set.expected_refusal(stage, &expected));
                if actual.as_ref() != Some(&expected) {
                    complaints.push(format!("{}: {} {stage:?}: {actual:?}, not {expected:?}", case.target, case.name));
                }
            }
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(ran >= 500, "{ran} cases");
}
