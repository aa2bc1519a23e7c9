//! The gradient of a bias, which a separate kernel computes, and the parameter of the kernels that know of the bias.

use super::{Launch, Parameter};
use crate::cuda::attention::params::check_dense;
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::bias::{
    BiasBackwardParams, BiasSource, DBIAS_KEYS, DBIAS_ROWS, DBIAS_SHARED_BYTES, DBIAS_THREADS,
};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::Bias;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use std::ptr::null_mut;

const KERNEL: &str = "attention_bwd_dbias";
const MAX_TILES_PER_CTA: usize = 16;

/// The parameter of a call with this bias.
pub(super) fn params(
    problem: &FlashAttnVarlenBwd,
    bias: &Bias,
    backward: &BackwardParams,
    device: &Device,
) -> Result<BiasBackwardParams> {
    let q_bytes = problem.forward.q.dtype.size();
    if let Some(dbias) = &problem.dbias {
        check_dense("dbias", dbias.data, dbias.dtype.size())?;
    }
    Ok(BiasBackwardParams {
        backward: *backward,
        bias: BiasSource::new(bias, q_bytes)?,
        dbias: problem.dbias.map_or(null_mut(), |dbias| dbias.data.cast()),
        seqs: bias.seqs as i32,
        heads: bias.heads as i32,
        widens_dbias: i32::from(problem.dbias.is_some_and(|dbias| dbias.dtype.size() > q_bytes)),
        tiles_per_cta: tiles_per_cta(bias, device) as i32,
    })
}

/// Sequences and heads of a bias times the blocks of rows of each, and its tiles of keys.
fn blocks_and_tiles(bias: &Bias) -> (usize, usize) {
    let blocks = bias.rows.div_ceil(DBIAS_ROWS as usize);
    ((bias.seqs * bias.heads).saturating_mul(blocks), bias.keys.div_ceil(DBIAS_KEYS as usize))
}

/// How many adjacent tiles of keys a CTA computes: loads of the next one then run beside this one's products, and what a CTA
/// begins with is done once. Few, where that would leave SMs without work.
fn tiles_per_cta(bias: &Bias, device: &Device) -> usize {
    let (blocks, tiles) = blocks_and_tiles(bias);
    (blocks.saturating_mul(tiles) / (8 * device.sms as usize).max(1)).clamp(1, MAX_TILES_PER_CTA)
}

/// The launch that computes dbias, after the one that stores delta; `None` if the call does not ask for it.
pub(super) fn launch<'p>(
    problem: &FlashAttnVarlenBwd,
    device: &Device,
    parameter: Parameter<'p>,
) -> Result<Option<Launch<'p>>> {
    let (Some(bias), true) = (&problem.forward.score.bias, problem.dbias.is_some()) else { return Ok(None) };
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.forward.q.dtype)])?;
    let (blocks, tiles) = blocks_and_tiles(bias);
    let ctas = blocks.saturating_mul(tiles.div_ceil(tiles_per_cta(bias, device)));
    if ctas > i32::MAX as usize {
        return Err(Error::unimplemented(format!("dbias takes {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let (threads, shared_memory) = (DBIAS_THREADS as u32, DBIAS_SHARED_BYTES as u32);
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads, shared_memory };
    Ok((ctas > 0).then(|| Launch::new(KERNEL, variant, config, parameter)))
}
