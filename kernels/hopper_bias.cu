// Attention of long sequences on Hopper, as hopper_prefill.cu, whose pairs of rows and keys have a bias
// (include/hopper/bias.cuh). docs/dev/kernels/bias.md explains what differs.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16: of q, K, V, and of the bias unless it is f32
//   XA_HEAD_DIM  the bucket: D and Dv up to it are padded with zeros in shared memory; `_shifted`: for rows of the bias
//                that begin anywhere, and `_f32_bias`: for one of f32 (include/hopper/shifted_bias.cuh)
// Launch: as hopper_prefill.

#include "element.cuh"
#include "hopper/bias.cuh"
#include "hopper/prefill.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shape.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Config = xa::tiles::HopperPrefill<sizeof(T), xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::logits_bias>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::contiguous>;
// Two copies of the code of a block would spill at D 256; at D 64 there is one for another reason (compute.cuh).
constexpr bool kHasOneStep = Shape::kHeadDim > 128;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::HopperBiasParams params) {
  extern __shared__ uint8_t shared[];
  if (!Shape::kShiftsBias && threadIdx.x == 64) xa::hopper::ptx::prefetch_tensormap(params.bias);
  xa::hopper::prefill<Shape, T, xa::hopper::logits_bias, kHasOneStep>(params.prefill,
                                                                      xa::hopper::InitialTiles::one_per_cta(), shared);
}
