//! `simple_add` on CUDA: one thread per 16 bytes of the output.

use super::enqueue::LaunchConfig;
use super::kernel_launch::Launch;
use super::params::simple_add::SimpleAddParams;
use super::variants;
use crate::error::Result;
use crate::problem::simple_add::SimpleAdd;
use crate::stream::Stream;

const THREADS: u32 = 256;

const KERNEL: &str = "simple_add";

/// The launch; `None` if there is no element.
fn plan(problem: &SimpleAdd) -> Result<Option<Launch<SimpleAddParams>>> {
    let n = problem.out.len();
    if n == 0 {
        return Ok(None);
    }
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.a.dtype)])?;
    let blocks = (n * problem.a.dtype.size()).div_ceil(16 * THREADS as usize);
    // The kernel has a grid-stride loop for outputs beyond the limit of the grid.
    let config =
        LaunchConfig { grid: [blocks.min(i32::MAX as usize) as u32, 1, 1], threads: THREADS, shared_memory: 0 };
    let (a, b, out) = (problem.a.data.cast(), problem.b.data.cast(), problem.out.data.cast());
    Ok(Some(Launch::new(KERNEL, variant, config, SimpleAddParams { a, b, out, n: n as i64 })))
}

/// Loads the kernel that [`launch`] enqueues.
pub(crate) fn prepare(problem: &SimpleAdd) -> Result {
    plan(problem)?.iter().try_for_each(Launch::load)
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, `out` writable.
pub(crate) unsafe fn launch(problem: &SimpleAdd, stream: Stream) -> Result {
    // SAFETY: `SimpleAddParams` is the kernel's parameter; the caller guarantees that its memory is valid.
    plan(problem)?.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
}
