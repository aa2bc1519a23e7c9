// The gradients of attention on Hopper up to 128 columns, on wgmma and TMA (sm_90a). hopper_bwd_prepare.cu runs first.
// docs/dev/kernels/hopper_backward.md explains the design.
//
// CTAs are persistent and take one block of keys after another (include/hopper_bwd/schedule.cuh). In the first
// warpgroup two warps load (load.cuh) and two accumulate dQ (dq_accumulate.cuh); the two other warpgroups compute
// (compute.cuh) and, when no tile is left, round dQ (finish.cuh). They communicate through pipeline.cuh.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket: D and Dv up to it are padded with zeros in shared memory
//   XA_LOGITS    none, softcap, alibi; none, and rows have bounds of their keys (key_ranges.cuh) or scores a bias of
//                the operands' type or of f32 (bias.cuh): key_ranges, bias, bias_f32
// Launch: any number of CTAs of kThreads threads and kSharedBytes of dynamic shared memory, one per SM.

#include <type_traits>

#include "element.cuh"
#include "hopper_bwd/compute.cuh"
#include "hopper_bwd/dq_accumulate.cuh"
#include "hopper_bwd/finish.cuh"
#include "hopper_bwd/load.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape = xa::hopper::BackwardShape<XA_HEAD_DIM, xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
using Params =
    std::conditional_t<Shape::kHasKeyRanges, xa::HopperKeyRangeBackwardParams,
                       std::conditional_t<Shape::kHasBias, xa::HopperBiasBackwardParams, xa::HopperBackwardParams>>;

/// What the parameters of all variants begin with.
template <typename P>
__device__ __forceinline__ const xa::HopperBackwardParams& common_params(const P& params) {
  if constexpr (std::is_same_v<P, xa::HopperBackwardParams>) {
    return params;
  } else {
    return params.common;
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ Params kernel_params) {
  using namespace xa::hopper;
  const xa::HopperBackwardParams& params = common_params(kernel_params);
  extern __shared__ __align__(1024) uint8_t shared[];
  const BackwardPipeline<Shape> pipeline(shared);
  if (threadIdx.x == 0) pipeline.init();
  if (threadIdx.x == 32) {
    for (const auto* map : {&params.q, &params.k, &params.v, &params.dout}) ptx::prefetch_tensormap(*map);
    if constexpr (Shape::kHasBias) ptx::prefetch_tensormap(with_bias(params).bias);
  }
  // The last CTAs of hopper_bwd_prepare may still run.
  ptx::wait_for_previous_kernel();
  // hopper_bwd_dbias needs what that kernel has stored, and SMs.
  ptx::launch_dependents();
  __syncthreads();
  const int32_t warp = uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::warpgroup_reg_dealloc<Shape::kProducerRegisters>();
    if (warp == 0) {
      load_tiles<Shape, BackwardLoad::keys>(params, pipeline);
    } else if (warp == 1) {
      if constexpr (Shape::kHasBias) {
        load_values_and_bias<Shape>(params, pipeline);
      } else {
        load_tiles<Shape, BackwardLoad::values>(params, pipeline);
      }
    } else if (threadIdx.x % 32 == 0) {
      accumulate_dq<Shape>(params, pipeline, warp - 2);
    }
  } else {
    ptx::warpgroup_reg_alloc<Shape::kComputeRegisters>();
    compute_tiles<Shape, T>(params, pipeline, warp / 4 - 1);
    process_finish_items<Shape, T>(params);
  }
}
