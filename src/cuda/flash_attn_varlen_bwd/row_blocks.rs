//! The blocks of rows that CTAs of the portable kernels hold (`kernels/include/bwd/row_blocks.cuh`).

use crate::cuda::params::bias::FEW_ROWS;
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

    /// The blocks of `held` rows of a period that come together, before as many of the next one, if `places` CTAs run at a time.
    ///
    /// Under a mask periods alternate, so that the longest blocks come first, which matters where there are few. Otherwise all blocks of a
    /// sequence come together, which use the same rows of the bias, but for a block of few rows, if that takes a place that is left.
    pub(super) fn per_turn(self, forward: &Attention, held: usize, places: usize) -> usize {
        const FEW: usize = 3;
        let is_masked = forward.score.is_masked();
        let all = self.count(held).saturating_mul(forward.num_kv_heads);
        if is_masked && all <= FEW * places {
            1
        } else if !is_masked && self.leaves_places(forward.num_kv_heads, held, places) {
            self.period / held
        } else {
            self.period.div_ceil(held).max(1)
        }
    }

    /// Whether the last block of each period has few rows, and the places that the CTAs of the others leave in the end are enough for all
    /// of them, of which a place takes several.
    fn leaves_places(self, num_kv_heads: usize, held: usize, places: usize) -> bool {
        const PER_PLACE: usize = 8;
        if self.period <= held || !(1..=FEW_ROWS as usize).contains(&(self.period % held)) {
            return false;
        }
        let short = (self.rows / self.period).saturating_mul(num_kv_heads);
        let others = short.saturating_mul(self.period / held);
        short <= PER_PLACE * (others.div_ceil(places) * places - others)
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
    fn blocks_of_few_rows_come_last_if_they_take_places_that_are_left() {
        use crate::cuda::attention::tests::problem;
        let per_turn = |(seqs, heads, rows), held, places, is_causal: bool| {
            let mut forward = problem(64, 1, heads, 64);
            forward.num_kv_heads = heads;
            forward.score.window_right = if is_causal { 0 } else { -1 };
            RowBlocks::of_sequences(seqs * rows, seqs, rows).per_turn(&forward, held, places)
        };
        assert_eq!(per_turn((8, 16, 1025), 128, 264, false), 8);
        assert_eq!(per_turn((8, 16, 1026), 128, 264, false), 8);
        // Not few rows, and none at all.
        assert_eq!(per_turn((8, 16, 1027), 128, 264, false), 9);
        assert_eq!(per_turn((8, 16, 1024), 128, 264, false), 8);
        assert_eq!(per_turn((1, 1, 2), 128, 264, false), 1);
        assert_eq!(per_turn((0, 1, 0), 128, 264, false), 1);
        // More of them than places are left.
        assert_eq!(per_turn((64, 12, 257), 128, 264, false), 3);
        // Under a mask periods alternate where CTAs are few.
        assert_eq!(per_turn((2, 16, 1025), 128, 264, true), 1);
        assert_eq!(per_turn((8, 16, 1025), 128, 264, true), 9);
    }

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
