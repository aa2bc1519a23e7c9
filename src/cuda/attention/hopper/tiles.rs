//! How Hopper's prefill kernels cut up the work: what follows from their tiles.

use super::super::tiles::transforms_logits;
pub(in crate::cuda::attention) use crate::cuda::tiles::HopperPrefillTile as Tile;
use crate::problem::attention::Attention;
use crate::tensor::DType;

impl Tile {
    /// Packed query rows of a tile.
    pub(in crate::cuda::attention) fn rows(&self) -> i64 {
        64 * i64::from(self.warpgroups)
    }

    pub(super) fn threads(&self) -> u32 {
        128 * (self.warpgroups + 1)
    }

    /// Elements of `bytes` bytes in a row of a panel in shared memory: the widest panels that both dimensions are
    /// multiples of.
    pub(super) fn panel(&self, bytes: usize) -> i64 {
        let is_wide = ((self.dim | self.value_dim) as usize * bytes).is_multiple_of(128);
        (if is_wide { 128 } else { 64 }) / bytes as i64
    }

    pub(super) fn key_panel(&self) -> i64 {
        self.panel(self.bytes as usize)
    }

    /// Whether the tensor cores take q, K and V of the call as they are, and the logits transform is built.
    pub(super) fn serves(&self, problem: &Attention) -> bool {
        let (dtype, out) = (problem.q.dtype, problem.out.dtype);
        let bytes = if [DType::F16, DType::BF16].contains(&dtype) && out == dtype {
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
        problem.kv_dtype == dtype
            && self.bytes == bytes
            && [self.dim as usize, self.value_dim as usize] == [problem.head_dim, problem.value_dim]
            && self.logits == logits
    }
}
