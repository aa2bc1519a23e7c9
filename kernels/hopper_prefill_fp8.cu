// Attention of long sequences on Hopper with wgmma of e4m3fn q, K and V, and weights in e4m3fn. It has the parts of
// hopper_prefill.cu and warps that transpose V. docs/dev/kernels/hopper_prefill_fp8.md explains the design.
//
// Compiled once for each combination of
//   XA_HEAD_DIM  D and Dv, exactly
//   XA_STORAGE   contiguous, paged
//   XA_LOGITS    scaled, softcap_alibi (include/hopper/fp8_logits_transform.cuh)
// Launch: any number of CTAs of kThreads threads with kSharedBytes of dynamic shared memory, one per SM.

#include "element.cuh"
#include "hopper/fp8_compute.cuh"
#include "hopper/fp8_logits_transform.cuh"
#include "hopper/fp8_shape.cuh"
#include "hopper/load.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/schedule.cuh"
#include "hopper/transpose.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using LogitsTransform = xa::hopper::XA_PASTE(fp8_logits_, XA_LOGITS);
using Config =
    xa::tiles::HopperPrefill<1, xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
using Shape = xa::hopper::Fp8PrefillShape<Config, xa::hopper::Storage::XA_STORAGE>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperPrefillParams params) {
  extern __shared__ uint8_t shared[];
  const xa::hopper::Pipeline<Shape> pipeline(shared);
  if (threadIdx.x == 0) pipeline.init();
  __syncthreads();
  const int32_t warp = xa::hopper::uniform(threadIdx.x / 32);
  if (warp >= Shape::kComputeWarps) {
    xa::hopper::ptx::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
    switch (warp - Shape::kComputeWarps) {
      case 0:
        xa::hopper::load_blocks<Shape, xa::hopper::Operand::keys>(params, pipeline);
        break;
      case 1:
        xa::hopper::transpose_blocks<Shape, 0>(params, pipeline);
        break;
      case 2:
        xa::hopper::schedule_tiles<Shape, LogitsTransform>(params, pipeline, xa::hopper::InitialTiles::one_per_cta());
        break;
      default: {
        const bool ascend = xa::hopper::query_starts_ascend(params.attention);
        if (threadIdx.x % 32 == 0) {
          pipeline.starts_ascend() = ascend;
          pipeline.starts_checked().arrive();
        }
        xa::hopper::transpose_blocks<Shape, 1>(params, pipeline);
      }
    }
  } else {
    xa::hopper::ptx::warpgroup_reg_alloc<Shape::kRegisters>();
    xa::hopper::compute_fp8_tiles<Shape, LogitsTransform>(params, pipeline);
  }
}
