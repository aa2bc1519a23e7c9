//! What the library does in processes of their own: the environment and libcuda are read once. The tests start this binary
//! again, each for one of its modules or tests.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failed step is a failed test; a child answers its parent"
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
