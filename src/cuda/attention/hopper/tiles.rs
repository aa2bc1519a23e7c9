//! The tile shapes of Hopper's prefill kernels, and which calls they fit.

use super::super::tiles::transforms_logits;
use crate::cuda::tiles::HopperPrefillTile;
use crate::problem::attention::Attention;
use crate::tensor::DType;

impl HopperPrefillTile {
    /// Packed query rows per work tile.
    pub(in crate::cuda::attention) fn rows(&self) -> i64 {
        64 * i64::from(self.warpgroups)
    }

    pub(in crate::cuda::attention) fn threads(&self) -> u32 {
        128 * (self.warpgroups + 1)
    }

    /// Elements of `bytes` bytes in a row of a swizzle atom: 128 bytes, or 64 if the head dimensions are no multiples of that.
    pub(in crate::cuda::attention) fn atom_row(&self, bytes: usize) -> i64 {
        let is_wide = ((self.dim | self.value_dim) as usize * bytes).is_multiple_of(128);
        (if is_wide { 128 } else { 64 }) / bytes as i64
    }

    /// The same for K and V.
    pub(super) fn kv_atom_row(&self) -> i64 {
        self.atom_row(self.bytes as usize)
    }

    /// D and Dv together, which the time per score grows with.
    pub(in crate::cuda::attention) fn columns(&self) -> u32 {
        self.dim + self.value_dim
    }

    /// Whether D and Dv fit. The fp8 tiles take exactly theirs, because fewer columns would change what small D compute:
    /// products in 8 bits instead of 16 (`docs/semantics.md`, "fp8 queries").
    fn has_columns(&self, problem: &Attention) -> bool {
        let [dim, value_dim] = [self.dim, self.value_dim].map(|dim| dim as usize);
        match self.bytes {
            1 => [dim, value_dim] == [problem.head_dim, problem.value_dim],
            _ => dim >= problem.head_dim && value_dim >= problem.value_dim,
        }
    }

    /// Whether the tensor cores take q, K and V of the call as they are, D and Dv fit, and the logits transform is built.
    pub(in crate::cuda::attention) fn serves(&self, problem: &Attention) -> bool {
        let (dtype, out) = (problem.q.dtype, problem.out.dtype);
        let bytes = if [DType::F16, DType::BF16].contains(&dtype) && [dtype, DType::F32].contains(&out) {
            2
        } else if dtype == DType::F8E4M3FN && [DType::F16, DType::BF16].contains(&out) {
            1
        } else {
            return false;
        };
        let score = &problem.score;
        let logits = match bytes {
            1 if score.softcap > 0.0 || score.alibi.is_some() => "softcap_alibi",
            1 => "scaled",
            _ if transforms_logits(problem) => "softcap_alibi",
            _ => "none",
        };
        problem.kv_dtype == dtype && self.bytes == bytes && self.has_columns(problem) && self.logits == logits
    }
}
