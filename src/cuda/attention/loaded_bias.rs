//! The bias that Hopper's prefill loads.

use super::split::room;
use crate::cuda::kernel_launch::COUNTER_BYTES;
use crate::cuda::padded_bias::PaddedBias;
use crate::problem::attention::Attention;
use crate::problem::workspace::forward_copies_bias;

/// Alignment of a copied bias: a cache line.
const ALIGNMENT: usize = 128;

/// The call's bias, or its copy in the workspace, after the tile counter. `None` if there is no bias, or none that TMA loads, or if a
/// copy takes longer than is gained.
pub(super) fn loaded_bias(problem: &Attention) -> Option<PaddedBias> {
    let (score, dtype) = (&problem.score, problem.q.dtype);
    let bias = score.bias.as_ref()?;
    let is_shared = bias.is_shared(problem.max_seqs, problem.num_q_heads);
    let is_copied = forward_copies_bias(problem.head_dim.max(problem.value_dim) as i64, is_shared);
    let room = room(problem, COUNTER_BYTES, ALIGNMENT).filter(|_| is_copied);
    let copy = room.filter(|(_, bytes)| *bytes >= PaddedBias::copied_bytes(bias, dtype)).map(|(place, _)| place);
    PaddedBias::new(bias, dtype, copy)
}
