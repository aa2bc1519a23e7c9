// Attention of few queries per sequence over many keys on Hopper, as hopper_split_kv.cu, over pages of e4m3fn or e5m2
// with 16-bit q, which become f16 as in hopper_prefill_8bit.cu.
//
// Compiled once for each combination of
//   XA_HEAD_DIM  D and Dv, exactly, with "_8bit_split_kv" (include/hopper/shape.cuh)
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
    XA_ENTRY(const __grid_constant__ xa::HopperPrefillParams params) {
  extern __shared__ uint8_t shared[];
  xa::hopper::split_kv<Shape, xa::F16, xa::hopper::logits_row_scaled>(params, shared);
}
