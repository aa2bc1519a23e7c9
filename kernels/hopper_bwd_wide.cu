// The gradients of attention on Hopper past 128 columns, on wgmma and TMA (sm_90a). One variant computes dK and dV, one
// dQ, and no CTA adds to the results of another one. hopper_bwd_prepare.cu runs first, and hopper_bwd_finish.cu clears
// the rows that belong to no sequence. docs/dev/kernels/hopper_backward.md explains the design.
//
// CTAs are persistent and take one tile after another. In the first warpgroup two warps load
// (include/hopper_bwd/wide_load.cuh); the two other warpgroups compute (wide_dkdv.cuh, wide_dq.cuh).
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_GRADIENT  dkdv, dq
//   XA_HEAD_DIM  the bucket: D and Dv up to it are padded with zeros in shared memory
//   XA_LOGITS    none, softcap, alibi
// Launch: any number of CTAs of kThreads threads and kSharedBytes of dynamic shared memory, one per SM.

#include "element.cuh"
#include "hopper_bwd/wide_dkdv.cuh"
#include "hopper_bwd/wide_dq.cuh"
#include "hopper_bwd/wide_load.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "params/hopper_bwd.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape =
    xa::hopper::WideShape<xa::tiles::XA_PASTE(gradient_, XA_GRADIENT), xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM),
                          xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperWideBackwardParams params) {
  using namespace xa::hopper;
  extern __shared__ __align__(1024) uint8_t shared[];
  const WidePipeline<Shape> pipeline(shared);
  if (threadIdx.x == 0) pipeline.init();
  __syncthreads();
  const int32_t warp = uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::warpgroup_reg_dealloc<24>();
    if (warp == 0) {
      load_wide_tiles<Shape, false>(params, pipeline);
    } else if (warp == 1) {
      load_wide_tiles<Shape, true>(params, pipeline);
    }
  } else {
    ptx::warpgroup_reg_alloc<240>();
    if constexpr (Shape::kComputesDkDv) {
      if (warp < 8) {
        compute_dv<Shape, T>(params.common, pipeline);
      } else {
        compute_dk<Shape, T>(params.common, pipeline);
      }
    } else {
      compute_dq<Shape, T>(params.common, pipeline, warp / 4 - 1);
    }
  }
}
