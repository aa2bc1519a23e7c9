//! A CUDA stream by its address, so that everything above the CUDA backend can pass one on.

/// A CUDA stream of the current context (`CUstream`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub usize);
