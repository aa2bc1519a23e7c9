// A CTA of Hopper's prefill: which warp does what.
#pragma once

#include <cstdint>

#include "hopper/bias.cuh"
#include "hopper/cluster_ptx.cuh"
#include "hopper/compute.cuh"
#include "hopper/convert_kv.cuh"
#include "hopper/load.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shifted_bias.cuh"
#include "hopper/token_scales.cuh"
#include "params/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Computes work tiles until there are no more. Every thread of the CTA calls this, and the kernel must end with it,
/// because setmaxnreg moves registers from the load warpgroup to the compute warpgroups. kHasOneStep: see
/// compute_tiles.
template <typename Shape, typename T, typename LogitsTransform, bool kHasOneStep = false>
__device__ __forceinline__ void prefill(const HopperPrefillParams& params, const InitialTiles& initial,
                                        uint8_t* shared) {
  const Pipeline<Shape> pipeline(shared);
  if (threadIdx.x == 0) pipeline.init(loads_by_cp_async<Shape>(params));
  if (threadIdx.x == 32) {
    for (const auto* map : {&params.q, &params.k, &params.v, &params.out}) ptx::prefetch_tensormap(*map);
  }
  const int32_t warp = uniform(threadIdx.x / 32);
  TileScheduler<Shape> scheduler(params, pipeline.tile(PipelineState<2>(0)).work.maxima);
  // Beside the initialisation: every other warp waits for the first tile.
  if (warp == Shape::kComputeWarps + 2) scheduler.begin();
  if constexpr (Shape::kClusterSize > 1) {
    // The other CTA arrives at this one's mbarriers, and TMA writes to both.
    __syncwarp();
    xa::ptx::cluster_arrive_relaxed();
    xa::ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  if (Shape::kConvertsKv && warp >= Shape::kComputeWarps + 4) {
    run_converter_warp<Shape>(params, pipeline, warp);
  } else if (warp >= Shape::kComputeWarps) {
    ptx::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
    switch (warp - Shape::kComputeWarps) {
      case 0:
      case 1:
        load_blocks<Shape>(params, pipeline, warp - Shape::kComputeWarps);
        break;
      case 2:
        schedule_tiles<Shape, LogitsTransform>(params, pipeline, initial, scheduler);
        break;
      default: {
        const bool ascend = query_starts_ascend(params.attention);
        if (threadIdx.x % 32 == 0) {
          pipeline.starts_ascend() = ascend;
          pipeline.starts_checked().arrive();
        }
        if constexpr (Shape::kShiftsBias) {
          load_shifted_bias<Shape, BiasElement<Shape, T>>(params, pipeline);
        } else if constexpr (Shape::kHasBias) {
          load_bias<Shape>(params, pipeline);
        } else if constexpr (Shape::kHasTokenScales) {
          load_token_scales<Shape>(params, pipeline);
        }
        publish_rows<Shape>(params, pipeline);
      }
    }
  } else {
    ptx::warpgroup_reg_alloc<Shape::kRegisters>();
    compute_tiles<Shape, T, LogitsTransform, kHasOneStep>(params, pipeline);
  }
  if constexpr (Shape::kClusterSize > 1) {
    // The other CTA may still arrive at mbarriers of this one.
    __syncwarp();
    xa::ptx::cluster_arrive();
    xa::ptx::cluster_wait();
  }
}

}  // namespace xa::hopper
