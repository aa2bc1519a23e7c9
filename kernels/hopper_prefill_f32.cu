// Attention of long sequences of f32 on Hopper with wgmma of bf16 parts. It has the scheduler, masks, softmax and
// epilogue of hopper_prefill.cu; include/hopper/f32_load.cuh and f32_compute.cuh are its own.
// docs/dev/kernels/hopper_prefill_f32.md explains the design.
//
// Compiled once for each combination of
//   XA_HEAD_DIM  the bucket: D and Dv up to it are padded with zeros in shared memory
//   XA_LOGITS    none, softcap_alibi (include/logits_transform.cuh)
// Launch: any number of CTAs of kThreads threads with kSharedBytes of dynamic shared memory, one per SM.

#include "element.cuh"
#include "hopper/f32_compute.cuh"
#include "hopper/f32_load.cuh"
#include "hopper/f32_shape.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/schedule.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using LogitsTransform = xa::XA_PASTE(logits_, XA_LOGITS);
using Config =
    xa::tiles::HopperPrefill<4, xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
using Shape = xa::hopper::F32PrefillShape<Config>;
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
      case 1:
        xa::hopper::F32Loader<Shape>(params, pipeline, warp - Shape::kComputeWarps).run();
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
      }
    }
  } else {
    xa::hopper::ptx::warpgroup_reg_alloc<Shape::kRegisters>();
    xa::hopper::compute_f32_tiles<Shape, LogitsTransform>(params, pipeline);
  }
}
