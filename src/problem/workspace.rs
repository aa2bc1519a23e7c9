//! How large a workspace attention and its gradients want: what front-ends allocate as the last result.
//!
//! The size is a function of static values alone, the same wherever a program is traced, exported and run. A call takes
//! any size, also none: with less than this it plans with fewer or no parts of sequences, and stays right.

use super::{MAX_HEAD_DIM, Op};
use crate::tensor::DType;

/// CTAs for which the workspace is sized, whatever the GPU at hand: those of 132 SMs that run three each, or four where
/// rows are short. The kernels run so many on 8-bit keys, fewer on others.
const fn nominal_ctas(value_dim: i64) -> i64 {
    132 * if value_dim <= 64 { 4 } else { 3 }
}

/// Packed query rows of a decode tile.
const TILE_ROWS: i64 = 16;

/// What the place of a cut takes, and at most is lost where the workspace begins at an odd address.
const CUT_BYTES: i64 = 64;

/// `fixed + per_row * T + per_sequence * B` bytes, T being the query rows of a call and B its sequence slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceSize {
    /// Bytes of any call.
    pub fixed: i64,
    /// Bytes for each query row.
    pub per_row: i64,
    /// Bytes for each sequence slot.
    pub per_sequence: i64,
}

/// The static values of an attention call that its workspace depends on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSizes {
    /// Hq
    pub num_q_heads: i64,
    /// Hkv
    pub num_kv_heads: i64,
    /// D
    pub head_dim: i64,
    /// Dv
    pub value_dim: i64,
    /// Element type of q.
    pub dtype: DType,
    /// Whether the call asks for it.
    pub batch_invariant: bool,
}

impl AttentionSizes {
    /// What a call of an operator wants; `None` where it has no workspace.
    #[must_use]
    pub fn workspace_of(&self, op: Op) -> Option<WorkspaceSize> {
        match op {
            Op::FlashAttnVarlenBwd => Some(self.gradients_workspace()),
            _ => op.signature().results.contains(&"workspace").then(|| self.workspace()),
        }
    }

    /// What a call wants to run as fast as it can. Sizes that no call can have want nothing.
    ///
    /// Decode shares the keys of all sequences out between CTAs. Of a tile that several have a part of, each leaves its
    /// part's rows here, as f32 with their maxima and sums: two parts for each CTA, four with `batch_invariant`, whose
    /// parts are smaller. The size does not grow with the context.
    ///
    /// ```
    /// use xla_attention::ops::workspace::AttentionSizes;
    /// use xla_attention::DType;
    ///
    /// let (num_q_heads, num_kv_heads, head_dim, value_dim) = (32, 8, 128, 128);
    /// let dtype = DType::BF16;
    /// let sizes = AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant: false };
    /// let wanted = sizes.workspace();
    /// assert_eq!((wanted.fixed, wanted.per_row, wanted.per_sequence), (6_392_896, 0, 0));
    /// ```
    #[must_use]
    pub fn workspace(&self) -> WorkspaceSize {
        let shares = if self.num_kv_heads > 0 { nominal_ctas(self.value_dim) / self.num_kv_heads } else { 0 };
        let fixed = if shares < 2 || !(1..=MAX_HEAD_DIM).contains(&self.value_dim) {
            0
        } else {
            let ends = shares - 1;
            let rows = TILE_ROWS * if self.batch_invariant { 4 * shares } else { 2 * ends };
            let row_bytes = 4 * (2 + self.value_dim);
            CUT_BYTES * (ends + 1) + rows * self.num_kv_heads * row_bytes
        };
        WorkspaceSize { fixed, per_row: 0, per_sequence: 0 }
    }

    /// What the gradients of a call want: a number for each row of `[Hq, Tq]`, and room to align them. In 16 bits the
    /// kernels for Hopper want another number a row, and room for what they know of each sequence; up to 128 columns they
    /// add up dQ in f32, for which they want a copy of it besides, with room for 15 rows more a sequence.
    /// `batch_invariant` has no meaning here.
    #[must_use]
    pub fn gradients_workspace(&self) -> WorkspaceSize {
        /// Those of D that have sums.
        const BUCKETS: [i64; 3] = [64, 96, 128];
        /// Rows of a group of sums, which no two sequences share.
        const GROUP: i64 = 16;
        let heads = self.num_q_heads.max(0);
        let number = size_of::<f32>() as i64;
        let columns = self.head_dim.max(self.value_dim);
        if self.dtype.size() != 2 || !(1..=MAX_HEAD_DIM).contains(&columns) {
            return WorkspaceSize { fixed: 16, per_row: number.saturating_mul(heads), per_sequence: 0 };
        }
        let row_sums = number * BUCKETS.into_iter().find(|bucket| *bucket >= columns).unwrap_or(0);
        // Two numbers a row, one a block of 64 rows or more, and where places begin.
        let of_block = heads.saturating_add(15) / 16;
        let per_row = heads.saturating_mul(row_sums + 2 * number).saturating_add(of_block);
        let per_sequence = heads.saturating_mul((GROUP - 1) * row_sums + number).saturating_add(72);
        let fixed = heads.saturating_mul(GROUP * row_sums + number).saturating_add(1024);
        WorkspaceSize { fixed, per_row, per_sequence }
    }
}
