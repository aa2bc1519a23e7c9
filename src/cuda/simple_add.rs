//! `out = a + b` on CUDA: one thread for 16 bytes of the output.

use super::launch::{Shape, launch as launch_kernel};
use super::params::simple_add::SimpleAddParams;
use super::{module, variants};
use crate::error::Result;
use crate::log;
use crate::ops::simple_add::SimpleAdd;
use crate::stream::Stream;

const THREADS: u32 = 256;

fn variant(problem: &SimpleAdd) -> Result<usize> {
    variants::find("simple_add", &[variants::dtype_value(problem.a.dtype)])
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &SimpleAdd) -> Result {
    module::function(variant(problem)?).map(|_| ())
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, `out` writable.
pub(crate) unsafe fn launch(problem: &SimpleAdd, stream: Stream) -> Result {
    let n = problem.out.len();
    if n == 0 {
        return Ok(());
    }
    let variant = variant(problem)?;
    let blocks = (n * problem.a.dtype.size()).div_ceil(16 * THREADS as usize);
    // Past the limit of the grid each thread takes several pieces.
    let shape = Shape { grid: [blocks.min(i32::MAX as usize) as u32, 1, 1], threads: THREADS, shared_memory: 0 };
    log::call("simple_add", (variant, shape), || format!("{} with {shape:?}", variants::VARIANTS[variant].name));
    let (a, b, out) = (problem.a.data.cast(), problem.b.data.cast(), problem.out.data.cast());
    let params = SimpleAddParams { a, b, out, n: n as i64 };
    // SAFETY: `SimpleAddParams` is the kernel's parameter; the caller vouches for the memory.
    unsafe { launch_kernel(module::function(variant)?, shape, stream, &params) }
}
