//! The gradient of a bias, which a separate kernel computes, and the parameter of the kernels that know of the bias.

use super::{Launch, Parameter};
use crate::cuda::attention::params::check_dense;
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

/// The parameter of a call with this bias.
pub(super) fn params(
    problem: &FlashAttnVarlenBwd,
    bias: &Bias,
    backward: &BackwardParams,
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
        reserved: 0,
    })
}

/// The launch that computes dbias, after the one that stores delta; `None` if the call does not ask for it.
pub(super) fn launch<'p>(problem: &FlashAttnVarlenBwd, parameter: Parameter<'p>) -> Result<Option<Launch<'p>>> {
    let (Some(bias), true) = (&problem.forward.score.bias, problem.dbias.is_some()) else { return Ok(None) };
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.forward.q.dtype)])?;
    let tiles = bias.rows.div_ceil(DBIAS_ROWS as usize).saturating_mul(bias.keys.div_ceil(DBIAS_KEYS as usize));
    let ctas = (bias.seqs * bias.heads).saturating_mul(tiles);
    if ctas > i32::MAX as usize {
        return Err(Error::unimplemented(format!("dbias takes {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let (threads, shared_memory) = (DBIAS_THREADS as u32, DBIAS_SHARED_BYTES as u32);
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads, shared_memory };
    Ok((ctas > 0).then(|| Launch::new(KERNEL, variant, config, parameter)))
}
