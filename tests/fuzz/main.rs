//! Calls that no program makes on purpose.
//!
//! [`mutated_calls`]: each case of the conformance tables, changed at random in up to three places. What is refused must be
//! refused without a touch of memory. [`runner`]: calls that are accepted, hostile in all that they may be hostile in, and
//! what comes of them held against the definition; docs/tests.md tells how to run and to repeat them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a failed test")]
#![allow(clippy::print_stdout, reason = "says what was tried")]

mod attention;
mod cache;
mod fuzz_call;
mod generator;
mod mutated_call;
mod mutated_calls;
mod runner;
mod settings;
#[path = "../support/mod.rs"]
mod support;
mod try_call;
