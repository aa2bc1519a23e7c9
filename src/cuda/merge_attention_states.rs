//! `merge_attention_states` on CUDA: a thread computes 16 bytes of the output at a time.

use super::chunk::{self, CHUNK, Divisor, aligned_to};
use super::enqueue::LaunchConfig;
use super::kernel_launch::Launch;
use super::params::merge_attention_states::{AttentionState, MERGE_STATES_THREADS, MergeStatesParams};
use super::variants;
use crate::error::Result;
use crate::problem::merge_attention_states::{MergeAttentionStates, State};
use crate::stream::Stream;
use crate::tensor::Tensor;

const KERNEL: &str = "merge_attention_states";
/// Vectors per CTA of a large call: eight per thread.
const CTA_VECTORS: u32 = 8 * MERGE_STATES_THREADS;
/// A call is large if it has at least this number of CTAs of that size.
const LARGE_CALL_CTAS: u64 = 1024;
/// Maximum CTAs per row: the limit of the grid's second dimension.
const MAX_CTAS_PER_ROW: u32 = 65535;

fn state(state: &State) -> AttentionState {
    let out = &state.out;
    AttentionState { out: out.data.cast(), row_stride: out.stride(0), head_stride: out.stride(1), lse: state.lse }
}

/// Whether the heads of `[n, h, d]` are multiples of 16 bytes and aligned to 16 bytes.
fn is_aligned(out: &Tensor) -> bool {
    let size = out.dtype.size() as i64;
    aligned_to(CHUNK, &[out.data as i64, out.stride(0) * size, out.stride(1) * size, out.dims[2] * size])
}

/// The launch; `None` if there is no element.
fn plan(problem: &MergeAttentionStates) -> Result<Option<Launch<MergeStatesParams>>> {
    if problem.is_empty() {
        return Ok(None);
    }
    let variant = variants::find(KERNEL, &[variants::dtype_value(problem.out.dtype)])?;
    let aligned = [&problem.a.out, &problem.b.out, &problem.out].into_iter().all(is_aligned);
    let head_vectors = problem.head_dim as u32 / chunk::elements(problem.out.dtype, aligned);
    let row_vectors = problem.num_heads as u32 * head_vectors;
    let vectors = problem.num_rows as u64 * u64::from(row_vectors);
    // In a large call, CTAs with a loop amortize their start. A small call is spread over as many SMs as possible.
    let cta_vectors =
        if vectors >= LARGE_CALL_CTAS * u64::from(CTA_VECTORS) { CTA_VECTORS } else { MERGE_STATES_THREADS };
    let cta_rows = (cta_vectors / row_vectors).max(1);
    let row_ctas = if cta_rows > 1 { 1 } else { row_vectors.div_ceil(cta_vectors).min(MAX_CTAS_PER_ROW) };
    let config = LaunchConfig {
        grid: [(problem.num_rows as u32).div_ceil(cta_rows), row_ctas, 1],
        threads: MERGE_STATES_THREADS,
        shared_memory: 0,
    };
    let params = MergeStatesParams {
        a: state(&problem.a),
        b: state(&problem.b),
        out: problem.out.data.cast(),
        lse: problem.lse,
        num_rows: problem.num_rows as i64,
        num_heads: problem.num_heads as i32,
        head_dim: problem.head_dim as i32,
        aligned: i32::from(aligned),
        cta_rows: cta_rows as i32,
        row_vectors: Divisor::new(row_vectors, u64::from(cta_rows) * u64::from(row_vectors)),
        head_vectors: Divisor::new(head_vectors, u64::from(row_vectors)),
    };
    Ok(Some(Launch::new(KERNEL, variant, config, params)))
}

/// Loads the kernel that [`launch`] enqueues.
pub(crate) fn prepare(problem: &MergeAttentionStates) -> Result {
    plan(problem)?.iter().try_for_each(Launch::load)
}

/// # Safety
/// The problem's views are device memory of the current context that outlives the kernel's run, the results writable.
pub(crate) unsafe fn launch(problem: &MergeAttentionStates, stream: Stream) -> Result {
    // SAFETY: `MergeStatesParams` is the kernel's parameter; the caller guarantees that its memory is valid.
    plan(problem)?.iter().try_for_each(|launch| unsafe { launch.enqueue(stream) })
}
