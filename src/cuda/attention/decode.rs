//! Decode: the launches for sequences whose packed rows fit one tile. The keys are divided between CTAs (split-KV), and the
//! combine kernel merges the partials of tiles that several CTAs computed.

use super::split::KvSplit;
use super::tiles::AttentionTile;
use super::{Call, Launch, Launches, Parameter, UNLIMITED};
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::combine::{COMBINE_CTAS_PER_SM, COMBINE_THREADS};
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::attention::Attention;

/// Partials that a tile has on average from which on `combine_many` is faster than `combine`.
const MANY_PARTIALS: i64 = 16;

/// Maximum new rows per KV head that one decode warp stores in the cache. Stores are serial and delay the warp's attention
/// work; above this a separate update kernel is faster.
pub(super) const ROWS_PER_WARP: i64 = 4;

/// Takes calls without long sequences: those whose sizes leave room for one query per sequence on average, or for no long
/// sequence at all, or whose caller says so by `max_seqlen_q`. In the first and the last case there may be long sequences
/// nevertheless, which decode serves too; but with `batch_invariant` the kernel of a sequence must not depend on the batch.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    if !call.decode.fits(call.problem, &call.device) {
        return Ok(None);
    }
    if is_mostly_short(call) && !call.problem.batch_invariant {
        return launches_for(call, all_tiles(call), UNLIMITED, true).map(Some);
    }
    if call.long_sequences() > 0 {
        Ok(None)
    } else {
        launches_for(call, max_short_tiles(call), call.max_short_queries(), true).map(Some)
    }
}

/// The launches that decode all sequences, of any length, if the work partition has room for partials ([`KvSplit::has_room`]).
pub(super) fn launches_with_split_keys<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let split = split_for(call, all_tiles(call), UNLIMITED);
    let takes = call.decode.fits(call.problem, &call.device) && split.has_room();
    takes.then(|| launches_of(call, &split, UNLIMITED, true)).transpose()
}

/// The maximum number of tiles of all sequences.
fn all_tiles(call: &Call) -> i64 {
    call.max_tiles(call.decode.rows(), call.rows().min(call.seqs()))
}

/// Whether most sequences are short, by the sizes or by `max_seqlen_q`.
fn is_mostly_short(call: &Call) -> bool {
    let longest = call.problem.queries.longest as i64;
    call.rows() <= call.seqs() || (1..=call.max_short_queries()).contains(&longest)
}

/// Whether all sequences are short, or most of them by the sizes or by `max_seqlen_q`.
pub(super) fn are_short(call: &Call) -> bool {
    is_mostly_short(call) || call.long_sequences() == 0
}

/// The maximum number of tiles of short sequences.
pub(super) fn max_short_tiles(call: &Call) -> i64 {
    let rows = call.decode.rows();
    call.rows().min(call.seqs()) * ((call.max_short_queries() * call.group() + rows - 1) / rows)
}

/// The launches of a call with long sequences: decode for the short ones, and the launch that `prefill` returns, given its
/// parameter, for the long ones.
pub(super) fn with_prefill<'c>(
    call: &Call<'c>,
    prefill: impl FnOnce(&AttentionParams) -> Result<Launch<'c>>,
) -> Result<Launches<'c>> {
    let mut launches = launches_for(call, max_short_tiles(call), call.max_short_queries(), false)?;
    let decode_is_first = launches.store_new_tokens;
    let mut params = call.params_for(call.max_short_queries() + 1, UNLIMITED);
    params.clears_padding_rows = i32::from(!decode_is_first);
    let place = if decode_is_first { launches.list.len() } else { 0 };
    launches.list.insert(place, prefill(&params)?);
    Ok(launches)
}

/// The launches that decode the sequences of up to `max_queries` queries, which have at most `tiles` tiles per KV head.
/// `are_alone`: there is no other launch, which could write the padding rows.
fn launches_for<'c>(call: &Call<'c>, tiles: i64, max_queries: i64, are_alone: bool) -> Result<Launches<'c>> {
    launches_of(call, &split_for(call, tiles, max_queries), max_queries, are_alone)
}

/// The work partition of the sequences of up to `max_queries` queries, which have at most `tiles` tiles per KV head.
fn split_for(call: &Call, tiles: i64, max_queries: i64) -> KvSplit {
    let Call { problem, device, decode, .. } = call;
    let shared_memory = decode.decode_shared_memory(problem, device);
    let resident = device.resident_blocks(shared_memory, decode.decode_ctas_per_sm(problem, device));
    KvSplit::new(problem, decode, tiles, max_queries, i64::from(resident), 0)
}

/// The same in the work ranges of `split`.
fn launches_of<'c>(call: &Call<'c>, split: &KvSplit, max_queries: i64, are_alone: bool) -> Result<Launches<'c>> {
    let Call { problem, device, decode, .. } = call;
    let shared_memory = decode.decode_shared_memory(problem, device);
    let warps = split.ranges * i64::from(decode.threads() / 32);
    let new_tokens = call.new_tokens.filter(|_| decode.appends_kv && call.rows() <= ROWS_PER_WARP * warps);
    let mut params = call.params_for(1, max_queries);
    params.clears_padding_rows = i32::from(are_alone || new_tokens.is_some());
    params.partial = split.partial;
    if params.has_narrow_rows == 0 {
        params.partial.max_warp_tile_chunks = decode.max_warp_tile_chunks(problem, device);
    }
    params.new_tokens = new_tokens.unwrap_or(params.new_tokens);
    let grid = [problem.num_kv_heads as u32, split.ranges as u32, 1];
    let config = LaunchConfig { grid, threads: decode.threads(), shared_memory };
    let attend = Launch::new(
        AttentionTile::kernel(problem, device),
        decode.variant(problem, device)?,
        config,
        call.parameter(&params),
    );
    let list = [Some(attend), combine(problem, device, split, &params, decode.rows())?].into_iter().flatten().collect();
    Ok(Launches { list, store_new_tokens: new_tokens.is_some() })
}

/// The combine kernel's launch, if a launch with this parameter may split tiles, which have about `tile_rows` rows. So many
/// CTAs divide a tile that each loads partials once, if all of them run at the same time.
pub(super) fn combine<'c>(
    problem: &Attention,
    device: &Device,
    split: &KvSplit,
    params: &AttentionParams,
    tile_rows: i64,
) -> Result<Option<Launch<'c>>> {
    let records = split.num_split_records();
    if records == 0 {
        return Ok(None);
    }
    let heads = problem.num_kv_heads as i64;
    let partials = i64::from(params.partial.num_ranges) / split.tiles;
    let has_many = partials >= MANY_PARTIALS && params.partial.max_fixed_splits == 0;
    let (kernel, wanted) = if has_many {
        // A CTA for each chunk of 128 columns of a row, from all records of a tile.
        let rows = (problem.num_rows * problem.num_q_heads) as i64 / (heads * split.tiles);
        let chunks = (problem.value_dim as u64).div_ceil(128).next_power_of_two() as i64;
        ("combine_many", (rows.clamp(1, tile_rows) * chunks + partials - 1) / partials)
    } else {
        let row_lanes = (problem.value_dim as i64 / 4).max(8).unsigned_abs().next_power_of_two() as i64;
        ("combine", (tile_rows * row_lanes + i64::from(COMBINE_THREADS) - 1) / i64::from(COMBINE_THREADS))
    };
    let variant = variants::find(kernel, &[variants::dtype_value(problem.out.dtype)])?;
    let resident = i64::from(COMBINE_CTAS_PER_SM) * i64::from(device.sms);
    let ctas_per_record = wanted.min(resident / (heads * i64::from(records))).max(1);
    let grid = [problem.num_kv_heads as u32, records, ctas_per_record as u32];
    let config = LaunchConfig { grid, threads: COMBINE_THREADS as u32, shared_memory: 0 };
    Ok(Some(Launch::new(kernel, variant, config, Parameter::Attention(*params))))
}
