// Attention of long sequences on Hopper, as hopper_prefill.cu, whose query rows have bounds of their keys besides the
// masks (include/hopper/key_range_tile.cuh). docs/dev/kernels/key_ranges.md explains what differs.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket, named key_ranges: D and Dv up to it are padded with zeros in shared memory
// Launch: as hopper_prefill.

#include "element.cuh"
#include "hopper/prefill.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shape.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Config = xa::tiles::HopperPrefill<sizeof(T), xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::logits_none>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::contiguous>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::HopperKeyRangeParams params) {
  extern __shared__ uint8_t shared[];
  if (threadIdx.x < 2) {
    const xa::hopper::Pipeline<Shape> pipeline(shared);
    pipeline.tile(xa::hopper::PipelineState<2>(threadIdx.x)).ranges = params.ranges;
  }
  xa::hopper::prefill<Shape, T, xa::logits_none>(params.prefill, xa::hopper::InitialTiles::one_per_cta(), shared);
}
