//! The blocks of rows that CTAs of the portable kernels hold (`kernels/include/bwd/row_blocks.cuh`).

use crate::problem::attention::{Attention, Bias};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;

/// Rows whose blocks begin anew after each period. `rows` is a multiple of `period`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowBlocks {
    rows: usize,
    pub(super) period: usize,
}

impl RowBlocks {
    /// Blocks of all rows.
    pub(super) fn of_all(rows: usize) -> Self {
        Self { rows, period: rows }
    }

    /// Blocks that begin with sequences, if all of `max_seqs` have `own` rows. Short ones would make more blocks, each of which looks for
    /// its sequence among all.
    fn of_sequences(rows: usize, max_seqs: usize, own: usize) -> Self {
        const MIN_ROWS: usize = 128;
        let have_as_many = own >= MIN_ROWS && own.checked_mul(max_seqs) == Some(rows);
        if have_as_many { Self { rows, period: own } } else { Self::of_all(rows) }
    }

    /// The blocks of rows of K and of q of a call with this bias, whose rows and keys a batch of matrices has.
    pub(super) fn of_bias(problem: &FlashAttnVarlenBwd, bias: &Bias) -> [Self; 2] {
        let (forward, seqs) = (&problem.forward, problem.forward.max_seqs);
        let keys = Self::of_sequences(problem.num_keys, seqs, bias.keys);
        [keys, Self::of_sequences(forward.num_rows, seqs, bias.rows)]
    }

    /// These, with `group` packed rows each.
    pub(super) fn packed(self, group: usize) -> Self {
        Self { rows: self.rows * group, period: self.period * group }
    }

    /// Whether blocks of all periods shall take turns, if `places` CTAs run at a time: the longest under a mask then come first, which
    /// matters where there are few. Otherwise adjacent blocks of a sequence come together, which use the same rows of the bias.
    pub(super) fn alternate(self, forward: &Attention, held: usize, places: usize) -> bool {
        const FEW: usize = 3;
        let is_masked = forward.score.window_left >= 0 || forward.score.window_right >= 0;
        is_masked && self.count(held).saturating_mul(forward.num_kv_heads) <= FEW * places
    }

    /// The number of blocks of up to `held` rows.
    pub(super) fn count(self, held: usize) -> usize {
        if self.rows == 0 { 0 } else { self.rows / self.period * self.period.div_ceil(held) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_begin_with_sequences_that_all_have_the_rows_of_the_bias() {
        let blocks = |rows, seqs, own| RowBlocks::of_sequences(rows, seqs, own).count(128);
        assert_eq!(blocks(4 * 2047, 4, 2047), 64);
        assert_eq!(blocks(4 * 197, 4, 197), 8);
        // In batches of other sequences they do not.
        assert_eq!(blocks(4 * 197, 4, 198), 7);
        assert_eq!(blocks(4 * 197, 5, 197), 7);
        assert_eq!(blocks(4 * 100, 4, 100), 4);
        assert_eq!(blocks(0, 4, 0), 0);
        assert_eq!(blocks(0, 0, 197), 0);
        assert_eq!(RowBlocks::of_sequences(4 * 197, 4, 197).packed(8).count(128), 4 * 13);
    }
}
