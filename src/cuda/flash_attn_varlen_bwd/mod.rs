//! Gradients of attention on CUDA: which kernels a call runs, and their parameters. `docs/dev/kernels/hopper_backward.md`
//! and `portable_backward.md` explain the kernels.
//!
//! All strategies write each element of the results once, or add contributions in an order that depends on shapes and
//! lengths only, so that every run gives the same bits.

mod bias;
mod deferred;
mod head_splits;
mod hopper;
mod hopper_bias;
mod hopper_wide;
mod key_ranges;
mod portable;
mod row_blocks;
mod score_gradients;
mod sum_grid;
mod tensor_maps;

use super::attention::params::{check_dense, check_rows};
use super::device::Device;
use super::enqueue::LaunchConfig;
use super::kernel_launch;
use super::params::attention::AttentionParams;
use super::params::attention_bwd::BackwardParams;
use super::params::attention_bwd_sinks::SINKS_THREADS;
use super::params::bias::{BiasBackwardParams, CopyRowsParams};
use super::params::hopper_bwd::{
    CombineGradientsParams, HopperBackwardParams, HopperBiasBackwardParams, HopperDbiasParams,
    HopperKeyRangeBackwardParams, HopperWideBackwardParams,
};
use super::params::key_ranges::KeyRangeBackwardParams;
use super::variants;
use crate::error::Result;
use crate::problem::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::stream::Stream;
use deferred::DeferredParams;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::rc::Rc;

const SINKS_KERNEL: &str = "attention_bwd_sinks";

/// Whether the gradients are f32 and the operands are not.
fn widens_gradients(problem: &FlashAttnVarlenBwd) -> bool {
    problem.dq.dtype != problem.forward.q.dtype
}

impl BackwardParams {
    /// `delta` is memory for one f32 per query row and head, or null.
    fn new(problem: &FlashAttnVarlenBwd, device: &Device, delta: *mut f32) -> Result<Self> {
        let forward = AttentionParams::new(&problem.forward, device)?;
        for (name, tensor) in [("dout", &problem.dout), ("dq", &problem.dq), ("dk", &problem.dk), ("dv", &problem.dv)] {
            check_rows(name, tensor)?;
        }
        Ok(Self {
            forward,
            dout: problem.dout.data.cast(),
            dout_token_stride: problem.dout.stride(0),
            dout_head_stride: problem.dout.stride(1),
            dlse: problem.dlse.unwrap_or(null()),
            dq: problem.dq.data.cast(),
            dk: problem.dk.data.cast(),
            dv: problem.dv.data.cast(),
            dsinks: problem.dsinks.unwrap_or(null_mut()),
            delta,
            softmax_scale: problem.forward.score.softmax_scale,
            widens_gradients: i32::from(widens_gradients(problem)),
        })
    }
}

/// The parameter of a launch, by strategy.
#[derive(Clone)]
enum Parameter<'p> {
    Portable(Rc<BackwardParams>),
    KeyRanges(Rc<KeyRangeBackwardParams>),
    Bias(Rc<BiasBackwardParams>),
    CopyRows(CopyRowsParams),
    Hopper(Rc<DeferredParams<'p, HopperBackwardParams>>),
    HopperBias(Rc<DeferredParams<'p, HopperBiasBackwardParams>>),
    HopperDbias(Rc<DeferredParams<'p, HopperDbiasParams>>),
    HopperKeyRanges(Rc<DeferredParams<'p, HopperKeyRangeBackwardParams>>),
    HopperWide(Rc<DeferredParams<'p, HopperWideBackwardParams>>),
    CombineGradients(CombineGradientsParams),
}

impl kernel_launch::Parameter for Parameter<'_> {
    fn pass(&self, enqueue: impl FnOnce(*const c_void) -> Result) -> Result {
        match self {
            Self::Portable(params) => params.pass(enqueue),
            Self::KeyRanges(params) => params.pass(enqueue),
            Self::Bias(params) => params.pass(enqueue),
            Self::CopyRows(params) => params.pass(enqueue),
            Self::Hopper(params) => params.as_ref().as_ref().map_err(Clone::clone)?.pass(enqueue),
            Self::HopperBias(params) => params.as_ref().as_ref().map_err(Clone::clone)?.pass(enqueue),
            Self::HopperDbias(params) => params.as_ref().as_ref().map_err(Clone::clone)?.pass(enqueue),
            Self::HopperKeyRanges(params) => params.as_ref().as_ref().map_err(Clone::clone)?.pass(enqueue),
            Self::HopperWide(params) => params.as_ref().as_ref().map_err(Clone::clone)?.pass(enqueue),
            Self::CombineGradients(params) => params.pass(enqueue),
        }
    }
}

type Launch<'p> = kernel_launch::Launch<Parameter<'p>>;

/// Returns the launches of a call, or `None` to leave it to the strategies after it, as the strategies of
/// [`attention`](super::attention) do.
type Strategy = for<'p> fn(&'p FlashAttnVarlenBwd, Device) -> Result<Option<Vec<Launch<'p>>>>;

/// In the order in which they are tried.
const STRATEGIES: [Strategy; 3] = [hopper::launches, hopper_wide::launches, portable::launches];

fn launches<'p>(problem: &'p FlashAttnVarlenBwd) -> Result<Vec<Launch<'p>>> {
    if let Some(dbias) = &problem.dbias {
        check_dense("dbias", dbias.data, dbias.dtype.size())?;
    }
    let device = Device::current()?;
    for strategy in STRATEGIES {
        if let Some(launches) = strategy(problem, device)? {
            return Ok(launches);
        }
    }
    unreachable!("the portable strategy takes every call")
}

/// The launch that computes the sinks' gradients, if the call asks for them; it runs last. Every parameter begins with the
/// [`BackwardParams`] that its kernel reads.
fn sinks<'p>(problem: &FlashAttnVarlenBwd, parameter: Parameter<'p>) -> Result<Option<Launch<'p>>> {
    if problem.dsinks.is_none() {
        return Ok(None);
    }
    let variant = variants::find(SINKS_KERNEL, &[variants::dtype_value(problem.forward.q.dtype)])?;
    let grid = [problem.forward.num_q_heads as u32, 1, 1];
    let config = LaunchConfig { grid, threads: SINKS_THREADS as u32, shared_memory: 0 };
    Ok(Some(Launch::new(SINKS_KERNEL, variant, config, parameter)))
}

/// Loads the kernels that [`launch`] runs.
pub(crate) fn prepare(problem: &FlashAttnVarlenBwd) -> Result {
    launches(problem)?.iter().try_for_each(kernel_launch::Launch::load)
}

/// # Safety
/// The problem's tensors are device memory of the current context that stays valid until the kernels have finished, and the
/// results are writable.
pub(crate) unsafe fn launch(problem: &FlashAttnVarlenBwd, stream: Stream) -> Result {
    // SAFETY: each strategy pairs a kernel with a parameter of the type that it reads, made from the problem, whose memory
    // is valid by this function's contract.
    launches(problem)?.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
}
