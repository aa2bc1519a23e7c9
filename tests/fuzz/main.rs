//! Calls that no program makes on purpose.
//!
//! [`damaged`]: each case of the conformance tables, changed at random in up to three places. What is refused must be
//! refused without a touch of memory. [`runner`]: calls that are accepted, hostile in all that they may be hostile in, and
//! what comes of them held against the definition; docs/tests.md tells how to run and to repeat them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a failed test")]
#![allow(clippy::print_stdout, reason = "says what was tried")]

mod attempt;
mod attention;
mod cache;
mod damaged;
mod draw;
mod memory;
mod mutation;
mod runner;
mod settings;
#[path = "../support/mod.rs"]
mod support;
