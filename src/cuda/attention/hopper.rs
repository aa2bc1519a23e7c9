//! Prefill on Hopper: which calls its kernels take, and their parameters.

mod boxes;
#[cfg(test)]
pub(super) mod tests;
mod tiles;

use self::boxes::{ATOM_ROWS, WARP_ROWS, step};
use super::loaded_bias::loaded_bias;
use super::split::{longest_tile, room};
use super::tiles::transforms_logits;
use super::{Call, Launch, Launches, MAX_SHORT_ROWS, Parameter, UNLIMITED, decode, longest_or_mean_queries, max_tiles};
use crate::cuda::device::Device;
use crate::cuda::enqueue::{LaunchAttributes, LaunchConfig};
use crate::cuda::kernel_launch::{COUNTER_BYTES, Counters};
use crate::cuda::params::attention::{AttentionParams, KvSource};
use crate::cuda::params::bias::BiasSource;
use crate::cuda::params::divisor::IndexDivisor;
use crate::cuda::params::hopper_prefill::{
    HopperBiasParams, HopperKeyRangeParams, HopperPrefillParams, HopperRowMaskParams, HopperTokenScaleParams,
};
use crate::cuda::params::key_ranges::KeyRangeSource;
use crate::cuda::params::tree_mask::TreeMaskSource;
use crate::cuda::tensor_map::{Axis, L2Promotion, TensorMap, supports_tma};
use crate::cuda::tiles::{HOPPER_PREFILL, HopperPrefillTile};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::attention::{Attention, Bias, KeyStorage};
use crate::problem::{KvScaleCache, KvView};
use crate::tensor::{DType, Tensor};
use std::ptr::null_mut;

const KERNEL: &str = "hopper_prefill";
const FP8_KERNEL: &str = "hopper_prefill_fp8";
const EIGHT_BIT_KERNEL: &str = "hopper_prefill_8bit";
const TOKEN_SCALES_KERNEL: &str = "hopper_prefill_token_scales";
const F32_KERNEL: &str = "hopper_prefill_f32";
const KEY_RANGES_KERNEL: &str = "hopper_key_ranges";
const BIAS_KERNEL: &str = "hopper_bias";

/// Query heads per KV head with padding heads.
pub(super) fn padded_group(group: i64) -> i64 {
    group.unsigned_abs().next_power_of_two() as i64
}

/// The most query heads of a pack: a tile then has the rows of two queries.
pub(super) const LARGEST_PACK: i64 = 64;

/// Another packing must save this percentage of the rows.
const ROWS_SAVED_PERCENT: u64 = 15;

/// How the kernel computes a call: its tile shape and how it packs query heads.
#[derive(Clone, Copy)]
pub(super) struct HopperPrefill {
    pub(super) tile: &'static HopperPrefillTile,
    /// `PackGQA`: rows of a query in a tile. The query heads of a KV head, with or without padding heads, or a power of two of them.
    pub(super) pack_gqa: i64,
    /// Number of such packs per KV head.
    pub(super) packs_per_kv_head: i64,
}

/// Query rows per sequence slot from which on prefill also computes the short sequences over pages.
const LONG_ON_AVERAGE: i64 = 256;

/// The most keys of a row for which a tile of prefill, whose keys are not split, takes no longer than the launches of decode: 5 to 10 us
/// (H200).
const FEW_KEYS: i64 = 1024;

/// Strategy: tiny tiles of prefill for short sequences over few keys in pages, where decode takes longer: with more tiles than SMs, unless
/// single warps take tiles of few rows, and at head dimensions for which decode has no kernel that divides keys between CTAs of a cluster.
pub(super) fn launches_over_few_keys<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    /// Packed rows per sequence that are too many for tiles of single warps.
    const MANY_ROWS: i64 = 12;
    /// The head dimensions of decode's own kernels.
    const DECODE_DIMS: [u32; 2] = [64, 128];
    /// Tiles and keys of other head dimensions.
    const SEVERAL_TILES: i64 = 17;
    const HALF_FEW_KEYS: i64 = FEW_KEYS / 2;
    let problem = call.problem;
    let (is_paged, keys) = (matches!(problem.keys.storage, KeyStorage::Paged(_)), longest_tile(problem, 1));
    // Decode stores new tokens in the same launch.
    if !is_paged || call.new_tokens.is_some() || keys > FEW_KEYS || !decode::are_short(call) {
        return Ok(None);
    }
    let prefill = call.hopper_prefill();
    let Some(prefill) = prefill.filter(|prefill| prefill.tile.is_tiny() && prefill.takes_all(call)) else {
        return Ok(None);
    };
    let (tiles, sms) = (call.seqs().saturating_mul(problem.num_kv_heads as i64), i64::from(call.device.sms));
    let takes = if DECODE_DIMS.contains(&prefill.tile.dim) {
        tiles > sms && (tiles <= 2 * sms || call.packed_rows() >= MANY_ROWS)
    } else {
        tiles > sms || tiles >= SEVERAL_TILES && keys <= HALF_FEW_KEYS
    };
    if takes { prefill.launch_for_all(call).map(Some) } else { Ok(None) }
}

/// Strategy: one launch of prefill for all sequences of a call, nearly all of which are long.
pub(super) fn launches_for_all<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Some(prefill) = call.hopper_prefill().filter(|prefill| prefill.takes_all(call)) else { return Ok(None) };
    prefill.launch_for_all(call).map(Some)
}

/// Strategy: prefill for the long sequences, decode for the others if there may be any.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Some(prefill) = call.hopper_prefill() else { return Ok(None) };
    if call.are_all_long() && !call.problem.batch_invariant {
        return prefill.launch_for_all(call).map(Some);
    }
    let tiles = prefill.max_tiles(call, call.long_sequences());
    decode::with_prefill(call, |params| prefill.launch(call, tiles, params)).map(Some)
}

impl HopperPrefill {
    /// `None` for calls that the portable kernels compute.
    pub(super) fn of(problem: &Attention, device: &Device) -> Option<Self> {
        let group = (problem.num_q_heads / problem.num_kv_heads) as i64;
        let with_packs = |pack_gqa: i64, packs_per_kv_head: i64| {
            let takes = |tile: &&HopperPrefillTile| {
                !tile.splits_keys && tile.serves(problem) && tile.takes_lengths(problem, pack_gqa)
            };
            let tile = HOPPER_PREFILL.iter().filter(takes).min_by_key(|tile| tile.preference())?;
            Some(Self { tile, pack_gqa, packs_per_kv_head })
        };
        // A tile with a bias has rows of one matrix.
        let pack_gqa = if problem.score.bias.is_some() { 1 } else { (group & -group).min(LARGEST_PACK) };
        let exact = with_packs(pack_gqa, group / pack_gqa)?;
        let mut prefill = exact;
        for rows in exact.rows_of_whole_groups(problem) {
            let whole = with_packs(rows, 1)?;
            if whole.saves_rows(&prefill, problem) {
                prefill = whole;
            }
        }
        // A per-head v_scale with several packs per KV head is left to the portable kernels.
        let scales_values_by_head = problem.v_scale.is_some_and(|scale| scale.per_head);
        let loads = prefill.is_f32()
            || supports_tma(problem.q.dtype, problem.q.data, &prefill.query_axes(problem)) && prefill.loads_kv(problem);
        let fits = device.has_tensor_maps && (prefill.packs_per_kv_head == 1 || !scales_values_by_head) && loads;
        fits.then_some(prefill)
    }

    /// Rows per query of one pack per KV head, if there are several packs: with padding heads, whose rows are TMA boxes of out, and
    /// without.
    fn rows_of_whole_groups(&self, problem: &Attention) -> Vec<i64> {
        let group = self.pack_gqa * self.packs_per_kv_head;
        let padded = padded_group(group);
        let pads = self.tile.bytes == 2 && !transforms_logits(problem);
        let rows = [pads.then_some(padded), Some(group)].into_iter().flatten();
        let may_pack = self.packs_per_kv_head > 1 && !problem.batch_invariant && problem.score.bias.is_none();
        rows.filter(|rows| may_pack && *rows <= LARGEST_PACK).collect()
    }

    /// Whether a call computes fewer rows than packed as `other`, by [`ROWS_SAVED_PERCENT`], if its sequences have all as many queries
    /// as the longest one, or as the average one if the caller does not say. 64 queries of 7 heads are 7 half-empty tiles, or 4 of the
    /// rows of 8 heads; of 5 heads, 5 tiles, 4, or 3 of 25 queries each.
    fn saves_rows(&self, other: &Self, problem: &Attention) -> bool {
        let longest = longest_or_mean_queries(problem).unsigned_abs();
        let rows = |prefill: &Self| {
            let tiles = longest.div_ceil(prefill.queries_per_tile().unsigned_abs());
            tiles.saturating_mul((prefill.packs_per_kv_head * prefill.tile.rows()).unsigned_abs())
        };
        rows(self).saturating_mul(100 + ROWS_SAVED_PERCENT) <= rows(other).saturating_mul(100)
    }

    /// Queries of a CTA's tile, which has whole queries.
    pub(super) fn queries_per_tile(&self) -> i64 {
        self.tile.rows() / self.pack_gqa
    }

    /// Queries of the tiles of a cluster's CTAs.
    fn queries_per_cluster(&self) -> i64 {
        self.queries_per_tile() * i64::from(self.tile.ctas_per_cluster)
    }

    /// Whether prefill computes the short sequences too, which saves decode's launches. Where there are few keys per row (packed keys, or
    /// the capacity of the block table and the window), sequences that hardly fill a tile have few keys, so prefill takes no longer for
    /// them although their keys are not split.
    fn takes_all(&self, call: &Call) -> bool {
        let (problem, rows, seqs) = (call.problem, call.rows(), call.seqs());
        let keys_are_few = longest_tile(problem, 1) <= FEW_KEYS
            || match problem.keys.storage {
                KeyStorage::Contiguous { total } => total as i64 <= 2 * rows,
                KeyStorage::Paged(table) => {
                    rows >= LONG_ON_AVERAGE * seqs && (table.capacity() as i64).saturating_mul(seqs) <= 4 * rows
                }
            };
        let are_long = rows.saturating_mul(call.group()) > MAX_SHORT_ROWS * seqs || self.tile.is_tiny();
        !problem.batch_invariant && are_long && keys_are_few
    }

    /// One launch for sequences of any length.
    pub(super) fn launch_for_all<'c>(&self, call: &Call<'c>) -> Result<Launches<'c>> {
        let tiles = self.max_tiles(call, call.seqs().min(call.rows()));
        let params = AttentionParams { clears_padding_rows: 1, ..call.params_for(1, UNLIMITED) };
        Ok(Launches { list: vec![self.launch(call, tiles, &params)?], store_new_tokens: false })
    }

    /// Maximum number of tiles per KV head that `sequences` sequences of the call have; a cluster's tiles count as one.
    pub(super) fn max_tiles(&self, call: &Call, sequences: i64) -> i64 {
        max_tiles(call.rows(), self.queries_per_cluster(), sequences)
    }

    /// The launch for sequences of at most `tiles` tiles per KV head, with the portable kernel's parameter for them.
    pub(super) fn launch<'c>(&self, call: &Call<'c>, tiles: i64, attention: &AttentionParams) -> Result<Launch<'c>> {
        let Call { problem, device, .. } = call;
        let next_tile = self.next_tile(problem, tiles, device);
        let of = PrefillParameter { prefill: *self, problem, attention: *attention, next_tile };
        let bias = problem.score.bias.map(|bias| loaded_bias(problem).map_or(bias, |loaded| loaded.bias));
        let (kernel, parameter) = match (self.tile.bytes, bias, problem.scale_cache) {
            (_, _, Some(scales)) => (TOKEN_SCALES_KERNEL, Parameter::PrefillTokenScales(of, scales)),
            (1, ..) => (FP8_KERNEL, Parameter::Prefill(of)),
            (4, ..) => (F32_KERNEL, Parameter::Prefill(of)),
            _ if self.tile.takes_key_ranges => (KEY_RANGES_KERNEL, Parameter::PrefillKeyRanges(of)),
            _ if self.tile.converts_kv() => (EIGHT_BIT_KERNEL, Parameter::Prefill(of)),
            (_, Some(bias), _) => (BIAS_KERNEL, Parameter::PrefillBias(of, bias)),
            _ => (KERNEL, Parameter::Prefill(of)),
        };
        let launch = Launch::new(kernel, self.variant(kernel, problem)?, self.shape(problem, tiles, device), parameter);
        let attributes = LaunchAttributes { cluster: self.tile.ctas_per_cluster, ..LaunchAttributes::NONE };
        Ok(Launch { attributes, counters: Counters::only(next_tile), ..launch })
    }

    /// The index of `kernel`'s variant for the call in the table of variants.
    pub(super) fn variant(&self, kernel: &str, problem: &Attention) -> Result<usize> {
        let storage = match problem.keys.storage {
            KeyStorage::Paged(_) if !self.clips_pages(problem) => "paged",
            _ => "contiguous",
        };
        let HopperPrefillTile { head_dim, logits, .. } = self.tile;
        match self.tile.bytes {
            1 => variants::find(kernel, &[head_dim, storage, logits]),
            4 => variants::find(kernel, &[head_dim, logits]),
            _ if self.tile.splits_keys && self.tile.converts_kv() || self.tile.has_token_scales => {
                variants::find(kernel, &[head_dim])
            }
            _ if self.tile.converts_kv() => variants::find(kernel, &[head_dim, logits]),
            _ if self.tile.takes_key_ranges || self.tile.takes_row_masks() || problem.score.bias.is_some() => {
                variants::find(kernel, &[variants::dtype_value(problem.q.dtype), head_dim])
            }
            _ => variants::find(kernel, &[variants::dtype_value(problem.q.dtype), head_dim, storage, logits]),
        }
    }

    /// Whether the kernel loads q, K and V by ordinary loads, in any layout.
    fn is_f32(&self) -> bool {
        self.tile.bytes == 4
    }

    /// As many clusters as run at the same time, fewer if there are fewer tiles; `tiles` is the number per KV head.
    fn shape(&self, problem: &Attention, tiles: i64, device: &Device) -> LaunchConfig {
        let all = tiles.max(1) * self.num_packs(problem);
        let grid = [all.min(self.max_clusters(device)) as u32, self.tile.ctas_per_cluster, 1];
        LaunchConfig { grid, threads: self.tile.threads(), shared_memory: self.tile.shared_bytes }
    }

    /// Number of clusters that run at the same time; most have one CTA.
    fn max_clusters(&self, device: &Device) -> i64 {
        i64::from((device.sms * self.tile.ctas_per_sm / self.tile.ctas_per_cluster).max(1))
    }

    /// Query heads of a pack, without padding heads.
    fn heads_per_pack(&self, problem: &Attention) -> i64 {
        problem.num_q_heads as i64 / self.num_packs(problem)
    }

    /// Number of packs of all KV heads.
    fn num_packs(&self, problem: &Attention) -> i64 {
        problem.num_kv_heads as i64 * self.packs_per_kv_head
    }

    /// Address in the caller's workspace of the dynamic scheduler's tile counter; null without room for it or if every cluster
    /// has only one tile.
    fn next_tile(&self, problem: &Attention, tiles: i64, device: &Device) -> *mut u8 {
        let is_wanted = tiles * self.num_packs(problem) > self.max_clusters(device);
        if is_wanted { counters_address(problem, 1) } else { null_mut() }
    }
}

/// The inputs of the kernel's parameter, which is encoded at the launch.
pub(super) struct PrefillParameter<'c> {
    pub(super) prefill: HopperPrefill,
    pub(super) problem: &'c Attention<'c>,
    /// The portable kernel's parameter for the same sequences.
    pub(super) attention: AttentionParams,
    /// Address of the dynamic scheduler's tile counter, or null.
    pub(super) next_tile: *mut u8,
}

impl PrefillParameter<'_> {
    pub(super) fn params(&self) -> Result<HopperPrefillParams> {
        let Self { prefill, problem, attention, .. } = self;
        if prefill.is_f32() {
            return self.params_with(TensorMap::NONE, None);
        }
        let rows =
            |tensor: &Tensor, axes: &[Axis]| TensorMap::new(tensor.dtype, tensor.data, axes, L2Promotion::Bytes256);
        // f32 O of 16-bit queries, and O of warps whose rows are not whole queries, is stored row by row, and so are the partials
        // of split keys.
        let out_axes = prefill.out_axes(problem);
        let stores_by_tma = attention.widens_out == 0
            && !prefill.tile.splits_keys
            && WARP_ROWS % prefill.pack_gqa == 0
            && supports_tma(problem.out.dtype, problem.out.data, &out_axes);
        let q = rows(&problem.q, &prefill.query_axes(problem))?;
        self.params_with(q, stores_by_tma.then(|| rows(&problem.out, &out_axes)).transpose()?)
    }

    pub(super) fn key_range_params(&self) -> Result<HopperKeyRangeParams> {
        let ranges = KeyRangeSource::new(&self.problem.queries.key_ranges);
        Ok(HopperKeyRangeParams { prefill: self.params()?, ranges })
    }

    pub(super) fn row_mask_params(&self) -> Result<HopperRowMaskParams> {
        let queries = &self.problem.queries;
        let (ranges, tree) = (KeyRangeSource::new(&queries.key_ranges), TreeMaskSource::new(queries.tree));
        Ok(HopperRowMaskParams { prefill: self.params()?, ranges, tree })
    }

    pub(super) fn token_scale_params(&self, scales: &KvScaleCache) -> Result<HopperTokenScaleParams> {
        Ok(HopperTokenScaleParams {
            prefill: self.params()?,
            k_scales: KvSource::new(&scales.k),
            v_scales: KvSource::new(&scales.v),
            kv_is_i8: i32::from(self.problem.kv_dtype == DType::I8),
        })
    }

    /// `bias` is that of the call, or its copy.
    pub(super) fn bias_params(&self, bias: &Bias) -> Result<HopperBiasParams> {
        let Self { prefill, problem, .. } = self;
        let by_tma = || bias.tensor_map(bias.data, prefill.tile.rows());
        let map = if prefill.tile.shifts_bias() { TensorMap::NONE } else { by_tma()? };
        let source = BiasSource::new(bias, problem.q.dtype.size())?;
        Ok(HopperBiasParams { prefill: self.params()?, bias: map, source })
    }

    /// The parameter with these tensor maps of q and out. Without the latter O is stored row by row.
    fn params_with(&self, q: TensorMap, out: Option<TensorMap>) -> Result<HopperPrefillParams> {
        let Self { prefill, problem, attention, next_tile } = self;
        let score = &problem.score;
        let clips_columns = prefill.clips_columns(problem);
        let by_tma = prefill.loads_kv_by_tma(problem);
        let is_paged = matches!(problem.keys.storage, KeyStorage::Paged(_));
        let keys = |view: &KvView, dim| {
            if by_tma {
                prefill.key_map(problem, view, dim, prefill.keys_per_box(problem))
            } else {
                Ok(TensorMap::NONE)
            }
        };
        let head_atom_columns = |view: &KvView| match step(problem.num_kv_heads, view.head_stride) {
            _ if clips_columns => 1,
            step => (step / prefill.tile.kv_atom_row()) as i32,
        };
        Ok(HopperPrefillParams {
            attention: attention.with_packs(
                prefill.pack_gqa,
                prefill.num_packs(problem),
                prefill.queries_per_cluster(),
            ),
            q,
            k: keys(&problem.k, problem.head_dim)?,
            v: keys(&problem.v, problem.value_dim)?,
            stores_by_tma: i32::from(out.is_some()),
            out: out.unwrap_or(TensorMap::NONE),
            next_tile: next_tile.cast(),
            is_causal: i32::from(score.window_left < 0 && score.window_right >= 0),
            box_row_groups: if by_tma && is_paged { (prefill.keys_per_box(problem) / ATOM_ROWS) as i32 } else { 0 },
            k_head_atom_columns: head_atom_columns(&problem.k),
            v_head_atom_columns: head_atom_columns(&problem.v),
            group_reciprocal: (1u32 << 16).div_ceil(prefill.pack_gqa as u32),
            group_heads: prefill.heads_per_pack(problem) as i32,
            query_boxes_are_columns: i32::from(prefill.query_boxes_are_columns(problem)),
            clips_columns: i32::from(clips_columns),
            packs: IndexDivisor::of(prefill.num_packs(problem) as u64),
            packs_per_kv_head: IndexDivisor::of(prefill.packs_per_kv_head as u64),
            page_divisor: IndexDivisor::of(match problem.keys.storage {
                KeyStorage::Contiguous { .. } => 1,
                KeyStorage::Paged(table) => table.page_size as u64,
            }),
        })
    }
}

/// Address of a launch's counters at the start of the workspace, the dynamic scheduler's tile counter first; null without room for
/// `count` of them.
pub(super) fn counters_address(problem: &Attention, count: usize) -> *mut u8 {
    let place = room(problem, 0, COUNTER_BYTES).filter(|(_, bytes)| *bytes >= count * COUNTER_BYTES);
    place.map_or(null_mut(), |(place, _)| place)
}
