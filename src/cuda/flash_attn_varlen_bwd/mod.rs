//! Gradients of attention on CUDA: which kernels a call takes, and with what argument. `docs/kernels.md` explains them.
//!
//! Whichever they are, each element of the results is written once, or summed in an order that follows from shapes and
//! lengths alone: two runs give the same bits.

mod hopper;
mod portable;

use super::attention::params::check_rows;
use super::device::Device;
use super::launch::{Shape, launch as launch_kernel};
use super::params::attention::AttentionParams;
use super::params::attention_bwd::BackwardParams;
use super::params::attention_bwd_sinks::SINKS_THREADS;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::ops::flash_attn_varlen_bwd::FlashAttnVarlenBwd;
use crate::stream::Stream;
use hopper::Hopper;
use std::ptr::{null, null_mut};

const SINKS_KERNEL: &str = "attention_bwd_sinks";

impl BackwardParams {
    /// With room for a number a query row of each head at `delta`, or null.
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
            reserved: 0,
        })
    }
}

/// One kernel launch.
#[derive(Clone, Copy, Debug)]
struct Launch {
    kernel: &'static str,
    variant: usize,
    shape: Shape,
}

impl Launch {
    /// The launch that makes the sinks' gradients, if they are wanted.
    fn sinks(problem: &FlashAttnVarlenBwd) -> Result<Option<Self>> {
        if problem.dsinks.is_none() {
            return Ok(None);
        }
        let variant = variants::find(SINKS_KERNEL, &[variants::dtype_value(problem.forward.q.dtype)])?;
        let grid = [problem.forward.num_q_heads as u32, 1, 1];
        let shape = Shape { grid, threads: SINKS_THREADS as u32, shared_memory: 0 };
        Ok(Some(Self { kernel: SINKS_KERNEL, variant, shape }))
    }
}

/// Load the kernels that [`launch`] takes.
pub(crate) fn prepare(problem: &FlashAttnVarlenBwd) -> Result {
    let device = Device::current()?;
    BackwardParams::new(problem, &device, null_mut())?;
    let launches = match Hopper::of(problem, &device) {
        Some(hopper) => hopper.launches(problem, &device)?,
        None => portable::launches(problem, &device)?,
    };
    for launch in launches.into_iter().chain(Launch::sinks(problem)?) {
        module::function(launch.variant)?;
    }
    Ok(())
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernels' run, the results writable.
pub(crate) unsafe fn launch(problem: &FlashAttnVarlenBwd, stream: Stream) -> Result {
    let device = Device::current()?;
    // SAFETY: each strategy's parameter is that of its kernels, and begins with what the sinks' kernel takes; the caller
    // vouches for the memory.
    unsafe {
        if let Some(hopper) = Hopper::of(problem, &device) {
            let base = BackwardParams::new(problem, &device, hopper.delta())?;
            let params = hopper.params(problem, &base)?;
            enqueue(hopper.launches(problem, &device)?, Launch::sinks(problem)?, &params, stream)
        } else {
            let params = BackwardParams::new(problem, &device, portable::delta(problem))?;
            enqueue(portable::launches(problem, &device)?, Launch::sinks(problem)?, &params, stream)
        }
    }
}

/// Enqueue `launches`, and after them that of the sinks' gradients.
///
/// # Safety
/// `params` is the parameter of all of them; as [`launch`].
unsafe fn enqueue<P>(launches: Vec<Launch>, sinks: Option<Launch>, params: &P, stream: Stream) -> Result {
    for Launch { kernel, variant, shape } in launches.into_iter().chain(sinks) {
        log::call(kernel, (variant, shape), || format!("{} with {shape:?}", variants::VARIANTS[variant].name));
        // SAFETY: this function's contract.
        unsafe { launch_kernel(module::function(variant)?, shape, stream, params) }?;
    }
    Ok(())
}
