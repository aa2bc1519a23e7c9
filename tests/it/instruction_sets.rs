//! The CPU backend agrees with the reference with each instruction set. All other tests use the widest one that the CPU
//! has.
//!
//! The instruction set is chosen once per process, so this test starts its binary again for each of them.

use crate::support::{runs_on_cpu, skips_slow_test};
use std::process::Command;

/// Values of `XLA_ATTENTION_CPU_ISA`. `portable_pairs` multiplies bf16 pairs as AVX-512 BF16 does, on any CPU.
const SETS: [&str; 4] = ["portable", "avx2", "avx512", "portable_pairs"];

/// Filters for the tests to run: pairs of options and dtypes, head dimensions, thread pools, long sequences.
const TESTS: [&str; 5] = [
    "every_pair_of_options_agrees",
    "every_head_dimension_agrees",
    "gives_the_same_bits",
    "long_sequences_agree",
    "sums_over_many_rows_and_keys_agree",
];

#[test]
fn every_instruction_set_agrees_with_the_reference() {
    if !runs_on_cpu() || std::env::var_os("XLA_ATTENTION_CPU_ISA").is_some() {
        println!("skipped: needs the CPU backend and XLA_ATTENTION_CPU_ISA unset");
        return;
    }
    if skips_slow_test() {
        return;
    }
    for set in SETS {
        if set == "portable_pairs" && !cfg!(feature = "failpoints") {
            continue;
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args(TESTS).env("XLA_ATTENTION_CPU_ISA", set).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let passed = text.split("test result: ok. ").nth(1).and_then(|rest| rest.split(' ').next());
        let passed: usize = passed.unwrap_or_else(|| panic!("{set}: {text}")).parse().unwrap();
        assert!(output.status.success() && passed >= 10, "{set}: {passed} tests passed");
    }
}
