//! Fuzz tests.
//!
//! [`mutated_calls`] changes cases of the conformance tables in up to three places. A call that is refused must not
//! access memory. [`runner`] makes valid calls with hostile contents and compares them with the reference.
//! docs/dev/tests.md describes how to run and repeat them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a failed test")]
#![allow(clippy::print_stdout, reason = "says what was tried")]

mod attention;
mod attention_update;
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
