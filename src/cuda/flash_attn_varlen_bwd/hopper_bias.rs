//! What Hopper's gradients up to 128 columns need besides for a bias of pairs of rows and keys: which biases their kernels
//! take, the tensor maps, the parameter, and the kernel for the gradient of a bias that sequences or heads share.

use super::deferred::defer_params;
use super::tensor_maps::TensorMapConfig;
use super::{Launch, Parameter, bias};
use crate::cuda::device::Device;
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::bias::BiasSource;
use crate::cuda::params::hopper_bwd::{HopperBackwardParams, HopperBiasBackwardParams, HopperDbiasParams};
use crate::cuda::tensor_map::TensorMap;
use crate::cuda::tiles::{HOPPER_BWD_DBIAS, HopperBwdDbiasTile};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::Bias;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::{DType, Tensor};

/// The gradient that `hopper_bwd` stores, if the call asks for one that it does.
fn stored_dbias<'p>(problem: &FlashAttnVarlenBwd<'p>, bias: &Bias) -> Option<Tensor<'p>> {
    problem.dbias.filter(|_| bias::main_kernel_stores_it(&problem.forward, bias))
}

/// Whether the kernels take the call's bias and gradient: of q's dtype, and in rows that TMA supports.
pub(super) fn supports(problem: &FlashAttnVarlenBwd, bias: &Bias, queries: u32) -> bool {
    let dtype = problem.forward.q.dtype;
    let supports = |data| bias.supports_tma(dtype, data, i64::from(queries));
    supports(bias.data.cast())
        && stored_dbias(problem, bias).is_none_or(|dbias| dbias.dtype == dtype && supports(dbias.data))
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
    let stored = stored_dbias(problem, bias);
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

const DBIAS_KERNEL: &str = "hopper_bwd_dbias";

/// Rows and keys of a tile of that kernel, and columns of a swizzle atom.
const DBIAS_TILE: i64 = 128;
const ATOM_COLUMNS: i64 = 64;

/// The launch that computes the gradient of a bias that sequences or heads share, after `hopper_bwd_prepare`, which stores
/// `delta` and the lse in base 2.
pub(super) fn dbias_launch<'p>(
    problem: &'p FlashAttnVarlenBwd,
    bias: &'p Bias,
    device: Device,
    [delta, lse_log2]: [*mut f32; 2],
) -> Result<Option<Launch<'p>>> {
    let Some(dbias) = problem.dbias else { return Ok(None) };
    let dim = problem.forward.head_dim.max(problem.forward.value_dim);
    let tile: &HopperBwdDbiasTile = HOPPER_BWD_DBIAS
        .iter()
        .find(|tile| tile.head_dim as usize >= dim)
        .ok_or_else(|| Error::internal(format!("{DBIAS_KERNEL} is not built for head dimension {dim}")))?;
    let tiles = |len: usize| len.div_ceil(DBIAS_TILE as usize);
    let ctas = (bias.seqs * bias.heads).saturating_mul(tiles(bias.rows)).saturating_mul(tiles(bias.keys));
    let dtype = problem.forward.q.dtype;
    let variant = variants::find(DBIAS_KERNEL, &[variants::dtype_value(dtype), tile.head_dim_value])?;
    let parameter = defer_params(move || {
        let [q, k, v, dout, ..] = TensorMapConfig::all(problem, [DBIAS_TILE; 3], ATOM_COLUMNS);
        let encode = |config: TensorMapConfig| config.encode(problem);
        Ok(HopperDbiasParams {
            backward: BackwardParams::new(problem, &device, delta)?,
            q: encode(q)?,
            k: encode(k)?,
            v: encode(v)?,
            dout: encode(dout)?,
            bias: bias.tensor_map(dtype, bias.data.cast(), DBIAS_TILE)?,
            lse_log2,
            dbias: dbias.data.cast(),
            seqs: bias.seqs as i32,
            heads: bias.heads as i32,
            rows: bias.rows as i32,
            keys: bias.keys as i32,
            dbias_is_f32: i32::from(dbias.dtype == DType::F32),
            reserved: 0,
        })
    });
    bias::launch(DBIAS_KERNEL, variant, ctas, [tile.threads, tile.shared_bytes], Parameter::HopperDbias(parameter))
}
