// The warps of a backward CTA that accumulate dQ in memory (dq_accum), one for even and one for odd steps: a bulk
// reduction takes longer than a step to become visible.
#pragma once

#include <cstdint>

#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Elements of a row tile in each of the two column parts of a head's dq_accum: kDqColumns columns, and the remaining
/// ones.
template <typename Shape>
__device__ __forceinline__ constexpr int32_t row_tile_elements(int32_t part) {
  return kRowTileRows * (part == 0 ? Shape::kDqColumns : Shape::kHeadDim - Shape::kDqColumns);
}

/// Address of a row tile in column part `part` of dq_accum, which is [head][part][row tile][columns / 8][lane][4].
template <typename Shape>
__device__ __forceinline__ float* dq_accum_row_tile(const HopperBackwardParams& params, int32_t head, int32_t part,
                                                    int32_t row_tile) {
  const int64_t head_elements = static_cast<int64_t>(params.num_row_tiles) * (kRowTileRows * Shape::kHeadDim);
  const int64_t part_offset = static_cast<int64_t>(params.num_row_tiles) * (part * row_tile_elements<Shape>(0));
  return params.dq_accum +
         (head * head_elements + part_offset + static_cast<int64_t>(row_tile) * row_tile_elements<Shape>(part));
}

/// Accumulates dQ of all steps of parity `parity`. Executed by one thread.
///
/// The semaphore of a head and query block counts the key blocks whose contributions are in dq_accum. A contribution
/// waits until all key blocks before it are in. The first one is stored instead of added, so nothing has to be cleared.
/// With bounds of rows, a step may contribute nothing (key_ranges.cuh).
///
/// A completed bulk copy is not yet visible to bulk copies of another SM. This takes the proxy fences: one before the
/// semaphore is raised, and one after it has been read.
template <typename Shape>
__device__ __forceinline__ void accumulate_dq(const HopperBackwardParams& params,
                                              const BackwardPipeline<Shape>& pipeline, int32_t parity) {
  const AttentionParams& forward = params.base.forward;
  constexpr int kRowTiles = Shape::kQueries / kRowTileRows;
  int32_t step = 0;
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    pipeline.tile_full(tile_state).wait();
    const BackwardTile tile = pipeline.tile(tile_state);
    if (tile.key_block < 0) break;
    pipeline.tile_empty(tile_state).arrive();
    const VisibleBlocks<Shape> visible_blocks = {tile.num_queries, tile.num_keys, tile.shift, forward.window_left,
                                                 forward.window_right};
#pragma unroll 1
    for (int32_t blocks_done = 0; blocks_done < tile.num_blocks; ++blocks_done) {
      const int32_t block =
          tile.first_block + (tile.queries_ascend != 0 ? blocks_done : tile.num_blocks - 1 - blocks_done);
      int32_t before;
      bool contributes = true;
      if constexpr (Shape::kHasKeyRanges) {
        const ContributingBlocks blocks = contributing_blocks<Shape>(params, tile.first_query_block + block);
        before = tile.keys_descend != 0 ? blocks.end - 1 - tile.key_block : tile.key_block - blocks.begin;
        contributes = blocks.contains(tile.key_block);
      } else {
        before = tile.keys_descend != 0 ? visible_blocks.last_key_block(block) - tile.key_block
                                        : tile.key_block - visible_blocks.first_key_block(block);
      }
#pragma unroll 1
      for (int32_t i = 0; i < tile.num_heads; ++i, ++step) {
        if ((step & 1) != parity) continue;
        if (!contributes) {
#pragma unroll
          for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
            pipeline.dq_full(PipelineState<2>(step), warpgroup).wait();
            pipeline.dq_empty(step, warpgroup).arrive();
          }
          continue;
        }
        const int32_t head = tile.first_head + i;
        int32_t* const semaphore = params.dq_semaphore + static_cast<int64_t>(head) * params.num_query_blocks +
                                   (tile.first_query_block + block);
        if (before > 0) {
          while (ptx::load_acquire(semaphore) < before) {
          }
          ptx::fence_proxy_async();
        }
        const int32_t row_tiles = ceil_div(tile.num_queries - block * Shape::kQueries, kRowTileRows);
#pragma unroll
        for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
          pipeline.dq_full(PipelineState<2>(step), warpgroup).wait();
          const int32_t first = Shape::kSplitsDqColumns ? 0 : 4 * warpgroup,
                        part = Shape::kSplitsDqColumns ? warpgroup : 0;
          const int32_t count = min(row_tiles - first, 4);
          if (count <= 0) continue;
          float* const to =
              dq_accum_row_tile<Shape>(params, head, part, tile.first_row_tile + block * kRowTiles + first);
          const uint32_t bytes = count * (row_tile_elements<Shape>(part) * sizeof(float));
          if (before == 0) {
            ptx::bulk_store(to, pipeline.dq(warpgroup), bytes);
          } else {
            ptx::bulk_reduce_add_f32(to, pipeline.dq(warpgroup), bytes);
          }
        }
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read();
        pipeline.dq_empty(step, 0).arrive();
        pipeline.dq_empty(step, 1).arrive();
        ptx::bulk_wait_group();
        ptx::fence_proxy_async();
        ptx::store_release(semaphore, before + 1);
      }
    }
  }
}

}  // namespace xa::hopper
