// The gradients of attention on Hopper past 128 columns, on wgmma and TMA (sm_90a). No CTA adds to the results of
// another one. hopper_bwd_prepare.cu runs first. docs/dev/kernels/hopper_backward.md explains the design.
//
// CTAs are persistent. Each takes tiles of dQ until none is left, and then tiles of dK and dV, which are smaller and so
// leave fewer SMs idle at the end. In the first warpgroup two warps load (include/hopper_bwd/wide_load.cuh); the two
// other warpgroups compute (wide_dq.cuh, wide_dkdv.cuh) and, at last, clear the rows that belong to no sequence
// (finish.cuh).
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket: D and Dv up to it are padded with zeros in shared memory
//   XA_LOGITS    none, softcap, alibi
// Launch: any number of CTAs of kThreads threads, one per SM, and the larger kSharedBytes of both shapes of dynamic
// shared memory.

#include "element.cuh"
#include "hopper_bwd/finish.cuh"
#include "hopper_bwd/wide_dkdv.cuh"
#include "hopper_bwd/wide_dq.cuh"
#include "hopper_bwd/wide_load.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "params/hopper_bwd.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
template <typename Gradient>
using Shape = xa::hopper::WideShape<Gradient, xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM),
                                    xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
using DqShape = Shape<xa::tiles::gradient_dq>;
using DkDvShape = Shape<xa::tiles::gradient_dkdv>;
static_assert(DqShape::kThreads == DkDvShape::kThreads);
}  // namespace

extern "C" __global__ void __launch_bounds__(DqShape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperWideBackwardParams params) {
  using namespace xa::hopper;
  extern __shared__ __align__(1024) uint8_t shared[];
  const WidePipeline<DqShape> dq_pipeline(shared);
  const WidePipeline<DkDvShape> dkdv_pipeline(shared);
  if (threadIdx.x == 0) dq_pipeline.init();
  if (threadIdx.x == 32) {
    for (const auto* map : {&params.q, &params.k, &params.v, &params.dout}) ptx::prefetch_tensormap(*map);
  }
  // The last CTAs of hopper_bwd_prepare may still run.
  ptx::wait_for_previous_kernel();
  __syncthreads();
  // Both pipelines have the same shared memory: the first warpgroup changes them between two barriers of all threads.
  const auto pipeline_barrier = [] { ptx::named_barrier_sync(6, DqShape::kThreads); };
  const int32_t warp = uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::warpgroup_reg_dealloc<24>();
    if (warp == 0) {
      load_wide_tiles<DqShape, false>(params, dq_pipeline);
    } else if (warp == 1) {
      load_wide_tiles<DqShape, true>(params, dq_pipeline);
    }
    pipeline_barrier();
    if (threadIdx.x == 0) {
      dq_pipeline.invalidate();
      dkdv_pipeline.init();
    }
    pipeline_barrier();
    if (warp == 0) {
      load_wide_tiles<DkDvShape, false>(params, dkdv_pipeline);
    } else if (warp == 1) {
      load_wide_tiles<DkDvShape, true>(params, dkdv_pipeline);
    }
  } else {
    ptx::warpgroup_reg_alloc<240>();
    compute_dq<DqShape, T>(params.common, dq_pipeline, warp / 4 - 1);
    pipeline_barrier();
    pipeline_barrier();
    if (warp < 8) {
      compute_dv<DkDvShape, T>(params.common, dkdv_pipeline);
    } else {
      compute_dk<DkDvShape, T>(params.common, dkdv_pipeline);
    }
    process_finish_items<DkDvShape, T>(params.common);
  }
}
