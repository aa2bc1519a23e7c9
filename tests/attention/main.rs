//! What holds for both attention operators: the reference itself, and every pair of their options.

#![allow(clippy::unwrap_used, reason = "a failed step is a failed test")]

#[path = "../support/mod.rs"]
mod support;

mod pairwise;
mod reference;
mod stored;
