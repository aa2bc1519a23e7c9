//! Attention on CUDA: which kernels a call takes, in which launches.
//!
//! The host does not know lengths. Grids have a CTA for every tile that the static sizes allow; CTAs find their tiles
//! themselves, and those without one exit. `docs/dev/kernels` explains the kernels.
//!
//! Each way to execute a call is a strategy in its own file: it returns launches, which are data, or leaves the call to the
//! strategies after it. `docs/dev/new_architecture.md` says how to add another architecture.

mod bias;
mod cluster_decode;
mod decode;
mod fused;
mod hopper;
mod hopper_split_kv;
mod index_divisor;
mod latent;
mod loaded_bias;
pub(super) mod params;
mod portable;
mod portable_split_kv;
mod row_masks;
mod split;
mod split_times;
pub(super) mod tiles;
mod token_scales;

use super::device::Device;
use super::kernel_launch;
use super::params::attention::{AttentionParams, NewTokens};
use super::params::bias::{BiasParams, BiasSource, CopyRowsParams};
use super::params::key_ranges::KeyRangeParams;
use super::params::token_scales::TokenScaleParams;
use super::params::tree_mask::RowMaskParams;
use crate::error::Result;
use crate::problem::KvScaleCache;
use crate::problem::attention::{Attention, Bias};
use crate::problem::kv_cache_update::KvCacheUpdate;
use crate::stream::Stream;
use fused::FusedParameter;
use hopper::PrefillParameter;
use latent::LatentParameter;
use std::ffi::c_void;
use tiles::AttentionTile;

/// Returns the launches of a call, or `None` to leave it to the strategies after it. A strategy decides by static values:
/// sizes, strides and options, never by what is in the batch. With `batch_invariant`, which launch takes a sequence depends
/// on the sequence's own length only.
type Strategy = for<'c> fn(&Call<'c>) -> Result<Option<Launches<'c>>>;

/// The strategies, in the order in which they are tried.
const STRATEGIES: [Strategy; 13] = [
    bias::launches,                              // a bias of pairs of rows and keys
    row_masks::launches,                         // rows with masks of their own
    portable_split_kv::launches_of_large_groups, // all sequences are short, and have many query heads per KV head
    hopper::launches_over_few_keys,              // all sequences are short, and have few keys
    cluster_decode::launches,                    // few sequences, all short
    hopper_split_kv::launches_of_wide_heads,     // all sequences are short, and have wide heads
    decode::launches,                            // all sequences are short
    hopper::launches_for_all,                    // nearly all sequences are long
    hopper_split_kv::launches,                   // few queries over many keys
    portable_split_kv::launches,                 // likewise, on every GPU
    fused::launches,                             // short and long sequences in one kernel
    hopper::launches,                            // long sequences, with decode for the short ones
    portable::launches,                          // likewise, on every GPU
];

/// Those of caches with a scale per token and KV head.
const TOKEN_SCALE_STRATEGIES: [Strategy; 8] = [
    portable_split_kv::launches_of_large_groups,
    cluster_decode::launches,
    decode::launches,
    hopper::launches_for_all,
    hopper_split_kv::launches,
    portable_split_kv::launches,
    hopper::launches,
    portable::launches,
];

/// The call that strategies decide on.
struct Call<'c> {
    problem: &'c Attention<'c>,
    device: Device,
    /// The kernels' parameter, without what differs between launches.
    params: AttentionParams,
    /// The tokens that the cache is to be updated with, if decode can store them.
    new_tokens: Option<NewTokens>,
    /// The tile of decode.
    decode: &'static AttentionTile,
    /// The bias of pairs of rows and keys.
    bias: Option<BiasSource>,
}

impl<'c> Call<'c> {
    fn new(problem: &'c Attention, update: Option<&KvCacheUpdate>, device: Device) -> Result<Self> {
        let params = AttentionParams::new(problem, &device)?;
        let new_tokens = update.and_then(NewTokens::of);
        let bias = problem.score.bias.map(|bias| BiasSource::new(&bias, problem.q.dtype.size())).transpose()?;
        Ok(Self { problem, device, params, new_tokens, decode: AttentionTile::decode(problem, &device)?, bias })
    }

    fn rows(&self) -> i64 {
        self.problem.num_rows as i64
    }

    fn seqs(&self) -> i64 {
        self.problem.max_seqs as i64
    }

    /// Query heads per KV head.
    fn group(&self) -> i64 {
        (self.problem.num_q_heads / self.problem.num_kv_heads) as i64
    }

    /// Packed rows of the longest sequence, or of a sequence on average if the caller does not say.
    fn packed_rows(&self) -> i64 {
        longest_or_mean_queries(self.problem).saturating_mul(self.group())
    }

    /// Maximum number of tiles of `tile_rows` packed rows per KV head that up to `sequences` sequences have.
    fn max_tiles(&self, tile_rows: i64, sequences: i64) -> i64 {
        max_tiles(self.rows() * self.group(), tile_rows, sequences)
    }

    /// Maximum queries of a short sequence. It must not depend on the tile of decode, which depends on the batch.
    fn max_short_queries(&self) -> i64 {
        (MAX_SHORT_ROWS / self.group()).max(1)
    }

    /// Maximum number of long sequences.
    fn long_sequences(&self) -> i64 {
        self.seqs().min(self.rows() / (self.max_short_queries() + 1))
    }

    /// Whether the caller says that no sequence is short: then all of them have as many queries as the longest one.
    fn are_all_long(&self) -> bool {
        let longest = self.problem.queries.longest as i64;
        longest > self.max_short_queries() && longest.saturating_mul(self.seqs()) == self.rows()
    }

    /// The parameter of a launch for the sequences that have `min` to `max` queries.
    fn params_for(&self, min: i64, max: i64) -> AttentionParams {
        AttentionParams { min_queries: min as i32, max_queries: max as i32, ..self.params }
    }

    /// The parameter of a launch of the kernel of an [`AttentionTile`].
    fn parameter(&self, params: &AttentionParams) -> Parameter<'c> {
        match (&self.problem.scale_cache, self.bias) {
            (None, None) => Parameter::Attention(*params),
            (Some(scales), _) => Parameter::TokenScales(Box::new(TokenScaleParams::new(params, scales))),
            (None, Some(bias)) => Parameter::Bias(Box::new(BiasParams { attention: *params, bias })),
        }
    }
}

/// The most queries of a sequence, or the average number, rounded up, if the caller does not say.
fn longest_or_mean_queries(problem: &Attention) -> i64 {
    // The caller's number may be any.
    match problem.queries.longest.min(problem.num_rows) {
        0 => problem.num_rows.div_ceil(problem.max_seqs.max(1)) as i64,
        longest => longest as i64,
    }
}

/// Maximum packed rows of a short sequence: those of the largest tile of decode.
const MAX_SHORT_ROWS: i64 = 16;

/// More queries than any sequence has.
const UNLIMITED: i64 = i32::MAX as i64;

/// Maximum number of tiles of `tile` packed rows that `sequences` sequences with `packed` packed rows in total can have: an
/// upper bound of the sum of `ceil(packed rows / tile)` over sequences with rows.
fn max_tiles(packed: i64, tile: i64, sequences: i64) -> i64 {
    (packed + sequences * (tile - 1)) / tile
}

/// A launch's parameter, or what it is built from when the launch is enqueued.
enum Parameter<'c> {
    Attention(AttentionParams),
    Bias(Box<BiasParams>),
    CopyRows(CopyRowsParams),
    KeyRanges(Box<KeyRangeParams>),
    RowMasks(Box<RowMaskParams>),
    TokenScales(Box<TokenScaleParams>),
    Prefill(PrefillParameter<'c>),
    PrefillBias(PrefillParameter<'c>, Bias),
    PrefillKeyRanges(PrefillParameter<'c>),
    PrefillTokenScales(PrefillParameter<'c>, KvScaleCache),
    Fused(Box<FusedParameter<'c>>),
    Latent(LatentParameter<'c>),
}

impl kernel_launch::Parameter for Parameter<'_> {
    fn pass(&self, enqueue: impl FnOnce(*const c_void) -> Result) -> Result {
        match self {
            Self::Attention(params) => params.pass(enqueue),
            Self::Bias(params) => params.pass(enqueue),
            Self::CopyRows(params) => params.pass(enqueue),
            Self::KeyRanges(params) => params.pass(enqueue),
            Self::RowMasks(params) => params.pass(enqueue),
            Self::TokenScales(params) => params.pass(enqueue),
            Self::Prefill(of) => of.params()?.pass(enqueue),
            Self::PrefillBias(of, bias) => of.bias_params(bias)?.pass(enqueue),
            Self::PrefillKeyRanges(of) => of.key_range_params()?.pass(enqueue),
            Self::PrefillTokenScales(of, scales) => of.token_scale_params(scales)?.pass(enqueue),
            Self::Fused(of) => of.params()?.pass(enqueue),
            Self::Latent(of) => of.params()?.pass(enqueue),
        }
    }
}

type Launch<'c> = kernel_launch::Launch<Parameter<'c>>;

/// The launches of a call, in order. The first one also clears the padding rows.
#[derive(Default)]
struct Launches<'c> {
    list: Vec<Launch<'c>>,
    /// Whether they store [`Call::new_tokens`].
    store_new_tokens: bool,
}

/// The launches of the first strategy that takes the call; none if there is no row.
fn launches<'c>(call: &Call<'c>) -> Result<Launches<'c>> {
    if call.problem.num_rows == 0 {
        return Ok(Launches::default());
    }
    let has_token_scales = call.problem.scale_cache.is_some();
    let strategies: &[Strategy] = if has_token_scales { &TOKEN_SCALE_STRATEGIES } else { &STRATEGIES };
    for strategy in strategies {
        if let Some(launches) = strategy(call)? {
            return Ok(launches);
        }
    }
    unreachable!("the portable strategy takes every call")
}

/// The launches chosen for a call. Nothing is enqueued yet.
pub(crate) struct LaunchPlan<'c>(Launches<'c>);

impl<'c> LaunchPlan<'c> {
    pub(crate) fn new(problem: &'c Attention) -> Result<Self> {
        Self::on(problem, None, Device::current()?)
    }

    /// The launches of attention over a cache that is to be updated first. If decode can store the update
    /// ([`stores_update`](Self::stores_update)), it comes before prefill, reads the new keys from the update's operands, and
    /// stores every row whose slot is in the cache. Otherwise the caller launches the update first.
    pub(crate) fn with_update(problem: &'c Attention, update: &KvCacheUpdate) -> Result<Self> {
        Self::on(problem, Some(update), Device::current()?)
    }

    /// The launches over a latent cache, whose keys and values are the same rows.
    pub(crate) fn of_latent(problem: &'c Attention) -> Result<Self> {
        latent::launches(problem, &Device::current()?).map(Self)
    }

    fn on(problem: &'c Attention, update: Option<&KvCacheUpdate>, device: Device) -> Result<Self> {
        token_scales::check(problem)?;
        launches(&Call::new(problem, update, device)?).map(Self)
    }

    pub(crate) fn stores_update(&self) -> bool {
        self.0.store_new_tokens
    }

    /// Loads the kernels that it launches.
    pub(crate) fn load(&self) -> Result {
        self.0.list.iter().try_for_each(kernel_launch::Launch::load)
    }

    /// # Safety
    /// The problem's views are device memory of the current context that outlives the kernels' run; `out`, `lse` and the
    /// workspace are writable; where the plan stores an update, so are the caches, and its views outlive the run too.
    pub(crate) unsafe fn launch(&self, stream: Stream) -> Result {
        // SAFETY: each strategy builds its kernel's parameter from the problem, whose memory the caller guarantees is valid.
        self.0.list.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
    }
}

/// Loads the kernels that [`launch`] enqueues.
pub(crate) fn prepare(problem: &Attention) -> Result {
    LaunchPlan::new(problem)?.load()
}

/// # Safety
/// As for [`LaunchPlan::launch`].
pub(crate) unsafe fn launch(problem: &Attention, stream: Stream) -> Result {
    // SAFETY: this function has the same contract.
    unsafe { LaunchPlan::new(problem)?.launch(stream) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cuda::enqueue::LaunchConfig;
    use crate::cuda::variants;
    use crate::problem::attention::{KeyRanges, KeyStorage, Keys, Queries, Score};
    use crate::problem::kv_cache_update::NewRows;
    use crate::problem::{KvView, Scale};
    use crate::tensor::{DType, Tensor};
    use std::ptr::{null, null_mut};

    /// A call of these sizes over contiguous bf16 keys, without options; no memory.
    pub(in crate::cuda) fn problem(rows: usize, seqs: usize, q_heads: usize, head_dim: usize) -> Attention<'static> {
        let view = KvView { data: null_mut(), page_stride: 0, token_stride: 0, head_stride: 0 };
        let empty = Tensor::dense(DType::BF16, null_mut(), &[0, 8, 8]);
        Attention {
            q: empty,
            kv_dtype: DType::BF16,
            k: view,
            v: view,
            out: empty,
            lse: None,
            workspace: None,
            queries: Queries {
                num_seqs: None,
                starts: null(),
                used: None,
                offset: None,
                key_ranges: KeyRanges::NONE,
                tree: None,
                longest: 0,
            },
            keys: Keys {
                starts: None,
                used: None,
                leftpad: None,
                storage: KeyStorage::Contiguous { total: 16 },
                longest: 0,
            },
            score: Score {
                softmax_scale: 1.0,
                q_scale: None,
                k_scale: None,
                softcap: 0.0,
                window_left: -1,
                window_right: -1,
                top_left: false,
                alibi: None,
                sinks: None,
                bias: None,
            },
            v_scale: None,
            scale_cache: None,
            num_rows: rows,
            num_q_heads: q_heads,
            num_kv_heads: 2,
            head_dim,
            value_dim: head_dim,
            max_seqs: seqs,
            batch_invariant: false,
        }
    }

    /// An H200; without tensor maps as under an old driver.
    pub(in crate::cuda) fn device(has_tensor_maps: bool) -> Device {
        Device {
            capability: 90,
            shared_memory: 227 * 1024,
            shared_memory_per_sm: 228 * 1024,
            reserved_per_block: 1024,
            sms: 132,
            has_tensor_maps,
        }
    }

    fn named(problem: &Attention) -> Vec<(&'static str, i32, i32)> {
        named_on(problem, &device(false))
    }

    pub(super) fn named_on(problem: &Attention, device: &Device) -> Vec<(&'static str, i32, i32)> {
        names(&LaunchPlan::on(problem, None, *device).expect("the sizes are allowed"))
    }

    /// The launches but those that combine: the variant, and how many queries its sequences have, 0 where it does not attend.
    fn names(plan: &LaunchPlan) -> Vec<(&'static str, i32, i32)> {
        let attending = plan.0.list.iter().filter(|launch| !launch.kernel.starts_with("combine"));
        attending
            .map(|launch| {
                let (min, max) = queries(&launch.parameter);
                (variants::VARIANTS[launch.variant].name, min, max)
            })
            .collect()
    }

    fn queries(parameter: &Parameter) -> (i32, i32) {
        match parameter {
            Parameter::Attention(params) => (params.min_queries, params.max_queries),
            Parameter::Bias(params) => (params.attention.min_queries, params.attention.max_queries),
            Parameter::CopyRows(_) => (0, 0),
            Parameter::KeyRanges(params) => (params.attention.min_queries, params.attention.max_queries),
            Parameter::RowMasks(params) => (params.attention.min_queries, params.attention.max_queries),
            Parameter::TokenScales(params) => (params.attention.min_queries, params.attention.max_queries),
            Parameter::Prefill(of)
            | Parameter::PrefillBias(of, _)
            | Parameter::PrefillKeyRanges(of)
            | Parameter::PrefillTokenScales(of, _) => (of.attention.min_queries, of.attention.max_queries),
            Parameter::Latent(of) => (of.attention.min_queries, of.attention.max_queries),
            Parameter::Fused(of) => {
                let FusedParameter { prefill, decode } = &**of;
                assert_eq!(decode.max_queries + 1, prefill.attention.min_queries);
                (decode.min_queries, prefill.attention.max_queries)
            }
        }
    }

    #[test]
    fn launches_cover_every_sequence_length_exactly_once() {
        let decode = "attention_bf16_128_decode_8warps_none";
        let prefill = "attention_bf16_128_prefill_none";
        assert_eq!(named(&problem(64, 64, 8, 104)), [(decode, 1, i32::MAX)]);
        assert_eq!(named(&problem(65, 64, 8, 104)), [(prefill, 5, i32::MAX), (decode, 1, 4)]);
        // No sequence can have more than 4 queries.
        let older = Device { capability: 80, ..device(false) };
        assert_eq!(named_on(&problem(4, 1, 8, 104), &older), [(decode, 1, 4)]);
        let invariant = Attention { batch_invariant: true, ..problem(64, 64, 8, 104) };
        assert_eq!(named(&invariant), [(prefill, 5, i32::MAX), ("attention_bf16_128_decode_none", 1, 4)]);
        assert!(named(&problem(0, 64, 8, 104)).is_empty());
    }

    #[test]
    fn advice_moves_whole_sequences_and_never_leaves_one_out() {
        let advised = |longest, batch_invariant| {
            let plain = problem(640, 160, 8, 128);
            named(&Attention { queries: Queries { longest, ..plain.queries }, batch_invariant, ..plain })
        };
        let both = [("attention_bf16_128_prefill_none", 5, i32::MAX), ("attention_bf16_128_decode_none", 1, 4)];
        assert_eq!(advised(4, false), [("attention_bf16_128_decode_none", 1, i32::MAX)]);
        assert_eq!(advised(8, false), both);
        assert_eq!(advised(4, true), both);
    }

    /// Whether the plan stores an update with rows of these strides, and its launches.
    fn storing(problem: &Attention, scale: Option<Scale>, strides: &[i64]) -> (bool, Vec<(&'static str, i32, i32)>) {
        let dims = [problem.num_rows, problem.num_kv_heads, problem.head_dim].map(|size| size as i64);
        let dense = Tensor::dense(problem.kv_dtype, null_mut(), &dims);
        let rows = NewRows { rows: Tensor { strides: Some(strides), ..dense }, cache: problem.k, scale };
        let slot_mapping = Tensor::dense(DType::I32, null_mut(), &dims[..1]);
        let (cache_dtype, copies) = (problem.kv_dtype, [None, None]);
        let (num_pages, page_size) = (4, 16);
        let update = KvCacheUpdate {
            key: rows,
            value: rows,
            cache_dtype,
            scale_cache: None,
            slot_mapping,
            copies,
            num_pages,
            page_size,
        };
        let plan = LaunchPlan::on(problem, Some(&update), device(false)).expect("the sizes are allowed");
        (plan.stores_update(), names(&plan))
    }

    #[test]
    fn decode_stores_updates_that_it_can_and_comes_first() {
        let (decode, strides) = (problem(64, 64, 8, 128), [256, 128, 1]);
        assert_eq!(
            storing(&decode, None, &strides),
            (true, vec![("attention_bf16_128_decode_8warps_none", 1, i32::MAX)])
        );
        let both = [("attention_bf16_128_decode_none", 1, 4), ("attention_bf16_128_prefill_none", 5, i32::MAX)];
        let invariant = Attention { batch_invariant: true, ..decode };
        assert_eq!(storing(&invariant, None, &strides), (true, both.to_vec()));
        // Nine CTAs of four warps per KV head, one per tile.
        let few = |rows| Attention { batch_invariant: true, ..problem(rows, 9, 8, 128) };
        assert_eq!(storing(&few(144), None, &strides), (true, both.to_vec()));
        let [first, second] = both;
        assert_eq!(storing(&few(145), None, &strides), (false, vec![second, first]));
        let scale = Some(Scale { values: null(), per_head: false });
        assert!(!storing(&decode, scale, &strides).0);
        assert!(!storing(&decode, None, &[256, 132, 1]).0);
        let of = |dtype| Attention { q: Tensor { dtype, ..decode.q }, kv_dtype: dtype, ..decode };
        assert!(storing(&of(DType::F32), None, &strides).0);
        assert!(!storing(&of(DType::F8E4M3FN), None, &strides).0);
        let wide = Attention { head_dim: 256, value_dim: 256, ..of(DType::F32) };
        assert!(!storing(&wide, None, &[512, 256, 1]).0);
    }

    #[test]
    fn no_launch_has_an_empty_grid() {
        let devices = [device(true), device(false), Device { capability: 80, ..device(false) }];
        for (device, seqs) in devices.iter().flat_map(|device| [0, 1, 40, 200].map(|seqs| (device, seqs))) {
            for (rows, dim) in [1, 6, 300, 5000].iter().flat_map(|rows| [64, 128, 256].map(|dim| (*rows, dim))) {
                for batch_invariant in [false, true] {
                    let problem = Attention { batch_invariant, ..problem(rows, seqs, 8, dim) };
                    let plan = LaunchPlan::on(&problem, None, *device).expect("the sizes are allowed");
                    let grids: Vec<_> = plan.0.list.iter().map(|launch| launch.config.grid).collect();
                    assert!(!grids.is_empty() && !grids.as_flattened().contains(&0), "{rows} {seqs} {dim}: {grids:?}");
                }
            }
        }
    }

    #[test]
    fn more_tiles_than_a_grid_holds_are_refused() {
        let prefill = |seqs| {
            let problem = Attention { num_kv_heads: 256, ..problem(1 << 27, seqs, 256, 8) };
            LaunchPlan::on(&problem, None, device(false)).map(|_| ())
        };
        assert!(prefill(1 << 26).is_err_and(|e| e.message.contains("a grid has up to 2^31 - 1")));
        assert!(prefill(1 << 10).is_ok());
    }

    #[test]
    fn the_grid_of_prefill_holds_every_tile_of_every_batch() {
        for (rows, seqs, q_heads) in [(65, 64, 8), (1000, 7, 2), (1000, 999, 6), (300, 40, 48), (5, 1, 8)] {
            let group = q_heads as i64 / 2;
            let problem = problem(rows, seqs, q_heads, 128);
            let plan = LaunchPlan::on(&problem, None, device(false)).expect("the sizes are allowed");
            let prefill = &plan.0.list[0];
            let (smallest, largest) = queries(&prefill.parameter);
            let (smallest, largest) = (i64::from(smallest), i64::from(largest));
            // The most tiles come from as many sequences as possible, each just past a multiple of the tile.
            let (mut left, mut tiles) = (rows as i64, 0);
            for rest in (1..=seqs as i64).rev() {
                let spare = (left - rest * smallest).max(0);
                let queries = (smallest + spare).min(largest).min(left);
                if queries < smallest {
                    break;
                }
                tiles += (queries * group + 127) / 128;
                left -= queries;
            }
            let LaunchConfig { grid, .. } = prefill.config;
            assert!(
                i64::from(grid[0]) >= 2 * tiles.max(1),
                "{rows} rows, {seqs} sequences, group {group}: {tiles} tiles"
            );
            assert!(grid[0].is_multiple_of(2));
        }
    }
}
