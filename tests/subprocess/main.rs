//! Tests that need a separate process each, because the library reads the environment and loads libcuda once. Each test
//! starts this binary again for one of its modules or tests.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failed step is a failed test; a child prints its outcomes for its parent"
)]

mod check_mode;
#[cfg(feature = "cuda")]
mod cuda_contexts;
#[cfg(feature = "cuda")]
mod cuda_driver_errors;
#[cfg(feature = "cuda")]
mod cuda_kernel_files;
#[cfg(feature = "failpoints")]
mod failpoints;
#[path = "../support/mod.rs"]
mod support;
