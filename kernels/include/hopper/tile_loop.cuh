// The compute warpgroups' loop over work tiles, for 16-bit and fp8 alike: wait for a tile, attend, store its rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/epilogue.cuh"
#include "hopper/key_range_tile.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/split_kv_epilogue.cuh"
#include "output_rows.cuh"
#include "params/hopper_prefill.cuh"

namespace xa::hopper {

/// Calls `attend(tile, first, end, tile_count, finalize_rows)` for each tile of the CTA that has blocks of keys: blocks
/// [first, end), for the CTA's tile number `tile_count`. It must leave the final O in `state` and call
/// `finalize_rows()` after the last softmax. Stores rows as `Out`. Run by all compute warps. `block_count` is the
/// number of the CTA's blocks so far, which `attend` counts.
template <typename Shape, typename Out, bool kClearsOutput = true, typename State, typename Attend>
__device__ __forceinline__ void for_each_tile(const HopperPrefillParams& prefill, const Pipeline<Shape>& pipeline,
                                              int32_t warp, State& state, const int32_t& block_count,
                                              const Attend& attend) {
  const AttentionParams& params = prefill.attention;
  const int32_t warp_row = first_row_of_warp<Shape>(warp);
  const bool is_lane_0 = threadIdx.x % 32 == 0;
  int32_t rows = 1;
  // `count` counts the scheduler's tiles, `tile_count` those that have keys, for which Q is loaded.
#pragma unroll 1
  for (int32_t count = 0, tile_count = 0; rows > Shape::kNoRows; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const typename Shape::Tile& tile = pipeline.tile(tile_state);
    rows = uniform(tile.work.tile.num_rows);
    if (rows > Shape::kNoRows) {
      const int32_t first = uniform(tile.first_block), end = uniform(tile.end_block);
      // With a single block, the stage may still hold rows of the other warpgroup's tile before.
      const bool has_staging = Shape::kStagesOutputInValues ? stages_output_in_values<Shape>(prefill) && first + 1 < end
                                                            : Shape::kHasOutputStaging && prefill.stores_by_tma != 0;
      const bool by_tma = has_staging && warp_row + 16 <= rows;
      std::conditional_t<Shape::kSplitsKeys, SplitKvEpilogue<Shape, Out>, Epilogue<Shape, Out>> epilogue(
          prefill, tile, warp_row, by_tma);
      const auto finalize_rows = [&] {
        state.finalize();
        epilogue.finalize(state);
      };
      state.reset();
      if constexpr (kClearsOutput) state.clear_output();
      if (first < end) {
        attend(tile, first, end, tile_count, finalize_rows);
        ++tile_count;
      } else {
        if constexpr (!kClearsOutput) state.clear_output();
        finalize_rows();
      }
      if constexpr (Shape::kStagesOutputInValues) {
        // The warp is read again here, because registers are scarcest in the loop over blocks.
        const int32_t own = uniform(xa::ptx::opaque(threadIdx.x) / 32);
        epilogue.store(state, by_tma ? pipeline.output_staging(own, block_count) : 0);
      } else {
        epilogue.store(state, pipeline.output_staging(warp, block_count));
      }
    }
    __syncwarp();
    if (is_lane_0) pipeline.tile_empty(tile_state).arrive();
  }
  // TMA stores read shared memory, which the CTA gives up when it exits.
  ptx::bulk_wait_group();
  // hopper_split_kv clears them itself.
  if (!Shape::kSplitsKeys && params.clears_padding_rows != 0) {
    pipeline.starts_checked().wait();
    const bool ascend = pipeline.starts_ascend() != 0;
    const int32_t cta = Shape::kClusterSize * blockIdx.x + (Shape::kClusterSize > 1 ? blockIdx.y : 0);
    clear_padding_rows<Out, Shape::kComputeThreads>(params, params.num_kv_heads * prefill.group_heads, ascend,
                                                    live_rows(params, ascend), cta, Shape::kClusterSize * gridDim.x);
  }
}

/// Releases a buffer without using it. Once lane 0 has arrived, the buffer may be filled again, which a lane that still
/// waits for it to be full would miss.
__device__ __forceinline__ void pass(const Barrier& full, const Barrier& empty) {
  full.wait();
  __syncwarp();
  if (threadIdx.x % 32 == 0) empty.arrive();
}

/// Passes over the next `blocks` blocks, because no row of the warpgroup attends to them.
template <typename Shape>
__device__ __forceinline__ void pass_blocks(const Pipeline<Shape>& pipeline, int32_t& block_count, int32_t blocks) {
#pragma unroll 1
  for (const int32_t end_count = block_count + blocks; block_count < end_count; ++block_count) {
    const PipelineState<Shape::kStages> now(block_count);
    pass(pipeline.keys_full(now), pipeline.keys_empty(now));
    pass(pipeline.values_full(now), pipeline.values_empty(now));
    if constexpr (Shape::kHasTokenScales) {
      const PipelineState<Shape::kScaleStages> scales(block_count);
      pass(pipeline.scales_full(scales), pipeline.scales_empty(scales));
    }
  }
}

/// Passes over the blocks `first` to `end` of a tile before the warpgroup's own ones, to which it narrows them. Without
/// own blocks it passes over all, and over the query rows, and returns false.
template <typename Shape>
__device__ __forceinline__ bool enter_own_blocks(const Pipeline<Shape>& pipeline, const typename Shape::Tile& tile,
                                                 int32_t warpgroup, int32_t tile_count, int32_t& block_count,
                                                 int32_t& first, int32_t& end) {
  const bool has_rows = 64 * warpgroup < uniform(tile.work.tile.num_rows);
  int32_t own_first = first, own_end = has_rows ? end : first;
  if constexpr (Shape::kHasWarpgroupBlocks) {
    if (has_rows) {
      own_first = uniform(tile.warpgroup_first_block[warpgroup]);
      own_end = uniform(tile.warpgroup_end_block[warpgroup]);
    }
  }
  if (own_first >= own_end) {
    pass(pipeline.query_full(tile_count), pipeline.query_empty(tile_count));
    pass_blocks(pipeline, block_count, end - first);
    return false;
  }
  pass_blocks(pipeline, block_count, end - own_end);
  first = own_first;
  end = own_end;
  return true;
}

/// Calls `step(masked)` for `block` and the blocks of the tile before it down to `first`. Blocks in [common_begin,
/// common_end) need no mask, and none of them is passed over.
template <typename Tile, typename Step>
__device__ __forceinline__ void for_each_block(const Tile& tile, int32_t& block, int32_t first, int32_t common_begin,
                                               int32_t common_end, const Step& step) {
#pragma unroll 1
  for (; block >= max(first, common_end); block = block_before(tile, block)) step(true);
#pragma unroll 1
  for (; block >= max(first, common_begin); --block) step(false);
#pragma unroll 1
  for (; block >= first; block = block_before(tile, block)) step(true);
}

}  // namespace xa::hopper
