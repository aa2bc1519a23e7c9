//! The CPU's kernels with each instruction set: what other topics hold against the reference with the widest that there is.
//!
//! The set is chosen once in a process, so this binary is started again.

use crate::support::runs_on_cpu;
use std::process::Command;

/// What `XLA_ATTENTION_CPU_ISA` is set to. The last one multiplies pairs of bf16 as AVX-512 does, on any CPU.
const SETS: [&str; 4] = ["portable", "avx2", "avx512", "portable_pairs"];

/// Parts of the names of the tests: every pair of options and types, head dimensions, pools of threads, long sequences.
const TESTS: [&str; 4] =
    ["every_pair_of_options_agrees", "every_head_dimension_agrees", "gives_the_same_bits", "long_sequences_agree"];

#[test]
fn every_instruction_set_agrees_with_the_reference() {
    if !runs_on_cpu() || std::env::var_os("XLA_ATTENTION_CPU_ISA").is_some() {
        println!("skipped: for the CPU, with the instruction set that is found");
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
