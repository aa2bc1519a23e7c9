// Attention of long sequences on Hopper: the prefill shape of attention.cu on wgmma and the copy engine (sm_90a).
//
// A CTA stays on its SM and works on one tile after another (include/hopper/schedule.cuh). One warpgroup fetches
// (include/hopper/load.cuh), the others compute (include/hopper/compute.cuh); shared memory is the pipeline between
// them (include/hopper/pipeline.cuh). docs/kernels.md explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  D and Dv, exactly (include/hopper/shape.cuh)
//   XA_STORAGE   contiguous, paged
//   XA_SCORE     plain, modified (include/score_form.cuh)
// Launch: any number of CTAs of kThreads threads and kSharedBytes of dynamic shared memory, one an SM.

#include "element.cuh"
#include "hopper/compute.cuh"
#include "hopper/load.cuh"
#include "hopper/params.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shape.cuh"
#include "score_form.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Score = xa::XA_PASTE(score_, XA_SCORE);
using Shape = xa::hopper::TileShape<xa::hopper::XA_PASTE(dims_, XA_HEAD_DIM), xa::hopper::Storage::XA_STORAGE, Score>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::hopper::PrefillParams params) {
  extern __shared__ uint8_t shared[];
  const xa::hopper::Pipeline<Shape> pipeline(shared);
  if (threadIdx.x == 0) pipeline.init();
  if (threadIdx.x == 32) {
    for (const auto* map : {&params.q, &params.k, &params.v, &params.out}) xa::hopper::ptx::prefetch(*map);
  }
  __syncthreads();
  const int32_t warp = xa::hopper::uniform(threadIdx.x / 32);
  if (warp >= Shape::kComputeWarps) {
    xa::hopper::ptx::give_up_registers<Shape::kLoaderRegisters>();
    switch (warp - Shape::kComputeWarps) {
      case 0:
        xa::hopper::load_blocks<Shape, xa::hopper::Operand::keys>(params, pipeline);
        break;
      case 1:
        xa::hopper::load_blocks<Shape, xa::hopper::Operand::values>(params, pipeline);
        break;
      case 2:
        xa::hopper::plan_tiles<Shape, Score>(params, pipeline);
        break;
      default: {
        const xa::Overlap overlap = xa::hopper::find_overlap(params.attention);
        if (threadIdx.x % 32 == 0) {
          pipeline.overlap() = overlap;
          pipeline.overlap_known().arrive();
        }
      }
    }
  } else {
    xa::hopper::ptx::take_registers<Shape::kRegisters>();
    xa::hopper::compute_tiles<Shape, T, Score>(params, pipeline);
  }
}
