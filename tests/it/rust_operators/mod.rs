//! The safe Rust functions give the results of the handlers, on the CPU or with `XLA_ATTENTION_TEST_DEVICE=cuda` on the
//! GPU, and refuse invalid arguments.

mod driver;
mod host;
mod refusals;

use crate::support::valid_calls;
use crate::support::{
    AttentionCase, CacheUpdateCase, GradientCase, GradientOptions, Invocation, PagedUpdateCase, PairwiseOptions,
    RopeCase, Side,
};
use std::collections::BTreeSet;
use xla_attention::Op;

/// Calls of every operator, and every fifth attention call of the pairwise sets.
fn calls() -> Vec<Invocation> {
    let mut all = valid_calls::with_numbers();
    for (target, spec, memory_layout, _) in PairwiseOptions::ATTENTION.calls().into_iter().step_by(5) {
        let batch = spec.batch();
        all.push(AttentionCase::store(target, &batch, &memory_layout).invocation());
        all.extend(
            (target == Op::PagedAttention).then(|| PagedUpdateCase::new(&batch, &memory_layout).invocation(true)),
        );
    }
    for (_, spec, memory_layout, options) in PairwiseOptions::GRADIENTS.calls().into_iter().step_by(5) {
        let options = GradientOptions { deterministic: true, ..options };
        all.push(GradientCase::store(&spec.batch(), &memory_layout, options).invocation());
    }
    let slots = vec![-1, 3, i64::MAX, 12, 11, i64::MIN];
    all.push(CacheUpdateCase { slots, wide_slots: true, ..CacheUpdateCase::default() }.invocation(true));
    all.push(
        RopeCase { interleaved: true, rotated: 12, positions: vec![-3, 2, 7, 12], ..RopeCase::default() }
            .invocation(true),
    );
    all
}

#[test]
fn each_function_gives_the_results_of_its_handler() {
    let mut called = BTreeSet::new();
    for call in calls() {
        called.insert(call.target);
        let (actual, expected) = (driver::results(&call), call.results(Side::EndsAtGuard));
        for ((actual, expected), result) in actual.iter().zip(&expected).zip(&call.results) {
            let same = result.name == "workspace" || actual == expected;
            assert!(same, "{} {}: {} differs", call.target, call.description, result.name);
        }
    }
    assert_eq!(called.len(), Op::ALL.len(), "{called:?}");
}
