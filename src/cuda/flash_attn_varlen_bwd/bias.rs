//! The gradient of a bias, and the parameter of the kernels that know of the bias.
//!
//! Where each pair of a row and a key has a bias of its own, a kernel for the other gradients stores what it computes anyway. Where
//! sequences or heads share a bias, and after a soft cap, whose derivative is not in this gradient, a separate kernel sums it, from
//! stored dS where that has a place ([`super::score_gradients`]).

use super::sum_grid::SumGrid;
use super::{Launch, Parameter};
use crate::cuda::attention::tiles::transforms_logits;
use crate::cuda::device::Device;
use crate::cuda::enqueue::LaunchConfig;
use crate::cuda::padded_bias::PaddedBias;
use crate::cuda::params::attention::AttentionParams;
use crate::cuda::params::attention_bwd::BackwardParams;
use crate::cuda::params::bias::{
    ALIGNED_DBIAS_KEYS, ALIGNED_DBIAS_OTHER_BYTES, ALIGNED_DBIAS_ROWS, ALIGNED_DBIAS_STAGE_BYTES,
    ALIGNED_DBIAS_THREADS, BiasBackwardParams, BiasSource, DBIAS_KEYS, DBIAS_ROWS, DBIAS_SHARED_BYTES,
    DBIAS_SUM_THREADS, DBIAS_THREADS, DELTA_ROWS, DELTA_THREADS, ScoreGradients,
};
use crate::cuda::variants;
use crate::error::{Error, Result};
use crate::problem::attention::{Attention, Bias, Score};
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::tensor::{DType, Tensor};
use std::ptr::null_mut;

const KERNEL: &str = "attention_bwd_dbias";
const ALIGNED_KERNEL: &str = "attention_bwd_dbias_aligned";
const SUM_KERNEL: &str = "attention_bwd_dbias_sum";
const CLEAR_KERNEL: &str = "attention_bwd_dbias_clear";
const DELTA_KERNEL: &str = "attention_bwd_delta";
const MAX_TILES_PER_CTA: usize = 16;

/// Values of the axis `head_dim` of `attention_bwd_dbias_aligned`; the shape `bias_aligned` of the other kernels has the same.
const ALIGNED_HEAD_DIMS: [(usize, &str); 2] = [(64, "64"), (128, "128")];

/// Alignment of a copied bias in the workspace: a cache line.
const COPY_ALIGNMENT: usize = 128;

/// Where the kernel for dK and dV can store dS.
#[derive(Clone, Copy, Default)]
pub(super) struct DsPlaces {
    /// Where it belongs as the gradient of each pair's own bias.
    pub(super) gradient: bool,
    /// In the workspace.
    pub(super) workspace: bool,
}

/// The parameter of a call with this bias, whose kernel for dK and dV stores `ds`, if that has a place.
pub(super) fn params(
    problem: &FlashAttnVarlenBwd,
    bias: &Bias,
    backward: &BackwardParams,
    ds: ScoreGradients,
    device: &Device,
) -> Result<BiasBackwardParams> {
    let q_bytes = problem.forward.q.dtype.size();
    let sum_grid = SumGrid::of(&problem.forward, bias, device);
    let tiles_per_cta = if ds.are_stored() {
        sum_grid.tiles_per_cta
    } else {
        SummingKernel::of(problem, bias, backward).tiles_per_cta(&problem.forward, bias, device)
    };
    let dbias = problem.dbias.map_or(null_mut(), |dbias| dbias.data.cast());
    Ok(BiasBackwardParams {
        backward: *backward,
        bias: BiasSource::new(bias, q_bytes)?,
        dbias,
        seqs: bias.seqs as i32,
        heads: bias.heads as i32,
        dbias_is_f32: i32::from(problem.dbias.is_some_and(|dbias| dbias.dtype == DType::F32)),
        dq_stores_dbias: i32::from(stored_dbias(problem).is_some() && !ds.are_stored()),
        tiles_per_cta: tiles_per_cta as i32,
        dbias_keys: bias.keys as i32,
        dbias_stages: aligned_stages(device),
        dbias_warps_per_row: sum_grid.warps_per_row as i32,
        key_period: problem.num_keys as i32,
        query_period: problem.forward.num_rows as i32,
        key_blocks_per_turn: 1,
        query_blocks_per_turn: 1,
        ds,
    })
}

/// Whether dS of the kernel for dQ is the gradient of the bias, which that kernel then stores.
fn main_kernel_stores_it(forward: &Attention, bias: &Bias) -> bool {
    !bias.is_shared(forward.max_seqs, forward.num_q_heads) && forward.score.softcap == 0.0
}

/// The gradient that the kernel for dQ stores, if the call asks for one that it does.
pub(super) fn stored_dbias<'p>(problem: &FlashAttnVarlenBwd<'p>) -> Option<Tensor<'p>> {
    let bias = problem.forward.score.bias.as_ref()?;
    problem.dbias.filter(|_| main_kernel_stores_it(&problem.forward, bias))
}

/// Whether the bias, and its gradient if that is dS, has elements of q's type.
fn has_type_of_q(problem: &FlashAttnVarlenBwd, bias: &Bias) -> bool {
    let dtype = problem.forward.q.dtype;
    bias.dtype == dtype && stored_dbias(problem).is_none_or(|dbias| dbias.dtype == dtype)
}

/// Whether they moreover begin with a chunk of 16 bytes.
pub(super) fn is_aligned(problem: &FlashAttnVarlenBwd, bias: &Bias) -> bool {
    has_type_of_q(problem, bias) && (bias.keys * bias.dtype.size()).is_multiple_of(16)
}

/// Whether the operands and logits are those of the kernels for aligned rows of a bias and of those that store dS.
pub(super) fn has_plain_logits(forward: &Attention) -> bool {
    forward.q.dtype.size() == 2 && !transforms_logits(forward)
}

/// The value of the axis `head_dim` of the kernels for aligned rows of a bias, if they are built for calls such as this one.
pub(super) fn aligned_head_dim(forward: &Attention) -> Option<&'static str> {
    let dim = forward.head_dim.max(forward.value_dim);
    let is_built = has_plain_logits(forward);
    ALIGNED_HEAD_DIMS.iter().find(|(bucket, _)| is_built && *bucket >= dim).map(|(_, value)| *value)
}

/// The copy of the call's bias in the workspace, from `delta` of all rows on, in rows that begin with chunks. `None` if its rows do, if no
/// kernel needs that, or without room. `places`: where the kernel for dK and dV can store dS.
pub(super) fn copy(problem: &FlashAttnVarlenBwd, places: DsPlaces, delta: *mut f32) -> Option<PaddedBias> {
    let forward = &problem.forward;
    let (bias, dtype) = (forward.score.bias.as_ref()?, forward.q.dtype);
    // The kernel that stores dS of each pair's own bias reads that in any rows.
    if is_aligned(problem, bias) || stored_dbias(problem).is_some() {
        return None;
    }
    let place = place_after_delta(problem, delta, None, PaddedBias::copied_bytes(bias, dtype));
    let copy = PaddedBias::new(bias, dtype, place).filter(PaddedBias::is_copied)?;
    // Past the columns of the kernels for aligned rows only those that store dS take it.
    let sums_ds = || ScoreGradients::of(&with_copy(problem, &copy), places, Some(&copy), delta).are_summed();
    (aligned_head_dim(forward).is_some() || sums_ds()).then_some(copy)
}

/// The place of `bytes` in the workspace after delta of all rows, if it has delta, and after the `copy` of a bias. `None` without room.
pub(super) fn place_after_delta(
    problem: &FlashAttnVarlenBwd,
    delta: *mut f32,
    copy: Option<&PaddedBias>,
    bytes: usize,
) -> Option<*mut u8> {
    let (forward, workspace) = (&problem.forward, problem.workspace.as_ref().filter(|_| !delta.is_null())?);
    let aligned = |end: *mut u8| end.wrapping_add(end.align_offset(COPY_ALIGNMENT));
    let end_of_delta = aligned(delta.wrapping_add(forward.num_q_heads * forward.num_rows).cast());
    let place = copy.map_or(end_of_delta, |copy| aligned(end_of_delta.wrapping_add(copy.bytes())));
    let used = (place as usize).wrapping_sub(workspace.data as usize);
    let available = problem.workspace_bytes().checked_sub(used)?;
    (available >= bytes).then_some(place)
}

/// The call with the copy of its bias.
pub(super) fn with_copy<'p>(problem: &FlashAttnVarlenBwd<'p>, copy: &PaddedBias) -> FlashAttnVarlenBwd<'p> {
    let score = Score { bias: Some(copy.bias), ..problem.forward.score };
    FlashAttnVarlenBwd { forward: Attention { score, ..problem.forward }, ..*problem }
}

/// Stages of `attention_bwd_dbias_aligned`: four, or two where there is no room for them. Then no loads are under way beside products.
fn aligned_stages(device: &Device) -> i32 {
    let fit = |stages: i32| aligned_shared_bytes(stages) <= device.shared_memory;
    if fit(4) { 4 } else { 2 }
}

fn aligned_shared_bytes(stages: i32) -> u32 {
    (stages * ALIGNED_DBIAS_STAGE_BYTES + ALIGNED_DBIAS_OTHER_BYTES) as u32
}

/// The kernel that computes the gradient of a bias that sequences or heads share, or that a soft cap follows.
#[derive(Clone, Copy)]
enum SummingKernel {
    General,
    /// With the value of its axis `head_dim`. It reads delta, which the kernel for dQ has stored in the workspace, and strides have
    /// 31 bits of bytes.
    Aligned(&'static str),
}

impl SummingKernel {
    fn of(problem: &FlashAttnVarlenBwd, bias: &Bias, backward: &BackwardParams) -> Self {
        let BackwardParams { forward, dout_token_stride, dout_head_stride, .. } = backward;
        let AttentionParams { q_token_stride, q_head_stride, k, v, .. } = forward;
        let of_keys = [k, v].map(|source| [source.token_stride, source.head_stride]);
        let of_rows = [*q_token_stride, *q_head_stride, *dout_token_stride, *dout_head_stride];
        let limit = i64::from(i32::MAX) / problem.forward.q.dtype.size() as i64;
        let has_short_strides = of_keys.iter().flatten().chain(&of_rows).all(|stride| (0..=limit).contains(stride));
        let is_aligned = has_short_strides && !backward.delta.is_null() && is_aligned(problem, bias);
        aligned_head_dim(&problem.forward).filter(|_| is_aligned).map_or(Self::General, Self::Aligned)
    }

    /// Sequences and heads of a bias times the blocks of rows of each, and its tiles of keys.
    fn blocks_and_tiles(self, bias: &Bias) -> (usize, usize) {
        let [rows, keys] = match self {
            Self::General => [DBIAS_ROWS, DBIAS_KEYS],
            Self::Aligned(_) => [ALIGNED_DBIAS_ROWS, ALIGNED_DBIAS_KEYS],
        };
        let blocks = bias.rows.div_ceil(rows as usize);
        ((bias.seqs * bias.heads).saturating_mul(blocks), bias.keys.div_ceil(keys as usize))
    }

    /// How many adjacent tiles of keys a CTA computes: loads of the next one then run beside this one's products, and what a
    /// CTA begins with is done once. Few, where that would leave SMs without work.
    fn tiles_per_cta(self, forward: &Attention, bias: &Bias, device: &Device) -> usize {
        let (blocks, tiles) = self.blocks_and_tiles(bias);
        let sms = (device.sms as usize).max(1);
        let for_ctas_per_sm = |ctas: usize| (blocks.saturating_mul(tiles) / (ctas * sms)).clamp(1, MAX_TILES_PER_CTA);
        // A CTA begins in the time of half a tile. Under a mask tiles take different times.
        let time =
            |count: &usize| blocks.saturating_mul(tiles.div_ceil(*count)).div_ceil(sms).saturating_mul(2 * count + 1);
        match self {
            Self::General => for_ctas_per_sm(8),
            Self::Aligned(_) if forward.score.is_masked() => for_ctas_per_sm(4),
            Self::Aligned(_) => (1..=MAX_TILES_PER_CTA).min_by_key(time).unwrap_or(1),
        }
    }
}

/// The launch that stores delta of all rows.
pub(super) fn delta_launch<'p>(forward: &Attention, parameter: Parameter<'p>) -> Result<Option<Launch<'p>>> {
    let variant = variants::find(DELTA_KERNEL, &[variants::dtype_value(forward.q.dtype)])?;
    let ctas = forward.num_rows.div_ceil(DELTA_ROWS as usize).saturating_mul(forward.num_q_heads);
    launch(DELTA_KERNEL, variant, ctas, [DELTA_THREADS as u32, 0], parameter)
}

/// The bias whose gradient the call asks for, and whether the kernel for dQ stores it.
fn wanted<'p>(problem: &'p FlashAttnVarlenBwd<'_>) -> Option<(&'p Bias, bool)> {
    let bias = problem.forward.score.bias.as_ref().filter(|_| problem.dbias.is_some())?;
    Some((bias, main_kernel_stores_it(&problem.forward, bias)))
}

/// The launch before those of the other gradients, which clears dbias where no other kernel stores it, and the launch
/// after them, which computes dbias from the delta, or `ds`, that they have stored. A call has at most one of them.
pub(super) fn launches<'p>(
    problem: &FlashAttnVarlenBwd,
    device: &Device,
    backward: &BackwardParams,
    ds: ScoreGradients,
    parameter: &Parameter<'p>,
) -> Result<[Option<Launch<'p>>; 2]> {
    let Some((bias, main_kernel_stores_it)) = wanted(problem) else { return Ok([None, None]) };
    let dtype = variants::dtype_value(problem.forward.q.dtype);
    if ds.are_summed() {
        let (variant, grid) = (variants::find(SUM_KERNEL, &[dtype])?, SumGrid::of(&problem.forward, bias, device));
        let resources = [DBIAS_SUM_THREADS as u32, 0];
        return Ok([None, launch(SUM_KERNEL, variant, grid.ctas, resources, parameter.clone())?]);
    }
    if main_kernel_stores_it {
        let variant = variants::find(CLEAR_KERNEL, &[])?;
        let ctas = SummingKernel::General.blocks_and_tiles(bias).0;
        return Ok([launch(CLEAR_KERNEL, variant, ctas, [DBIAS_THREADS as u32, 0], parameter.clone())?, None]);
    }
    let kernel = SummingKernel::of(problem, bias, backward);
    let (blocks, tiles) = kernel.blocks_and_tiles(bias);
    let ctas = blocks.saturating_mul(tiles.div_ceil(kernel.tiles_per_cta(&problem.forward, bias, device)));
    let (name, variant, resources) = match kernel {
        SummingKernel::General => {
            (KERNEL, variants::find(KERNEL, &[dtype])?, [DBIAS_THREADS, DBIAS_SHARED_BYTES].map(|x| x as u32))
        }
        SummingKernel::Aligned(head_dim) => {
            let shared_memory = aligned_shared_bytes(aligned_stages(device));
            let variant = variants::find(ALIGNED_KERNEL, &[dtype, head_dim])?;
            (ALIGNED_KERNEL, variant, [ALIGNED_DBIAS_THREADS as u32, shared_memory])
        }
    };
    Ok([None, launch(name, variant, ctas, resources, parameter.clone())?])
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
