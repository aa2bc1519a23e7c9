//! Tensor maps of TMA.

/// A tensor map (`CUtensorMap`): which box of which tensor a copy fetches. The host encodes it; kernels do not look inside.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct TensorMap {
    pub words: [u64; 16],
}
