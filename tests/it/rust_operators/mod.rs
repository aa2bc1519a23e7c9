//! The safe functions of Rust: each makes the call that its handler makes, on the CPU or, with
//! `XLA_ATTENTION_TEST_DEVICE=cuda`, on the GPU; and what they refuse.

mod driver;
mod host;
mod refusals;

use crate::support::right_calls;
use crate::support::{Case, GradientCase, Invocation, Options, Rope, Side, Step, Update, Wanted};
use std::collections::BTreeSet;
use xla_attention::Op;

/// Calls of every operator, and of attention every fifth of those that together hold every pair of options.
fn calls() -> Vec<Invocation> {
    let mut all = right_calls::with_numbers();
    for (target, shape, storage, _) in Options::ATTENTION.calls().into_iter().step_by(5) {
        let batch = shape.batch();
        all.push(Case::store(target, &batch, &storage).invocation());
        all.extend((target == Op::PagedAttention).then(|| Step::new(&batch, &storage).invocation(true)));
    }
    for (_, shape, storage, wanted) in Options::GRADIENTS.calls().into_iter().step_by(5) {
        let wanted = Wanted { deterministic: true, ..wanted };
        all.push(GradientCase::store(&shape.batch(), &storage, wanted).invocation());
    }
    let slots = vec![-1, 3, i64::MAX, 12, 11, i64::MIN];
    all.push(Update { slots, wide_slots: true, ..Update::default() }.invocation(true));
    all.push(
        Rope { interleaved: true, rotated: 12, positions: vec![-3, 2, 7, 12], ..Rope::default() }.invocation(true),
    );
    all
}

#[test]
fn each_function_makes_the_calls_that_its_handler_makes() {
    let mut called = BTreeSet::new();
    for call in calls() {
        called.insert(call.target);
        let (found, expected) = (driver::results(&call), call.results(Side::EndsAtGuard));
        for ((found, expected), result) in found.iter().zip(&expected).zip(&call.results) {
            let same = result.name == "workspace" || found == expected;
            assert!(same, "{} {}: {} differs", call.target, call.what, result.name);
        }
    }
    assert_eq!(called.len(), Op::ALL.len(), "{called:?}");
}
