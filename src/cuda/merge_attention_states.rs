//! Merging attention states on CUDA: a thread takes 16 bytes of the output at a time.

use super::chunk::{self, CHUNK, Divisor, aligned_to};
use super::kernel::Launch;
use super::launch::Shape;
use super::params::merge_attention_states::{AttentionState, MERGE_STATES_THREADS, MergeParams};
use super::variants;
use crate::error::Result;
use crate::problem::merge_attention_states::{MergeAttentionStates, State};
use crate::stream::Stream;
use crate::tensor::Tensor;

const KERNEL: &str = "merge_attention_states";
/// Pieces that a CTA takes where there are enough of them, and how many CTAs are enough.
const CTA_ITEMS: u32 = 8 * MERGE_STATES_THREADS;
const ENOUGH_CTAS: u64 = 1024;
/// CTAs that may share a row: the limit of the grid's second dimension.
const MOST_SHARES: u32 = 65535;

fn state(state: &State) -> AttentionState {
    let out = &state.out;
    AttentionState { out: out.data.cast(), row_stride: out.stride(0), head_stride: out.stride(1), lse: state.lse }
}

/// Heads of `[n, h, d]` consist of chunks and are aligned to them.
fn is_aligned(out: &Tensor) -> bool {
    let size = out.dtype.size() as i64;
    aligned_to(CHUNK, &[out.data as i64, out.stride(0) * size, out.stride(1) * size, out.dims[2] * size])
}

/// `None` where there is no element.
fn plan(problem: &MergeAttentionStates) -> Result<Option<Launch<MergeParams>>> {
    if problem.is_empty() {
        return Ok(None);
    }
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.out.dtype)])?;
    let aligned = [&problem.a.out, &problem.b.out, &problem.out].into_iter().all(is_aligned);
    let head_items = problem.head_dim as u32 / chunk::elements(problem.out.dtype, aligned);
    let row_items = problem.num_heads as u32 * head_items;
    let items = problem.num_rows as u64 * u64::from(row_items);
    // A long CTA spends less of its time starting; short ones bring a few rows to every SM.
    let cta_items = if items >= ENOUGH_CTAS * u64::from(CTA_ITEMS) { CTA_ITEMS } else { MERGE_STATES_THREADS };
    let cta_rows = (cta_items / row_items).max(1);
    let shares = if cta_rows > 1 { 1 } else { row_items.div_ceil(cta_items).min(MOST_SHARES) };
    let shape = Shape {
        grid: [(problem.num_rows as u32).div_ceil(cta_rows), shares, 1],
        threads: MERGE_STATES_THREADS,
        shared_memory: 0,
    };
    let params = MergeParams {
        a: state(&problem.a),
        b: state(&problem.b),
        out: problem.out.data.cast(),
        lse: problem.lse,
        num_rows: problem.num_rows as i64,
        num_heads: problem.num_heads as i32,
        head_dim: problem.head_dim as i32,
        aligned: i32::from(aligned),
        cta_rows: cta_rows as i32,
        row_items: Divisor::new(row_items, u64::from(cta_rows) * u64::from(row_items)),
        head_items: Divisor::new(head_items, u64::from(row_items)),
    };
    Ok(Some(Launch::new(KERNEL, variant, shape, params)))
}

/// Load the kernel that [`launch`] takes.
pub(crate) fn prepare(problem: &MergeAttentionStates) -> Result {
    plan(problem)?.iter().try_for_each(Launch::load)
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the results writable.
pub(crate) unsafe fn launch(problem: &MergeAttentionStates, stream: Stream) -> Result {
    // SAFETY: `MergeParams` is the kernel's parameter; the caller vouches for the memory.
    plan(problem)?.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
}
