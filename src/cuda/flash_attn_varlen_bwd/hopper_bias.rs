//! What Hopper's gradients up to 128 columns need besides for a bias of pairs of rows and keys: which biases their kernels
//! take, the tensor maps, and the parameter.

use super::bias;
use crate::cuda::params::bias::BiasSource;
use crate::cuda::params::hopper_bwd::{HopperBackwardParams, HopperBiasBackwardParams};
use crate::cuda::tensor_map::{Axis, L2Promotion, TensorMap, supports_tma};
use crate::error::Result;
use crate::problem::attention::Bias;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;

/// Keys of a box, as `kernels/include/hopper_bwd/bias.cuh` has them.
const KEYS: i64 = 64;

/// The axes of a bias or of its gradient, with boxes of `queries` rows.
fn axes(bias: &Bias, queries: u32) -> [Axis; 5] {
    let matrices = bias.seqs.saturating_mul(bias.heads) as i64;
    let [rows, keys] = [bias.rows, bias.keys].map(|len| len as i64);
    // The wrappers of TMA have five axes.
    let unused = Axis { len: 1, stride: KEYS, box_len: 1 };
    [
        Axis { len: keys, stride: 1, box_len: KEYS },
        Axis { len: rows, stride: keys, box_len: i64::from(queries) },
        Axis { len: matrices, stride: rows.saturating_mul(keys), box_len: 1 },
        unused,
        unused,
    ]
}

/// Whether the kernels take the call's bias and gradient: of q's dtype, and in rows that TMA supports.
pub(super) fn supports(problem: &FlashAttnVarlenBwd, bias: &Bias, queries: u32) -> bool {
    let dtype = problem.forward.q.dtype;
    let copies = |data, of| of == dtype && supports_tma(dtype, data, &axes(bias, queries));
    let stored = problem.dbias.filter(|_| bias::main_kernel_stores_it(&problem.forward, bias));
    copies(bias.data.cast(), bias.dtype) && stored.is_none_or(|dbias| copies(dbias.data, dbias.dtype))
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
    let encode = |data| TensorMap::new(dtype, data, &axes(bias, queries), L2Promotion::Bytes256);
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
