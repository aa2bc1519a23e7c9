// A CTA of hopper_split_kv: prefill's pipeline over the work range of a decode launch (../work_partition.cuh). What a
// CTA has of a split tile goes to the workspace, and the combine kernel merges it.
#pragma once

#include <cstdint>

#include "hopper/compute.cuh"
#include "hopper/convert_kv.cuh"
#include "hopper/load.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/schedule.cuh"
#include "hopper/token_scales.cuh"
#include "padding_rows.cuh"
#include "params/hopper_prefill.cuh"
#include "partial_rows.cuh"
#include "scales.cuh"
#include "sequence_work.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

template <typename Shape>
using SplitKvUnit = WorkUnit<Shape::kRows, Shape::kKeys, TileEnd::kQuery>;

/// The scheduler warp: writes the work tiles of the CTA's range, the current one first, then one without rows.
template <typename Shape>
__device__ __forceinline__ void schedule_work_range(const HopperPrefillParams& prefill, const Pipeline<Shape>& pipeline,
                                                    WorkTile& work, WorkRange& range, int32_t range_index) {
  const AttentionParams& attention = prefill.attention;
  const WorkRangeIterator<SplitKvUnit<Shape>> iterator(attention, work, range, range_index);
  const int32_t lane = threadIdx.x % 32;
  const float value_factor = attention.value_factor * scale_of(attention.v_scale, work.kv_head);
  int32_t rows = 1;
#pragma unroll 1
  for (int32_t count = 0; rows > 0; ++count) {
    const PipelineState<2> state(count);
    if (count > 0 || !range.has_split()) iterator.next(lane);
    pipeline.tile_empty(state).producer_wait();
    // So that no lane misses the phase: the next one ends after lane 0 has arrived below.
    __syncwarp();
    rows = work.tile.num_rows;
    if (lane == 0) {
      SplitKvTile& tile = pipeline.tile(state);
      const Visibility visibility(attention, work.tile);
      const int32_t first_row = work.tile.first_row;
      const int32_t first_query = first_row > 0 ? first_row / attention.group : 0;
      copy_work(tile.work, work);
      tile.work.tile.first_token += first_query;
      tile.work.tile.first_row = 0;
      tile.shift = visibility.shift + first_query;
      tile.visible_begin = visibility.begin(0);
      tile.visible_end = visibility.end(work.tile.len_q - 1);
      tile.first_block = work.keys.begin / Shape::kKeys;
      tile.end_block = (work.keys.end + Shape::kKeys - 1) / Shape::kKeys;
      tile.value_factor = value_factor;
      tile.partial_row = range.partial_row;
      pipeline.tile_full(state).arrive();
    }
    __syncwarp();
  }
}

/// Computes the CTA's work range of KV head blockIdx.x. Every thread of the CTA calls this, and the kernel must
/// end with it, because setmaxnreg moves registers from the load warpgroup to the compute warpgroups.
template <typename Shape, typename T, typename LogitsTransform>
__device__ __forceinline__ void split_kv(const HopperPrefillParams& prefill, uint8_t* shared) {
  const AttentionParams& attention = prefill.attention;
  const Pipeline<Shape> pipeline(shared);
  WorkTile& work = pipeline.work_tile();
  WorkRange& range = pipeline.work_range();
  if (threadIdx.x == 32) {
    for (const auto* map : {&prefill.q, &prefill.k, &prefill.v}) ptx::prefetch_tensormap(*map);
  }
  if (threadIdx.x == 64) pipeline.init(loads_by_cp_async<Shape>(prefill));
  const WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
  init_work_tile<LogitsTransform>(attention, work, blockIdx.x);
  partition_work<Shape::kThreads, SplitKvUnit<Shape>, false>(attention, work, range, index);
  const int32_t warp = uniform(threadIdx.x / 32);
  if (Shape::kConvertsKv && warp >= Shape::kComputeWarps + 4) {
    run_converter_warp<Shape>(prefill, pipeline, warp);
  } else if (warp >= Shape::kComputeWarps) {
    ptx::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
    switch (warp - Shape::kComputeWarps) {
      case 0:
      case 1:
        load_blocks<Shape>(prefill, pipeline, warp - Shape::kComputeWarps);
        break;
      case 2:
        schedule_work_range<Shape>(prefill, pipeline, work, range, index.index);
        break;
      default:
        if constexpr (Shape::kHasTokenScales) {
          load_token_scales<Shape>(prefill, pipeline);
        } else {
          publish_rows<Shape>(prefill, pipeline);
        }
        break;
    }
  } else {
    ptx::warpgroup_reg_alloc<Shape::kRegisters>();
    // While the first blocks are on their way.
    store_split_record<Shape::kRows>(attention, work, range, index.index);
    __syncwarp();
    // As in hopper_prefill_8bit.cu and hopper_prefill_token_scales.cu.
    constexpr bool kHasOneStep = Shape::kHasTokenScales || (Shape::kConvertsKv && Shape::kHeadDim > 128);
    compute_tiles<Shape, T, LogitsTransform, kHasOneStep>(prefill, pipeline);
    clear_padding_rows<T, Shape::kComputeThreads>(attention, work, range);
  }
}

}  // namespace xa::hopper
