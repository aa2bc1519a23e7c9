//! Prefill on every GPU: one CTA per tile and KV head.

use super::tiles::AttentionTile;
use super::{Call, Launch, Launches, UNLIMITED, decode};
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention::AttentionParams;
use crate::error::{Error, Result};

/// Takes every call: a launch for the long sequences, and decode's launches for the others. Where decode does not fit the
/// device, the launch is for all sequences.
pub(super) fn launches<'c>(call: &Call<'c>) -> Result<Option<Launches<'c>>> {
    let Call { problem, device, .. } = call;
    let tile = AttentionTile::of(problem, "prefill")?;
    let decodes = call.decode.fits(problem, device);
    let sequences = if decodes { call.long_sequences() } else { call.rows().min(call.seqs()) };
    let tiles = call.max_tiles(tile.rows(), sequences).max(1);
    let ctas = tiles.saturating_mul(problem.num_kv_heads as i64);
    if ctas > i64::from(i32::MAX) {
        return Err(Error::unimplemented(format!("prefill takes up to {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let config =
        LaunchConfig { grid: [ctas as u32, 1, 1], threads: tile.threads(), shared_memory: tile.bytes_for(problem) };
    let variant = tile.variant(problem, device)?;
    let launch = |params: &AttentionParams| {
        Launch::new(AttentionTile::kernel(problem, device), variant, config, call.parameter(params))
    };
    if decodes {
        return decode::with_prefill(call, |params| Ok(launch(params))).map(Some);
    }
    let params = AttentionParams { clears_padding_rows: 1, ..call.params_for(1, UNLIMITED) };
    Ok(Some(Launches { list: vec![launch(&params)], store_new_tokens: false }))
}
