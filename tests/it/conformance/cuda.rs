//! The handlers for the platform `CUDA` refuse the same calls, before they load a driver.

use super::frame_at_invalid_address;
use crate::support::conformance::{ConformanceCase, cases};
use crate::support::{CUDA, Frame, HandlerSet, Refusal, Side, Stage, handler_sets};

/// A refusal of the initialize handler. It names its stage, and counts one operand less because it binds no execution
/// context.
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
        Some(_) => frame_at_invalid_address(frame, case).run(),
        None => case.invocation(false).run_in(frame, Side::EndsAtGuard).map(|_| ()),
    };
    outcome.err()
}

#[test]
fn the_cuda_handlers_refuse_what_the_tables_refuse() {
    let (mut ran, mut mismatches) = (0, Vec::new());
    for case in cases() {
        let Some(expected) = &case.refusal else { continue };
        ran += 1;
        for set in handler_sets() {
            for (stage, expected) in [(Stage::Initialize, at_initialize(expected)), (Stage::Execute, expected.clone())]
            {
                let (actual, expected) = (refusal(set, case, stage), set.expected_refusal(stage, &expected));
                if actual.as_ref() != Some(&expected) {
                    mismatches.push(format!("{}: {} {stage:?}: {actual:?}, not {expected:?}", case.target, case.name));
                }
            }
        }
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
    assert!(ran >= 500, "{ran} cases");
}
