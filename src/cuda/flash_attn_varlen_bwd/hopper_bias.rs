//! What Hopper's gradients up to 128 columns need besides for a bias of pairs of rows and keys: which biases their kernels
//! take, the tensor maps, and the parameter.

use super::bias;
use crate::cuda::params::bias::BiasSource;
use crate::cuda::params::hopper_bwd::{HopperBackwardParams, HopperBiasBackwardParams};
use crate::cuda::tensor_map::TensorMap;
use crate::error::Result;
use crate::problem::attention::Bias;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;

/// Whether the kernels take the call's bias and gradient: of q's dtype, and in rows that TMA supports.
pub(super) fn supports(problem: &FlashAttnVarlenBwd, bias: &Bias, queries: u32) -> bool {
    let dtype = problem.forward.q.dtype;
    let stored = problem.dbias.filter(|_| bias::main_kernel_stores_it(&problem.forward, bias));
    let supports = |data| bias.supports_tma(dtype, data, i64::from(queries));
    supports(bias.data.cast()) && stored.is_none_or(|dbias| dbias.dtype == dtype && supports(dbias.data))
}

/// The parameter of `hopper_bwd_*_bias`.
pub(super) fn params(
    problem: &FlashAttnVarlenBwd,
    bias: &Bias,
    queries: u32,
    common: &HopperBackwardParams,
) -> Result<HopperBiasBackwardParams> {
    let dtype = problem.forward.q.dtype;
    let BiasSource { seq_matrices, head_matrices, .. } = BiasSource::new(bias, dtype.size())?;
    let encode = |data| bias.tensor_map(dtype, data, i64::from(queries));
    let stored = problem.dbias.filter(|_| bias::main_kernel_stores_it(&problem.forward, bias));
    Ok(HopperBiasBackwardParams {
        common: *common,
        bias: encode(bias.data.cast())?,
        dbias: stored.map_or(Ok(TensorMap::NONE), |dbias| encode(dbias.data))?,
        seq_matrices,
        head_matrices,
        stores_dbias: i32::from(stored.is_some()),
        reserved: 0,
    })
}
