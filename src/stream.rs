//! A CUDA stream as an address, so that layers above the CUDA backend can pass it without naming CUDA's types.

/// A CUDA stream of the current context (`CUstream`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub usize);
