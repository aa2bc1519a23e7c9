// Attention of rows that have masks of their own, bounds of their keys (`k_start`, `k_end`) or a tree among their
// newest keys (`tree_mask`), over pages on Hopper, as hopper_split_kv.cu. Only blocks of keys that not all rows of a
// tile attend to read the masks.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket of D and Dv, with "_row_masks" (include/hopper/shape.cuh)
// Launch: as hopper_split_kv.

#include "element.cuh"
#include "hopper/shape.cuh"
#include "hopper/split_kv_prefill.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Config = xa::tiles::HopperPrefill<sizeof(T), xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::logits_none>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::paged>;
static_assert(Shape::kTakesRowMasks);
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperRowMaskParams params) {
  extern __shared__ uint8_t shared[];
  xa::hopper::split_kv<Shape, T, xa::logits_none>(params.prefill, shared);
}
