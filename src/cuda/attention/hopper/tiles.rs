//! The tile shapes of Hopper's prefill kernels, and which calls they fit.

use super::super::loaded_bias::loaded_bias;
use super::super::split::longest_tile;
use super::super::tiles::transforms_logits;
use super::FEW_KEYS;
use crate::cuda::tiles::HopperPrefillTile;
use crate::problem::attention::{Attention, KeyStorage};
use crate::tensor::DType;

/// The longest sequence, where it is known, has at most this many times the rows that a tile for short sequences takes on average.
const LONGEST_TO_MEAN: i64 = 4;

/// Packed query rows that sequences have on average in the calls without a mask that are computed in clusters, at least. Shorter
/// ones have not been measured.
const CLUSTER_ROWS: i64 = 1024;

/// Causal calls with this many times as many keys as rows are computed in clusters: all tiles of a sequence have most of their
/// keys in common.
const CAUSAL_CLUSTER_KEYS_TO_ROWS: i64 = 4;

/// Keys that sequences have on average in the other causal calls that are computed in clusters, at least. The first tile of a pair
/// visits the blocks of the second one too, which costs more than a cluster gains where they are few.
const CAUSAL_CLUSTER_KEYS: i64 = 2048;

/// Pairs of tiles in those calls, at least: about three for each cluster. Pairs end later than single tiles, and with two for each
/// cluster this costs more than is gained.
const CAUSAL_CLUSTER_PAIRS: i64 = 192;

impl HopperPrefillTile {
    /// Packed query rows per work tile: 64 per warpgroup, or past 256 columns per two, which then have half of the columns each
    /// (`kColumnWarpgroups` in `shape.cuh`).
    pub(in crate::cuda::attention) fn rows(&self) -> i64 {
        64 * i64::from(if self.value_dim > 256 { self.warpgroups / 2 } else { self.warpgroups })
    }

    pub(in crate::cuda::attention) fn threads(&self) -> u32 {
        128 * (self.warpgroups + 1 + u32::from(self.converts_kv()))
    }

    /// Elements of `bytes` bytes in a row of a swizzle atom: 128 bytes, or 64 if the head dimensions are no multiples of that.
    pub(in crate::cuda::attention) fn atom_row(&self, bytes: usize) -> i64 {
        let is_wide = ((self.dim | self.value_dim) as usize * bytes).is_multiple_of(128);
        (if is_wide { 128 } else { 64 }) / bytes as i64
    }

    /// The same for K and V.
    pub(super) fn kv_atom_row(&self) -> i64 {
        self.atom_row(self.kv_bytes() as usize)
    }

    /// Whether the kernel converts K and V of 8 bits to f16 (`convert_kv.cuh`).
    pub(in crate::cuda::attention) fn converts_kv(&self) -> bool {
        self.loaded_stages > 0
    }

    /// Bytes of an element of K and V.
    pub(super) fn kv_bytes(&self) -> u32 {
        if self.converts_kv() { 1 } else { self.bytes }
    }

    /// Whether a warp stores its rows of O as a box for each atom column (`kOutputPasses` in `fp8_shape.cuh`).
    pub(super) fn stages_out_by_atom_column(&self) -> bool {
        self.bytes == 1 && self.value_dim > 128
    }

    /// D and Dv together, which the time per score grows with.
    pub(in crate::cuda::attention) fn columns(&self) -> u32 {
        self.dim + self.value_dim
    }

    /// Whether the tile is for sequences that hardly fill one of 128 rows: 64 rows and keys, several CTAs per SM.
    pub(super) fn is_tiny(&self) -> bool {
        self.ctas_per_sm > 1
    }

    /// Whether rows may have bounds of their keys and trees, and keys are divided between CTAs.
    pub(in crate::cuda::attention) fn takes_row_masks(&self) -> bool {
        self.splits_keys && self.takes_key_ranges
    }

    /// Whether the tile takes the call's bounds of keys, or that it has none.
    fn suits_key_ranges(&self, problem: &Attention) -> bool {
        match problem.keys.storage {
            KeyStorage::Paged(_) if self.takes_row_masks() => true,
            KeyStorage::Paged(_) => problem.queries.key_ranges.is_none() && !self.takes_key_ranges,
            KeyStorage::Contiguous { .. } => {
                !self.takes_row_masks() && self.takes_key_ranges != problem.queries.key_ranges.is_none()
            }
        }
    }

    /// Whether rows of the bias may begin anywhere (`kShiftsBias` in `shape.cuh`), because TMA does not load it.
    pub(super) fn shifts_bias(&self) -> bool {
        self.shifted_bias_bytes != 0
    }

    /// Whether keys are packed, and TMA loads the call's bias or a copy of it, or does not and the tile is for such a bias.
    fn takes_bias(&self, problem: &Attention) -> bool {
        let has_type_of_q = problem.score.bias.is_some_and(|bias| bias.dtype == problem.q.dtype);
        let is_loaded = loaded_bias(problem).is_some();
        matches!(problem.keys.storage, KeyStorage::Contiguous { .. })
            && has_type_of_q != (self.shifted_bias_bytes == 4)
            && is_loaded != self.shifts_bias()
    }

    fn is_for_clusters(&self) -> bool {
        self.ctas_per_cluster > 1
    }

    /// Whether a tile for short sequences has blocks of other sizes than the general one.
    fn has_other_blocks(&self) -> bool {
        self.is_tiny() || self.bytes == 1
    }

    /// Whether the tile is for all calls that its head dimensions fit.
    fn is_general(&self) -> bool {
        self.max_full_rows == 0 && self.max_causal_rows == 0 && !self.is_for_clusters()
    }

    /// Whether clusters are for a call that packs `pack_gqa` query heads: with contiguous keys, and with sequences of one length,
    /// which have an even number of tiles. The lengths are known on the device only, but others have hardly ever a multiple of a
    /// cluster's rows on average. Where the last tile of a sequence is alone, one of the cluster's CTAs computes nothing for the
    /// time of a tile. Blocks may have another number of keys than the general tile's.
    fn takes_clusters(&self, problem: &Attention, pack_gqa: i64) -> bool {
        let (rows, seqs) = (problem.num_rows as i64, (problem.max_seqs as i64).max(1));
        let (packed, longest) = (rows / seqs * pack_gqa, problem.queries.longest as i64);
        let cluster_rows = i64::from(self.ctas_per_cluster) * self.rows();
        let is_even = rows % seqs == 0
            && cluster_rows % pack_gqa == 0
            && packed % cluster_rows == 0
            && (longest == 0 || longest.saturating_mul(seqs) == rows);
        let KeyStorage::Contiguous { total } = problem.keys.storage else { return false };
        let is_long = match (problem.score.window_left < 0, problem.score.window_right) {
            // All tiles of a sequence have the same keys.
            (true, i64::MIN..0) => packed >= CLUSTER_ROWS,
            (true, 0) if problem.score.top_left => false,
            // At D 192, blocks of 96 keys cost as much as clusters gain where tiles end at different keys.
            (true, 0) => {
                let pairs = rows * problem.num_q_heads as i64 / cluster_rows;
                total as i64 >= CAUSAL_CLUSTER_KEYS_TO_ROWS * rows
                    || self.dim > 192 && total as i64 / seqs >= CAUSAL_CLUSTER_KEYS && pairs >= CAUSAL_CLUSTER_PAIRS
            }
            _ => false,
        };
        is_even && is_long && !problem.batch_invariant
    }

    /// Whether the tile is for a call that packs `pack_gqa` query heads. Tiles for short sequences have fewer rows, so they
    /// compute fewer masked scores at the diagonal and waste fewer rows.
    pub(super) fn takes_lengths(&self, problem: &Attention, pack_gqa: i64) -> bool {
        if self.is_general() {
            return true;
        }
        if self.is_for_clusters() {
            return self.takes_clusters(problem, pack_gqa);
        }
        let max_queries = self.max_rows(problem) / pack_gqa;
        // A few sequences that are much longer than the others have most of the work.
        problem.num_rows as i64 <= max_queries * problem.max_seqs as i64
            && problem.queries.longest as i64 <= LONGEST_TO_MEAN * max_queries
    }

    /// The most packed rows that sequences have on average in the calls that a tile for short sequences takes; 0 if it takes none with the
    /// call's keys. Tiny tiles and those of fp8 are for packed keys, no more than twice as many as query rows, and tiny ones for pages. Their
    /// blocks have other numbers of keys, so the lengths of other sequences change a result's bits.
    fn max_rows(&self, problem: &Attention) -> i64 {
        let is_causal = problem.score.window_right >= 0;
        let max_rows = i64::from(if is_causal { self.max_causal_rows } else { self.max_full_rows });
        if !self.has_other_blocks() {
            return max_rows;
        }
        if problem.batch_invariant {
            return 0;
        }
        match problem.keys.storage {
            KeyStorage::Contiguous { total } if total <= 2 * problem.num_rows => max_rows,
            KeyStorage::Contiguous { .. } => 0,
            KeyStorage::Paged(_) => self.max_rows_over_pages(problem).min(max_rows),
        }
    }

    /// The same over pages. Where there are few rows, rows of a general tile without queries cost more than tiles of half as many keys, and
    /// decode and a second launch more than both (`docs/dev/lab_notebook.md`).
    fn max_rows_over_pages(&self, problem: &Attention) -> i64 {
        /// Packed rows per sequence from which on tiny tiles are no slower than decode.
        const LEAST_ROWS: usize = 8;
        /// The same with more tiles than this, if sequences have several queries.
        const LEAST_ROWS_OF_MANY: usize = 3;
        /// SMs of an H100 or H200.
        const FEW_TILES: usize = 132;
        let (rows, seqs) = (problem.num_rows, problem.max_seqs);
        let packed = rows.saturating_mul(problem.num_q_heads / problem.num_kv_heads);
        let has_many_tiles = seqs.saturating_mul(problem.num_kv_heads) > FEW_TILES;
        let least_rows = if has_many_tiles && rows / 2 >= seqs { LEAST_ROWS_OF_MANY } else { LEAST_ROWS };
        let has_few_rows = packed < seqs.saturating_mul(least_rows);
        // The tile of 192 columns has blocks of 32 keys.
        let most_keys = if self.dim <= 128 || has_many_tiles { FEW_KEYS } else { FEW_KEYS / 2 };
        // Boxes of tiny tiles have all atom columns.
        let has_dims = [self.dim, self.value_dim].map(|dim| dim as usize) == [problem.head_dim, problem.value_dim];
        match longest_tile(problem, 1) {
            _ if !self.is_tiny() || has_few_rows || !has_dims => 0,
            ..=256 => 256,
            keys if keys <= most_keys => self.rows(),
            _ => 0,
        }
    }

    /// The least of the tiles that take a call is the best: tiny ones, then the smallest bucket, then those that are not general,
    /// then those without a part of the logits transform that the call does not need.
    pub(super) fn preference(&self) -> impl Ord {
        (!self.is_tiny(), self.columns(), self.is_general(), self.logits == "softcap_alibi")
    }

    /// Whether D and Dv fit. The tiles for 8-bit K and V take exactly theirs: with e4m3fn q because fewer columns would change what
    /// small D compute, products in 8 bits instead of 16 (`docs/semantics.md`, "fp8 queries").
    fn has_columns(&self, problem: &Attention) -> bool {
        let [dim, value_dim] = [self.dim, self.value_dim].map(|dim| dim as usize);
        match self.kv_bytes() {
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
        } else if dtype == DType::F32 {
            4
        } else {
            return false;
        };
        // Most tiles are for other types or head dimensions, and the rest takes longer.
        if self.bytes != bytes || !self.has_columns(problem) {
            return false;
        }
        let score = &problem.score;
        // Scales of q and K are a transform of their own, except where K and V have 8 bits.
        let is_plain = match self.kv_bytes() {
            1 => score.softcap == 0.0 && score.alibi.is_none(),
            _ => !transforms_logits(problem),
        };
        let transforms = match self.logits {
            "none" | "scaled" | "row_scaled" | "bias" => is_plain,
            "softcap" => score.softcap > 0.0 && score.alibi.is_none(),
            _ => !is_plain,
        };
        let has_bias = self.logits == "bias";
        let takes_kv = if self.converts_kv() { converts(self, problem) } else { problem.kv_dtype == dtype };
        takes_kv
            && has_bias == score.bias.is_some()
            && (!has_bias || self.takes_bias(problem))
            && transforms
            && self.suits_key_ranges(problem)
    }
}

/// Whether the call has 8-bit pages that `tile` converts to f16, and scales of their rows if the tile is for those.
fn converts(tile: &HopperPrefillTile, problem: &Attention) -> bool {
    let other = if tile.has_token_scales { DType::I8 } else { DType::F8E5M2 };
    [DType::F8E4M3FN, other].contains(&problem.kv_dtype)
        && problem.scale_cache.is_some() == tile.has_token_scales
        && matches!(problem.keys.storage, KeyStorage::Paged(_))
}
