//! Mutated calls (tests/fuzz/mutated_calls.rs) that libFuzzer chooses by code coverage.
//!
//! An input is a list of choices: a case of the conformance tables, a seed for the contents of its buffers, and
//! mutations until the input ends.

#![no_main]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a finding")]

#[path = "../../fuzz/mutated_call.rs"]
mod mutated_call;
#[path = "../../support/mod.rs"]
mod support;
#[path = "../../fuzz/try_call.rs"]
mod try_call;

use libfuzzer_sys::fuzz_target;
use mutated_call::MutatedCall;
use std::sync::LazyLock;
use support::conformance::{ConformanceCase, cases};
use support::{Random, keep_mappings};
use try_call::try_call;

static CASES: LazyLock<Vec<&'static ConformanceCase>> = LazyLock::new(|| {
    keep_mappings();
    cases().filter(|case| case.memory.is_none()).collect()
});

fuzz_target!(|bytes: &[u8]| {
    let mut random = Random::of_bytes(bytes);
    let case = random.one_of(&CASES);
    let seed = random.below(1 << 16) as u64;
    let mut mutated = MutatedCall::new(case);
    while random.left() > 0 {
        mutated.mutate(&mut random);
    }
    try_call(&mutated, &case.aliases, seed);
});
