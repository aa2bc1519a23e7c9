//! The gradient of a bias, and the parameter of the kernels that know of the bias.
//!
//! Where each pair of a row and a key has a bias of its own, the kernel that computes dQ stores what it computes anyway. Where
//! sequences or heads share a bias, and after a soft cap, whose derivative is not in this gradient, a separate kernel sums it.

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
use crate::problem::attention::{Attention, Bias};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::DType;
use std::ptr::null_mut;

const KERNEL: &str = "attention_bwd_dbias";
const CLEAR_KERNEL: &str = "attention_bwd_dbias_clear";
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
        dbias_is_f32: i32::from(problem.dbias.is_some_and(|dbias| dbias.dtype == DType::F32)),
        dq_stores_dbias: i32::from(problem.dbias.is_some() && main_kernel_stores_it(&problem.forward, bias)),
        tiles_per_cta: tiles_per_cta(bias, device) as i32,
        dq_clears_dbias: 1,
    })
}

/// Whether dS of the kernel for dQ is the gradient of the bias, which that kernel then stores.
pub(super) fn main_kernel_stores_it(forward: &Attention, bias: &Bias) -> bool {
    (bias.seqs, bias.heads) == (forward.max_seqs, forward.num_q_heads) && forward.score.softcap == 0.0
}

/// Whether a row of the bias, and of the gradient that the kernel for dQ stores, begins with a chunk of 16 bytes and has
/// elements of q's type.
pub(super) fn is_aligned(problem: &FlashAttnVarlenBwd, bias: &Bias) -> bool {
    let dtype = problem.forward.q.dtype;
    let stored = problem.dbias.filter(|_| main_kernel_stores_it(&problem.forward, bias));
    bias.dtype == dtype
        && (bias.keys * dtype.size()).is_multiple_of(16)
        && stored.is_none_or(|dbias| dbias.dtype == dtype)
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

/// The bias whose gradient the call asks for, and whether the kernel for dQ stores it.
fn wanted<'p>(problem: &'p FlashAttnVarlenBwd<'_>) -> Option<(&'p Bias, bool)> {
    let bias = problem.forward.score.bias.as_ref().filter(|_| problem.dbias.is_some())?;
    Some((bias, main_kernel_stores_it(&problem.forward, bias)))
}

/// The launch before those of the other gradients, which clears dbias where the kernel for dQ does not store it, and the launch
/// after them, which computes dbias from the delta that they have stored. A call has at most one of them.
pub(super) fn launches<'p>(
    problem: &FlashAttnVarlenBwd,
    device: &Device,
    parameter: &Parameter<'p>,
) -> Result<[Option<Launch<'p>>; 2]> {
    let Some((bias, main_kernel_stores_it)) = wanted(problem) else { return Ok([None, None]) };
    let (blocks, tiles) = blocks_and_tiles(bias);
    if main_kernel_stores_it {
        let variant = variants::find(CLEAR_KERNEL, &[])?;
        return Ok([launch(CLEAR_KERNEL, variant, blocks, [DBIAS_THREADS as u32, 0], parameter.clone())?, None]);
    }
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.forward.q.dtype)])?;
    let ctas = blocks.saturating_mul(tiles.div_ceil(tiles_per_cta(bias, device)));
    Ok([None, launch(KERNEL, variant, ctas, [DBIAS_THREADS, DBIAS_SHARED_BYTES].map(|x| x as u32), parameter.clone())?])
}

/// A launch of a kernel for the gradient of a bias, of a CTA per block of it; `None` without CTAs.
pub(super) fn launch<'p>(
    kernel: &'static str,
    variant: usize,
    ctas: usize,
    [threads, shared_memory]: [u32; 2],
    parameter: Parameter<'p>,
) -> Result<Option<Launch<'p>>> {
    if ctas > i32::MAX as usize {
        return Err(Error::unimplemented(format!("dbias takes {ctas} blocks; a grid has up to 2^31 - 1")));
    }
    let config = LaunchConfig { grid: [ctas as u32, 1, 1], threads, shared_memory };
    Ok((ctas > 0).then(|| Launch::new(kernel, variant, config, parameter)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::attention::tests::problem;
    use crate::problem::attention::Score;

    #[test]
    fn the_kernel_for_dq_stores_the_gradient_of_a_bias_that_nothing_shares_and_that_no_soft_cap_precedes() {
        let plain = problem(64, 4, 8, 64);
        let own =
            Bias { data: std::ptr::null(), dtype: DType::BF16, seqs: 4, heads: plain.num_q_heads, rows: 9, keys: 9 };
        let stored = |bias: Bias, softcap| {
            let score = Score { softcap, ..plain.score };
            main_kernel_stores_it(&Attention { score, ..plain }, &bias)
        };
        assert!(stored(own, 0.0));
        assert!(!stored(own, 1.0));
        assert!(!stored(Bias { seqs: 1, ..own }, 0.0));
        assert!(!stored(Bias { heads: 1, ..own }, 0.0));
    }
}
