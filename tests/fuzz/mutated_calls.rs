//! Mutated calls: cases of the conformance tables with up to three random mutations.
//!
//! The tables are the corpus; a mutation that reveals a defect is added to them as a case. Each run makes the same
//! calls. `XLA_ATTENTION_TEST_CASES=5000000 cargo test --test fuzz` makes more of them. `tests/coverage_fuzz` applies
//! the same mutations, guided by code coverage.

use crate::mutated_call::MutatedCall;
use crate::support::conformance::{ConformanceCase, cases};
use crate::support::for_all;
use crate::try_call::{CallOutcome, try_call};
use std::cell::Cell;

#[test]
fn mutated_calls_are_refused_alike_or_run_within_their_memory() {
    let seeds: Vec<&'static ConformanceCase> = cases().filter(|c| c.memory.is_none()).collect();
    let valid: Vec<&'static ConformanceCase> = seeds.iter().copied().filter(|c| c.refusal.is_none()).collect();
    let counts = Cell::new([0; 4]);
    for_all(20_000, &|random| {
        let of = if random.chance(50) { &seeds } else { &valid };
        let case = random.one_of(of);
        let mut mutated = MutatedCall::new(case);
        for _ in 0..random.below(4) {
            mutated.mutate(random);
        }
        let outcome = try_call(&mutated, &case.aliases, random.next());
        let mut count = counts.get();
        count[outcome as usize] += 1;
        counts.set(count);
    });
    let [not_decoded, refused, not_run, ran] = counts.get();
    println!("{not_decoded} not decoded, {refused} refused, {not_run} accepted but not run, {ran} ran");
    let all = counts.get().iter().sum::<usize>();
    let tried = |outcome: CallOutcome| counts.get()[outcome as usize] > all / 20;
    assert!(
        [CallOutcome::NotDecoded, CallOutcome::Refused, CallOutcome::Ran].into_iter().all(tried),
        "one kind of call is hardly tried"
    );
}
