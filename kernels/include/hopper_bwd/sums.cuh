// The warps of a backward CTA that add dQ to its sums in memory, one that of even steps, one that of odd ones: from
// when a share leaves until it is known to have arrived takes longer than a step.
#pragma once

#include <cstdint>

#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Numbers of a group in each of the two parts, of 64 columns and of the rest, in which the sums of a head lie.
template <typename Shape>
__device__ __forceinline__ constexpr int32_t sums_of_group(int32_t part) {
  return kSumRows * (part == 0 ? 64 : Shape::kHeadDim - 64);
}

/// Where the sums of a group of rows begin, those of the first or of the second part of the columns.
template <typename Shape>
__device__ __forceinline__ float* group_sums(const HopperBackwardParams& params, int32_t head, int32_t part,
                                             int32_t group) {
  const int64_t of_head = static_cast<int64_t>(params.num_groups) * (kSumRows * Shape::kHeadDim);
  const int64_t before = static_cast<int64_t>(params.num_groups) * (part * sums_of_group<Shape>(0));
  return params.dq_sums + (head * of_head + before + static_cast<int64_t>(group) * sums_of_group<Shape>(part));
}

/// Adds the shares of all steps with the parity `kParity`. The work of one thread.
///
/// A counter for each head and block of queries says how many blocks of keys are in its sums; a share waits until all
/// before it, in the order of the sums, are in. The first one is stored, so nothing has to be cleared.
///
/// That a bulk copy is complete does not yet mean that a bulk copy of another SM sees it: that takes the fence before
/// the counter is raised, and the one after it has been read.
template <typename Shape>
__device__ __forceinline__ void add_sums(const HopperBackwardParams& params, const BackwardPipeline<Shape>& pipeline,
                                         int32_t parity) {
  const AttentionParams& forward = params.base.forward;
  constexpr int kGroups = Shape::kQueries / kSumRows;
  int32_t step = 0;
#pragma unroll 1
  for (int32_t count = 0;; ++count) {
    const PipelineState<2> turn(count);
    pipeline.tile_full(turn).wait();
    const BackwardTile tile = pipeline.tile(turn);
    if (tile.key_block < 0) break;
    pipeline.tile_empty(turn).arrive();
    const Band<Shape> band = {tile.num_queries, tile.num_keys, tile.shift, forward.window_left, forward.window_right};
#pragma unroll 1
    for (int32_t done = 0; done < tile.num_blocks; ++done) {
      const int32_t block = tile.first_block + (tile.ascends != 0 ? done : tile.num_blocks - 1 - done);
      const int32_t before = tile.ascends != 0 ? band.last_key_block(block) - tile.key_block
                                               : tile.key_block - band.first_key_block(block);
#pragma unroll 1
      for (int32_t i = 0; i < forward.group; ++i, ++step) {
        if ((step & 1) != parity) continue;
        const int32_t head = tile.kv_head * forward.group + i;
        int32_t* const arrived =
            params.turns + static_cast<int64_t>(head) * params.num_turns + (tile.first_turn + block);
        if (before > 0) {
          while (ptx::load_acquire(arrived) < before) {
          }
          ptx::fence_all_for_async();
        }
        const int32_t groups = ceil_div(tile.num_queries - block * Shape::kQueries, kSumRows);
#pragma unroll
        for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
          pipeline.sums_full(PipelineState<2>(step), warpgroup).wait();
          const int32_t first = Shape::kSharesColumns ? 0 : 4 * warpgroup, part = Shape::kSharesColumns ? warpgroup : 0;
          const int32_t mine = min(groups - first, 4);
          if (mine <= 0) continue;
          float* const to = group_sums<Shape>(params, head, part, tile.first_group + block * kGroups + first);
          const uint32_t bytes = mine * (sums_of_group<Shape>(part) * sizeof(float));
          if (before == 0) {
            ptx::bulk_store(to, pipeline.sums(warpgroup), bytes);
          } else {
            ptx::bulk_add_f32(to, pipeline.sums(warpgroup), bytes);
          }
        }
        ptx::bulk_commit();
        ptx::bulk_wait_group_read();
        pipeline.sums_empty(step, 0).arrive();
        pipeline.sums_empty(step, 1).arrive();
        ptx::bulk_wait_group();
        ptx::fence_all_for_async();
        ptx::store_release(arrived, before + 1);
      }
    }
  }
}

}  // namespace xa::hopper
