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
#[cfg(test)]
pub(super) mod tests;
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
use hopper::{HopperPrefill, PrefillParameter};
use latent::LatentParameter;
use std::cell::OnceCell;
use std::ffi::c_void;
use tiles::AttentionTile;

/// Returns the launches of a call, or `None` to leave it to the strategies after it. A strategy decides by static values:
/// sizes, strides and options, never by what is in the batch. With `batch_invariant`, which launch takes a sequence depends
/// on the sequence's own length only.
type Strategy = for<'c> fn(&Call<'c>) -> Result<Option<Launches<'c>>>;

/// The strategies, in the order in which they are tried.
const STRATEGIES: [Strategy; 14] = [
    bias::launches,                              // a bias of pairs of rows and keys
    hopper_split_kv::launches_of_row_masks,      // rows with masks of their own
    row_masks::launches,                         // likewise, on every GPU
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
    /// What [`hopper_prefill`](Self::hopper_prefill) returns, once it is known.
    hopper_prefill: OnceCell<Option<HopperPrefill>>,
}

impl<'c> Call<'c> {
    fn new(problem: &'c Attention, update: Option<&KvCacheUpdate>, device: Device) -> Result<Self> {
        let params = AttentionParams::new(problem, &device)?;
        let new_tokens = update.and_then(NewTokens::of);
        let bias = problem.score.bias.map(|bias| BiasSource::new(&bias, problem.q.dtype.size())).transpose()?;
        let decode = AttentionTile::decode(problem, &device)?;
        Ok(Self { problem, device, params, new_tokens, decode, bias, hopper_prefill: OnceCell::new() })
    }

    /// Hopper's prefill for the call, which several strategies need; `None` for calls that the portable kernels compute.
    fn hopper_prefill(&self) -> Option<HopperPrefill> {
        *self.hopper_prefill.get_or_init(|| HopperPrefill::of(self.problem, &self.device))
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

    /// Whether rows have masks of their own: bounds of their keys, or trees.
    fn has_row_masks(&self) -> bool {
        let queries = &self.problem.queries;
        queries.tree.is_some() || !queries.key_ranges.is_none()
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
    PrefillRowMasks(PrefillParameter<'c>),
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
            Self::PrefillRowMasks(of) => of.row_mask_params()?.pass(enqueue),
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
