//! The bias that Hopper's prefill loads.

use super::split::room;
use crate::cuda::kernel_launch::NEXT_TILE_BYTES;
use crate::cuda::tma_bias::TmaBias;
use crate::problem::attention::Attention;

/// Alignment of a copied bias: a cache line.
const ALIGNMENT: usize = 128;

/// The call's bias, or its copy in the workspace, after the tile counter. `None` if there is no bias, or none that TMA loads.
pub(super) fn loaded_bias(problem: &Attention) -> Option<TmaBias> {
    let (bias, dtype) = (problem.score.bias.as_ref()?, problem.q.dtype);
    let room = room(problem, NEXT_TILE_BYTES, ALIGNMENT);
    let copy = room.filter(|(_, bytes)| *bytes >= TmaBias::copied_bytes(bias, dtype)).map(|(place, _)| place);
    TmaBias::new(bias, dtype, copy)
}
