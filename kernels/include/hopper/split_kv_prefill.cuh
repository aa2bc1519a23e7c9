// A CTA of hopper_split_kv: prefill's pipeline over the work range of a decode launch (../work_partition.cuh). What a
// CTA has of a split tile goes to the workspace, and the combine kernel merges it.
#pragma once

#include <climits>
#include <cstdint>

#include "hopper/compute.cuh"
#include "hopper/convert_kv.cuh"
#include "hopper/load.cuh"
#include "hopper/mask.cuh"
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

/// The keys of the current split of `work`, whose rows have masks of their own. Every lane calls this.
template <typename Shape>
__device__ __forceinline__ KeyRange keys_of_row_masks(const HopperPrefillParams& prefill, const WorkTile& work,
                                                      const WorkRange& range) {
  const TileRowMasks masks(prefill, work.tile);
  const int32_t first_query = work.tile.first_row / prefill.attention.group;
  const int32_t end_query = first_query + query_of_row(prefill, work.tile.num_rows - 1) + 1;
  KeyRange keys = {INT_MAX, 0, 0, INT_MAX};
#pragma unroll 1
  for (int32_t query = first_query + static_cast<int32_t>(threadIdx.x % 32); query < end_query; query += 32) {
    const RowRange of_query = masks.range(query, work.tile.first_token);
    if (of_query.begin < of_query.end) keys.begin = min(keys.begin, of_query.begin);
    keys.end = max(keys.end, of_query.end);
    keys.common_begin = max(keys.common_begin, of_query.begin);
    keys.common_end = min(keys.common_end, of_query.end);
  }
  __syncwarp();
  keys = {warp_min(keys.begin), warp_max(keys.end), warp_max(keys.common_begin), warp_min(keys.common_end)};
  if (masks.tree().exists()) keys.common_end = min(keys.common_end, masks.tree().first_key());
  const int32_t begin = range.first_chunk + range.split_begin, end = range.first_chunk + range.split_end;
  if (range.split_begin > 0) keys.begin = max(keys.begin, begin * Shape::kKeys);
  if (range.split_end < range.tile_chunks) keys.end = min(keys.end, end * Shape::kKeys);
  return keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
}

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
    [[maybe_unused]] KeyRange keys = {};
    if constexpr (Shape::kTakesRowMasks) {
      if (rows > 0) keys = keys_of_row_masks<Shape>(prefill, work, range);
    }
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
      if constexpr (Shape::kTakesRowMasks) {
        tile.work.keys = keys;
        tile.first_block = keys.begin / Shape::kKeys;
        tile.end_block = (keys.end + Shape::kKeys - 1) / Shape::kKeys;
      } else {
        tile.first_block = work.keys.begin / Shape::kKeys;
        tile.end_block = (work.keys.end + Shape::kKeys - 1) / Shape::kKeys;
      }
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
    constexpr bool kHasOneStep =
        Shape::kHasTokenScales || ((Shape::kConvertsKv || Shape::kTakesRowMasks) && Shape::kHeadDim > 128);
    compute_tiles<Shape, T, LogitsTransform, kHasOneStep>(prefill, pipeline);
    clear_padding_rows<T, Shape::kComputeThreads>(attention, work, range);
  }
}

}  // namespace xa::hopper
