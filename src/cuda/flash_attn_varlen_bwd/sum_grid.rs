//! The grid of the kernel that sums the gradient of a bias from stored dS.

use crate::cuda::device::Device;
use crate::cuda::params::bias::{DBIAS_SUM_KEYS, DBIAS_SUM_THREADS};
use crate::problem::attention::{Attention, Bias};

/// The work of the CTAs of `attention_bwd_dbias_sum`.
#[derive(Clone, Copy)]
pub(super) struct SumGrid {
    pub(super) warps_per_row: usize,
    pub(super) tiles_per_cta: usize,
    pub(super) ctas: usize,
}

impl SumGrid {
    /// As few warps have the same row as leave no SM without work, and no more than there are heads or sequences for them; a CTA has as
    /// many adjacent tiles of keys as leave SMs several CTAs, because it takes long to find the sequences of its rows.
    pub(super) fn of(forward: &Attention, bias: &Bias, device: &Device) -> Self {
        const CTAS_PER_SM: usize = 6;
        // Results do not depend on the GPU, so neither do the warps that divide a sum.
        const NOMINAL_SMS: usize = 132;
        let wanted = |sms: usize| CTAS_PER_SM * sms.max(1);
        let warps = DBIAS_SUM_THREADS as usize / 32;
        let tiles = bias.keys.div_ceil(DBIAS_SUM_KEYS as usize);
        let row_blocks =
            |warps_per_row: usize| (bias.seqs * bias.heads).saturating_mul(bias.rows.div_ceil(warps / warps_per_row));
        let items = match (bias.seqs, bias.heads) {
            (_, 1) => forward.num_q_heads,
            (1, _) => forward.max_seqs,
            _ => 1,
        };
        let is_enough = |of: &usize| row_blocks(*of).saturating_mul(tiles) >= wanted(NOMINAL_SMS) || 2 * *of > items;
        let warps_per_row = [1, 2, 4].into_iter().find(is_enough).unwrap_or(warps);
        let blocks = row_blocks(warps_per_row);
        let tiles_per_cta = (blocks.saturating_mul(tiles) / wanted(device.sms as usize)).clamp(1, tiles.max(1));
        Self { warps_per_row, tiles_per_cta, ctas: blocks.saturating_mul(tiles.div_ceil(tiles_per_cta)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::attention::tests::{device, problem};
    use crate::tensor::DType;

    #[test]
    fn warps_divide_a_sum_where_rows_are_few_whatever_the_gpu_has() {
        let forward = Attention { num_q_heads: 8, max_seqs: 64, ..problem(64, 8, 1, 64) };
        let one = Bias { data: std::ptr::null(), dtype: DType::BF16, seqs: 1, heads: 1, rows: 197, keys: 200 };
        let grid = |bias: Bias, sms| {
            let SumGrid { warps_per_row, tiles_per_cta, ctas } =
                SumGrid::of(&forward, &bias, &Device { sms, ..device(false) });
            [warps_per_row, tiles_per_cta, ctas]
        };
        assert_eq!(grid(one, 132), [8, 1, 197]);
        assert_eq!(grid(one, 20), [8, 1, 197]);
        assert_eq!(grid(Bias { heads: 8, ..one }, 132), [4, 1, 8 * 99]);
        // Each pair's own has nothing to divide.
        assert_eq!(grid(Bias { seqs: 64, heads: 8, ..one }, 132)[0], 1);
        assert_eq!(grid(Bias { rows: 2048, keys: 2048, ..one }, 132), [1, 1, 1024]);
        assert_eq!(grid(Bias { heads: 8, rows: 2048, keys: 2048, ..one }, 132), [1, 4, 2048]);
        assert_eq!(grid(Bias { heads: 8, rows: 2048, keys: 2048, ..one }, 396), [1, 3, 4096]);
    }
}
