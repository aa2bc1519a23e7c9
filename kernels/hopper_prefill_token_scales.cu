// Attention of long sequences on Hopper, as hopper_prefill_8bit.cu, over pages of int8 or e4m3fn whose rows have scales
// (include/hopper/token_scales.cuh).
//
// Compiled once for each combination of
//   XA_HEAD_DIM  D and Dv, exactly, with "_token_scales"
// Launch: as hopper_prefill.

#include "element.cuh"
#include "hopper/prefill.cuh"
#include "hopper/row_scaled_logits.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shape.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using Config = xa::tiles::HopperPrefill<2, xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::logits_row_scaled>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::contiguous>;
static_assert(Shape::kConvertsKv && Shape::kHasTokenScales);
// Two more copies of the code of a block would spill.
constexpr bool kHasOneStep = true;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::HopperTokenScaleParams params) {
  extern __shared__ uint8_t shared[];
  xa::hopper::prefill<Shape, xa::F16, xa::hopper::logits_row_scaled, kHasOneStep>(
      params.prefill, xa::hopper::InitialTiles::one_per_cta(), shared);
}
