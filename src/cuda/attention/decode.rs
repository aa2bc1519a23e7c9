//! Decode: the kernels for sequences whose packed rows fill no more than one tile. CTAs share out the keys (split-KV); a
//! combine kernel merges what several CTAs computed of a tile.

use super::split::KvSplit;
use super::tiles::KERNEL;
use super::{Call, Launch, Launches, Parameter, UNLIMITED, most_tiles};
use crate::cuda::launch::Shape;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::combine::COMBINE_THREADS;
use crate::cuda::variants;
use crate::error::Result;
use crate::problem::attention::Attention;

const COMBINE_KERNEL: &str = "combine";

/// Most new rows per KV head that one warp stores in the cache. Its stores are serial and delay its attention work; above
/// this a launch of the update's own kernel is faster.
const ROWS_PER_WARP: i64 = 4;

/// Takes calls in which no sequence is long: the sizes leave room for one query per sequence on average, or for no long
/// sequence at all, or the caller says so. The first and the last are guesses that must not decide with `batch_invariant`.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let (rows, seqs, decode) = (call.rows(), call.seqs(), call.decode);
    let longest = call.problem.queries.longest as i64;
    let mostly_short = rows <= seqs || (1..=call.few()).contains(&longest);
    if mostly_short && !call.problem.batch_invariant {
        let tiles = most_tiles(rows * call.group(), decode.rows(), rows.min(seqs));
        return of_sequences(call, tiles, UNLIMITED, true).map(Some);
    }
    if call.long_sequences() > 0 {
        Ok(None)
    } else {
        of_sequences(call, most_short_tiles(call), call.few(), true).map(Some)
    }
}

/// The most tiles that short sequences have.
pub(super) fn most_short_tiles(call: &Call) -> i64 {
    let rows = call.decode.rows();
    call.rows().min(call.seqs()) * ((call.few() * call.group() + rows - 1) / rows)
}

/// The launches of a call whose long sequences have the launch that `prefill` makes of its parameter.
pub(super) fn beside<'c>(
    call: &Call,
    prefill: impl FnOnce(&AttentionParams) -> Result<Launch<'c>>,
) -> Result<Launches<'c>> {
    let mut launches = of_sequences(call, most_short_tiles(call), call.few(), false)?;
    let decode_is_first = launches.store_new_tokens;
    let mut params = call.params_for(call.few() + 1, UNLIMITED);
    params.clears_padding_rows = i32::from(!decode_is_first);
    let place = if decode_is_first { launches.list.len() } else { 0 };
    launches.list.insert(place, prefill(&params)?);
    Ok(launches)
}

/// The launches that decode sequences of up to `max_queries` queries, which have `tiles` tiles per KV head at most.
fn of_sequences<'c>(call: &Call, tiles: i64, max_queries: i64, are_alone: bool) -> Result<Launches<'c>> {
    let Call { problem, device, decode, .. } = call;
    let shared_memory = decode.decode_shared_memory(problem, device);
    let resident = device.resident_blocks(shared_memory, decode.ctas_per_sm);
    let split = KvSplit::new(problem, decode, tiles, max_queries, i64::from(resident), 0);
    let warps = split.ranges * i64::from(decode.threads() / 32);
    let new_tokens = call.new_tokens.filter(|_| decode.appends_kv && call.rows() <= ROWS_PER_WARP * warps);
    let mut params = call.params_for(1, max_queries);
    params.clears_padding_rows = i32::from(are_alone || new_tokens.is_some());
    params.partial = split.partial;
    params.new_tokens = new_tokens.unwrap_or(params.new_tokens);
    let grid = [problem.num_kv_heads as u32, split.ranges as u32, 1];
    let shape = Shape { grid, threads: decode.threads(), shared_memory };
    let attend = Launch::new(KERNEL, decode.variant(problem, device)?, shape, Parameter::Attention(params));
    let list = [Some(attend), combine(problem, &split, &params)?].into_iter().flatten().collect();
    Ok(Launches { list, store_new_tokens: new_tokens.is_some() })
}

/// The launch that combines the partials of split tiles, where a launch with this parameter splits any.
pub(super) fn combine<'c>(
    problem: &Attention,
    split: &KvSplit,
    params: &AttentionParams,
) -> Result<Option<Launch<'c>>> {
    let ends = split.num_split_records();
    if ends == 0 {
        return Ok(None);
    }
    let variant = variants::find(COMBINE_KERNEL, &[variants::dtype_value(problem.out.dtype)])?;
    let grid = [problem.num_kv_heads as u32, ends, 1];
    let shape = Shape { grid, threads: COMBINE_THREADS as u32, shared_memory: 0 };
    Ok(Some(Launch::new(COMBINE_KERNEL, variant, shape, Parameter::Attention(*params))))
}
