// Attention of long sequences on Hopper, as hopper_prefill.cu, over pages of e4m3fn or e5m2 with 16-bit q. K and V are
// converted to f16 in shared memory (include/hopper/convert_kv.cuh), and so is Q if it is bf16
// (include/hopper/convert_query.cuh). docs/dev/kernels/hopper_prefill_8bit.md explains what differs.
//
// Compiled once for each combination of
//   XA_HEAD_DIM  D and Dv, exactly
//   XA_LOGITS    row_scaled (include/hopper/row_scaled_logits.cuh), softcap_alibi (include/logits_transform.cuh)
// Launch: as hopper_prefill.

#include "element.cuh"
#include "hopper/prefill.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shape.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"

namespace xa::hopper {
// Found here or in xa.
using EightBitLogits = XA_PASTE(logits_, XA_LOGITS);
}  // namespace xa::hopper

namespace {
using Config =
    xa::tiles::HopperPrefill<2, xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::contiguous>;
static_assert(Shape::kConvertsKv);
// Two more copies of the code of a block would spill at D 256.
constexpr bool kHasOneStep = Shape::kHeadDim > 128;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::HopperPrefillParams params) {
  extern __shared__ uint8_t shared[];
  xa::hopper::prefill<Shape, xa::F16, xa::hopper::EightBitLogits, kHasOneStep>(
      params, xa::hopper::InitialTiles::one_per_cta(), shared);
}
