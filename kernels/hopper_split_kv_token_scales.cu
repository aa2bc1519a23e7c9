// Attention of few queries per sequence over many keys on Hopper, as hopper_split_kv_8bit.cu, over pages of int8 or
// e4m3fn whose rows have scales (include/hopper/token_scales.cuh).
//
// Compiled once for each combination of
//   XA_HEAD_DIM  D and Dv, exactly, with "_token_scales_split_kv"
// Launch: as hopper_split_kv.

#include "element.cuh"
#include "hopper/row_scaled_logits.cuh"
#include "hopper/shape.cuh"
#include "hopper/split_kv_prefill.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using Config = xa::tiles::HopperPrefill<2, xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::logits_row_scaled>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::contiguous>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperTokenScaleParams params) {
  extern __shared__ uint8_t shared[];
  xa::hopper::split_kv<Shape, xa::F16, xa::hopper::logits_row_scaled>(params.prefill, shared);
}
