//! The recommended workspace sizes of attention and its gradients. Front-ends allocate the workspace as the last result.
//!
//! A size depends on static values only, so that it is the same wherever a program is traced, exported and run. Calls accept
//! a workspace of any size, including none: with less than recommended, decode splits fewer tiles, and the gradients take
//! other kernels. Results are correct in any case.

use super::validate::MAX_LATENT_VALUE_DIM;
use super::{MAX_HEAD_DIM, Op};
use crate::tensor::DType;

/// CTAs for which the workspace is sized, independent of the actual GPU: three on each of 132 SMs, or four for short rows.
/// The kernels for 8-bit keys run that many, the others fewer.
const fn nominal_ctas(value_dim: i64) -> i64 {
    132 * if value_dim <= 64 { 4 } else { 3 }
}

/// Packed query rows of a decode tile.
const TILE_ROWS: i64 = 16;

/// CTAs of Hopper's prefill whose keys are split, and packed query rows of its tile. `attention_row_masks` has twice as many CTAs with
/// half as many rows.
const SPLIT_PREFILL: [i64; 2] = [132, 128];

/// The largest head dimension that it has a tile for.
const SPLIT_PREFILL_HEAD_DIM: i64 = 256;

/// CTAs of multi-head latent attention, and packed query rows of its tile.
const SPLIT_LATENT: [i64; 2] = [132, 64];

/// Bytes of a split record, and its alignment: the most that is lost at the beginning of an unaligned workspace.
const SPLIT_RECORD_BYTES: i64 = 64;

/// A size of `fixed + per_row * T + per_sequence * B` bytes, for T query rows and B sequence slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceSize {
    /// Bytes per call.
    pub fixed: i64,
    /// Bytes per query row.
    pub per_row: i64,
    /// Bytes per sequence slot.
    pub per_sequence: i64,
}

/// By how much a bias adds to a workspace: `fixed + per_bias_row * R` bytes for R rows of the bias, of all its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BiasWorkspaceSize {
    /// Bytes per call.
    pub fixed: i64,
    /// Bytes per row of the bias, `[Sk]`.
    pub per_bias_row: i64,
}

/// The most bytes of the workspace that dS of a call takes, beyond which kernels compute it once more. It is 4 x 16 x 2048 x 2048 pairs
/// in 16 bits; a GPU of 8 GB can spare no more. Kernels on Hopper up to 128 columns and those of small GPUs past 256 do not use it, but
/// programs are traced without a GPU.
const MAX_SCORE_GRADIENT_BYTES: usize = (512 << 20) + (16 << 20);

/// Columns of a row of dS of a token with `keys` keys of a bias: those of the next multiple of 8 keys, and 8 more, because the row begins
/// at a row of K that is a multiple of 8.
pub(crate) fn score_gradient_columns(keys: usize) -> Option<usize> {
    keys.checked_next_multiple_of(8)?.checked_add(8)
}

/// Bytes of dS of `rows` query rows and `keys` keys of a bias, in 16 bits, in the workspace. `None` past the limit.
pub(crate) fn score_gradient_bytes(heads: usize, rows: usize, keys: usize) -> Option<usize> {
    let bytes = heads.checked_mul(rows)?.checked_mul(score_gradient_columns(keys)?)?.checked_mul(2)?;
    (bytes <= MAX_SCORE_GRADIENT_BYTES).then_some(bytes)
}

/// What of a bias decides whether a kernel copies it, or stores dS.
#[derive(Clone, Copy, Debug)]
pub struct BiasSizes {
    /// Keys per row, Sk.
    pub keys: i64,
    /// Its element type: q's or f32.
    pub dtype: DType,
    /// Whether sequences or heads share it.
    pub is_shared: bool,
    /// Whether the call has a causal mask or a window.
    pub is_masked: bool,
    /// Whether the call has the gradient of the bias.
    pub has_gradient: bool,
    /// Query rows, Tq; 0 if it is not known.
    pub rows: i64,
    /// Its own rows, Sq for each of its sequences and heads; 0 if they are not known.
    pub bias_rows: i64,
}

/// Whether a forward call with up to `columns` columns per head copies a bias for the kernel that loads it by TMA. Up to 128 columns there
/// are kernels that take each pair's own in any rows, of which a copy takes as long as it saves.
pub(crate) fn forward_copies_bias(columns: i64, is_shared: bool) -> bool {
    is_shared || columns > 128
}

/// The columns per head up to which dS of a bias of f32 beside 16-bit operands may be stored as the gradient of each pair's own bias.
pub(crate) const MAX_OWN_F32_COLUMNS: i64 = 128;

/// Whether Hopper's gradients up to 128 columns copy a bias of rows that TMA does not load. The gradient of each pair's own bias is copied
/// back, so that the portable kernels, which store it where it belongs, are faster at D 64, and under a causal mask. Of f32 a copy is worth it
/// if enough sequences and heads share each row.
pub(crate) fn gradients_copy_bias(columns: i64, num_q_heads: i64, bias: &BiasSizes) -> bool {
    if bias.dtype == DType::F32 {
        let uses = if bias.has_gradient && bias.is_masked { 8 } else { 4 };
        let uses_of_all_rows = num_q_heads.saturating_mul(bias.rows);
        return bias.is_shared && bias.bias_rows > 0 && uses_of_all_rows >= bias.bias_rows.saturating_mul(uses);
    }
    bias.is_shared || !bias.has_gradient || (columns > 64 && !bias.is_masked)
}

/// The static values of an attention call on which its workspace size depends.
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
    /// The attribute `batch_invariant` of the call.
    pub batch_invariant: bool,
}

/// The columns per head up to which Hopper's gradients sum dQ in the workspace.
pub(crate) const MAX_NARROW_COLUMNS: i64 = 128;

/// The columns per head of dQ in the workspace: those of the smallest sufficient kernel; 0 past [`MAX_NARROW_COLUMNS`].
fn dq_columns(columns: i64) -> i64 {
    [64, 96, MAX_NARROW_COLUMNS].into_iter().find(|of_kernel| *of_kernel >= columns).unwrap_or(0)
}

/// Parts into which Hopper's gradients may split the query heads of a KV head, however many tokens there are: parts of two query heads and
/// up to 16 of them (past 128 columns four) for up to four KV heads, so that these keep all SMs busy; and parts of four heads where the heads
/// of a KV head have 768 columns or more, whose Q, dO and dQ are more than L2 holds. Each part has a dK and dV in f32.
#[must_use]
pub fn head_splits(num_q_heads: i64, num_kv_heads: i64, columns: i64) -> i64 {
    const FEW_KV_HEADS: i64 = 4;
    const MANY_COLUMNS: usize = 768;
    let heads = heads_per_kv_head(num_q_heads, num_kv_heads);
    let most = if columns <= MAX_NARROW_COLUMNS { 16 } else { 4 };
    let few = match num_kv_heads {
        1..=FEW_KV_HEADS => most_splits(heads, heads.div_ceil(2).min((most / num_kv_heads) as usize)),
        _ => 1,
    };
    let has_many_columns = (dq_columns(columns) as usize).saturating_mul(heads) >= MANY_COLUMNS;
    few.max(if has_many_columns { most_splits(heads, heads.div_ceil(4)) } else { 1 }) as i64
}

/// Tiles of dK and dV of all parts, up to which a call of few tokens splits its query heads into more parts. The memory for these is the
/// same for all calls.
pub(crate) const FEW_HEAD_SPLIT_TILES: i64 = 256;

/// The most parts into which Hopper's gradients may split the query heads of a KV head where all KV heads have `tiles` tiles of keys:
/// [`head_splits`], or more for few tiles, up to 16.
#[cfg(feature = "cuda")]
pub(crate) fn max_head_splits(num_q_heads: i64, num_kv_heads: i64, columns: i64, tiles: i64) -> i64 {
    let heads = heads_per_kv_head(num_q_heads, num_kv_heads);
    let of_few_tiles = most_splits(heads, (FEW_HEAD_SPLIT_TILES / tiles.max(1)).min(16) as usize);
    head_splits(num_q_heads, num_kv_heads, columns).max(of_few_tiles as i64)
}

fn heads_per_kv_head(num_q_heads: i64, num_kv_heads: i64) -> usize {
    if num_kv_heads > 0 { (num_q_heads / num_kv_heads).max(0) as usize } else { 0 }
}

/// The largest number of parts up to `bound` into which so many query heads can be split; at least 1.
pub(crate) fn most_splits(heads: usize, bound: usize) -> usize {
    (2..=bound).rev().find(|splits| can_split(heads, *splits)).unwrap_or(1)
}

/// Whether so many query heads can be split into so many parts, each of which has the same number of heads but for the last one, which may
/// have fewer.
pub(crate) fn can_split(heads: usize, splits: usize) -> bool {
    (1..=heads).contains(&splits) && heads.div_ceil(heads.div_ceil(splits)) == splits
}

impl AttentionSizes {
    /// The recommended size for a call of `op`; `None` if the operator has no workspace.
    #[must_use]
    pub fn workspace_of(&self, op: Op) -> Option<WorkspaceSize> {
        match op {
            Op::FlashAttnVarlenBwd => Some(self.gradients_workspace()),
            Op::MlaPagedAttention | Op::MlaPagedAttentionUpdate => Some(self.latent_workspace()),
            _ => op.signature().results.contains(&"workspace").then(|| self.workspace()),
        }
    }

    /// What a bias adds to the size for a call of `op` without a soft cap and `ALiBi`. Kernels on Hopper, and those for
    /// gradients on every GPU, load one of q's type, and Hopper's for gradients also one of f32, in rows of a multiple of 16
    /// bytes; a bias of other rows is copied to such rows in the workspace, if that is worth it. Where sequences or heads share
    /// it, the kernels for its gradient sum dS of all pairs from the workspace, up to half a GiB: up to 128 columns on other GPUs
    /// than Hopper, and there for few tiles or queries, past 256 on those with 227 KB of shared memory.
    /// Beside a bias of f32 and 16-bit operands all gradients are computed from dS there, except those with the gradient of each pair's own
    /// bias up to 128 columns, which is dS.
    ///
    /// ```
    /// use xla_attention::ops::workspace::{AttentionSizes, BiasSizes};
    /// use xla_attention::{DType, Op};
    ///
    /// let (num_q_heads, num_kv_heads, head_dim, value_dim) = (12, 12, 64, 64);
    /// let dtype = DType::BF16;
    /// let sizes = AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant: false };
    /// let bias = BiasSizes { keys: 197, dtype, is_shared: true, is_masked: false, has_gradient: false, rows: 2 * 197, bias_rows: 197 };
    /// assert_eq!(sizes.bias_workspace(Op::FlashAttnVarlen, bias).per_bias_row, 400);
    /// assert_eq!(sizes.bias_workspace(Op::FlashAttnVarlen, BiasSizes { keys: 200, ..bias }).per_bias_row, 0);
    /// ```
    #[must_use]
    pub fn bias_workspace(&self, op: Op, bias: BiasSizes) -> BiasWorkspaceSize {
        /// Bytes of which copied rows are a multiple.
        const CHUNK_BYTES: i64 = 16;
        /// What the alignment of the copy, and the tile counter before it, take at most.
        const FIXED: i64 = 256;
        let BiasSizes { keys, dtype, is_shared, has_gradient, rows, .. } = bias;
        let columns = self.head_dim.max(self.value_dim);
        let has_type_of_q = dtype == self.dtype;
        // Of the kernels that take the copy, and of those that store dS, which take one of q's type too.
        let [max_columns, max_ds_columns] = match op {
            Op::FlashAttnVarlenBwd => {
                let is_gradient = has_gradient && !is_shared && columns <= MAX_OWN_F32_COLUMNS;
                let sums_ds = if has_type_of_q { has_gradient && is_shared } else { !is_gradient };
                let copies = gradients_copy_bias(columns, self.num_q_heads, &bias);
                [if copies { 128 } else { 0 }, if sums_ds { MAX_HEAD_DIM } else { 0 }]
            }
            Op::FlashAttnVarlen
                if has_type_of_q && !self.batch_invariant && forward_copies_bias(columns, is_shared) =>
            {
                [256, 0]
            }
            _ => [0, 0],
        };
        let is_up_to = |max: i64| self.dtype.size() == 2 && (1..=max).contains(&columns) && keys >= 1;
        let score_gradients = if is_up_to(max_ds_columns) && rows > 0 {
            let sizes = [self.num_q_heads.max(0), rows, keys].map(|size| size as usize);
            score_gradient_bytes(sizes[0], sizes[1], sizes[2]).map_or(0, |bytes| FIXED + bytes as i64)
        } else {
            0
        };
        let takes_copy = is_up_to(max_columns) || (score_gradients > 0 && has_type_of_q);
        let row_bytes = keys.saturating_mul(dtype.size() as i64);
        if !takes_copy || row_bytes % CHUNK_BYTES == 0 {
            return BiasWorkspaceSize { fixed: score_gradients, per_bias_row: 0 };
        }
        let per_bias_row = (row_bytes / CHUNK_BYTES + 1).saturating_mul(CHUNK_BYTES);
        BiasWorkspaceSize { fixed: FIXED + score_gradients, per_bias_row }
    }

    /// The size with which attention runs as fast as it can; 0 for sizes that no call can have.
    ///
    /// Decode divides the keys of all sequences between CTAs (split-KV). The CTAs that compute one tile together store their
    /// partial results here: unnormalized outputs, maxima and sums in f32. There is room for two partials per CTA, or for
    /// four with `batch_invariant`, whose splits are smaller. Few queries over many keys are computed in the same way with
    /// larger tiles, where q has 8 or 16 bits. The size does not grow with the context.
    ///
    /// ```
    /// use xla_attention::ops::workspace::AttentionSizes;
    /// use xla_attention::DType;
    ///
    /// let (num_q_heads, num_kv_heads, head_dim, value_dim) = (32, 8, 128, 128);
    /// let dtype = DType::BF16;
    /// let sizes = AttentionSizes { num_q_heads, num_kv_heads, head_dim, value_dim, dtype, batch_invariant: false };
    /// let size = sizes.workspace();
    /// assert_eq!((size.fixed, size.per_row, size.per_sequence), (15_975_424, 0, 0));
    /// ```
    #[must_use]
    pub fn workspace(&self) -> WorkspaceSize {
        let bytes = |ctas: i64, tile_rows: i64| {
            let ranges = if self.num_kv_heads > 0 { ctas / self.num_kv_heads } else { 0 };
            if ranges < 2 || !(1..=MAX_HEAD_DIM).contains(&self.value_dim) {
                return 0;
            }
            let boundaries = ranges - 1;
            let rows = tile_rows * if self.batch_invariant { 4 * ranges } else { 2 * boundaries };
            let row_bytes = 4 * (2 + self.value_dim);
            SPLIT_RECORD_BYTES * (boundaries + 1) + rows * self.num_kv_heads * row_bytes
        };
        let decode = bytes(nominal_ctas(self.value_dim), TILE_ROWS);
        let [ctas, tile_rows] = SPLIT_PREFILL;
        let splits_prefill = !self.batch_invariant
            && self.dtype.size() <= 2
            && self.head_dim.max(self.value_dim) <= SPLIT_PREFILL_HEAD_DIM;
        let fixed = if splits_prefill { decode.max(bytes(ctas, tile_rows)) } else { decode };
        WorkspaceSize { fixed, per_row: 0, per_sequence: 0 }
    }

    /// The size for multi-head latent attention, whose tiles have more rows and wider values: two partials per CTA. With
    /// `batch_invariant` no tile is split.
    #[must_use]
    pub fn latent_workspace(&self) -> WorkspaceSize {
        let [ctas, tile_rows] = SPLIT_LATENT;
        let splits = !self.batch_invariant && (1..=MAX_LATENT_VALUE_DIM).contains(&self.value_dim);
        let bytes = || SPLIT_RECORD_BYTES * ctas + 2 * (ctas - 1) * tile_rows * 4 * (2 + self.value_dim);
        WorkspaceSize { fixed: if splits { bytes() } else { 0 }, per_row: 0, per_sequence: 0 }
    }

    /// The size for the gradients of a call: delta, an f32 per element of `[Hq, Tq]`, and room to align it. With 16-bit
    /// operands, Hopper's kernels also store the lse in base 2 there and a plan per sequence. Up to 128 columns they sum dQ
    /// in f32, in groups of 16 rows that no two sequences share, which is up to 15 more rows per sequence; and the keys of
    /// each row and of blocks of rows if rows have bounds of their keys, for up to 20 keys per row. Where a KV head has several query
    /// heads, they store the dK and dV of parts of these: of 256 tiles of 128 keys (past 128 columns 64), and those of
    /// [`head_splits`], as if there were as many keys as queries. `batch_invariant` has no effect.
    #[must_use]
    pub fn gradients_workspace(&self) -> WorkspaceSize {
        /// The largest head dimension of Hopper's kernels.
        const MAX_HOPPER_DIM: i64 = 256;
        /// Rows per group of dQ sums.
        const GROUP: i64 = 16;
        let heads = self.num_q_heads.max(0);
        let number = size_of::<f32>() as i64;
        let columns = self.head_dim.max(self.value_dim);
        if self.dtype.size() != 2 || !(1..=MAX_HOPPER_DIM).contains(&columns) {
            return WorkspaceSize { fixed: 16, per_row: number.saturating_mul(heads), per_sequence: 0 };
        }
        let row_sums = number * dq_columns(columns);
        // Per row delta and lse, and a 4-byte counter per block of 64 or more rows.
        let counter_bytes = heads.saturating_add(15) / 16;
        let key_bytes = number * (self.head_dim + self.value_dim);
        let splits = head_splits(heads, self.num_kv_heads, columns);
        let partial_bytes =
            if splits == 1 { 0 } else { splits.saturating_mul(self.num_kv_heads).saturating_mul(key_bytes) };
        // Both gradients of the parts of few tiles, and their alignment.
        let tile_keys = if row_sums == 0 { 64 } else { 128 };
        let few_tiles = if heads > self.num_kv_heads { FEW_HEAD_SPLIT_TILES * tile_keys * key_bytes + 256 } else { 0 };
        // 8 bytes per row, 16 per block of 64 or more rows and 24 per block of 128 keys; three lists.
        let [range_row_bytes, range_sequence_bytes, range_bytes] = if row_sums == 0 { [0; 3] } else { [12, 40, 424] };
        let row_bytes = (counter_bytes + range_row_bytes).saturating_add(partial_bytes);
        let per_row = heads.saturating_mul(row_sums + 2 * number).saturating_add(row_bytes);
        let per_sequence =
            heads.saturating_mul((GROUP - 1) * row_sums + number).saturating_add(72 + range_sequence_bytes);
        let fixed = heads.saturating_mul(GROUP * row_sums + number).saturating_add(1024 + few_tiles + range_bytes);
        WorkspaceSize { fixed, per_row, per_sequence }
    }
}
