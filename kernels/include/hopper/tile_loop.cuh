// What the warpgroups that compute do with each tile, whatever the element type: wait for its plan, attend, store its
// rows.
#pragma once

#include <cstdint>

#include "hopper/epilogue.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "output_rows.cuh"
#include "params/hopper_prefill.cuh"

namespace xa::hopper {

/// Calls `attend(plan, first, end, tile_count, finish_rows)` for each tile of the CTA that has a block of keys: blocks
/// [first, end) of tile number `tile`. It leaves `state` finished, by `finish_rows()`. Rows are stored as `Out`. The
/// work of a warpgroup.
template <typename Shape, typename Out, typename State, typename Attend>
__device__ __forceinline__ void for_each_tile(const HopperPrefillParams& prefill, const Pipeline<Shape>& pipeline,
                                              int32_t warp, State& state, const Attend& attend) {
  const AttentionParams& params = prefill.attention;
  const int32_t warp_row = 16 * warp;
  const bool is_lane_0 = threadIdx.x % 32 == 0;
  int32_t rows = 1;
#pragma unroll 1
  for (int32_t count = 0, tile_count = 0; rows > 0; ++count) {
    const PipelineState<2> turn(count);
    pipeline.tile_full(turn).wait();
    const PrefillTile& tile = pipeline.tile(turn);
    rows = uniform(tile.work.tile.num_rows);
    if (rows > 0) {
      const int32_t first = uniform(tile.first_block), end = uniform(tile.end_block);
      const bool by_tma = Shape::kHasOutputStaging && prefill.stores_by_tma != 0 && warp_row + 16 <= rows;
      Epilogue<Shape, Out> store(prefill, tile, warp_row, by_tma);
      const auto finish_rows = [&] {
        state.finish();
        store.finish(state);
      };
      state.clear();
      if (first < end) {
        attend(tile, first, end, tile_count, finish_rows);
        ++tile_count;
      } else {
        finish_rows();
      }
      store.store(state, pipeline.output_staging(warp));
    }
    __syncwarp();
    if (is_lane_0) pipeline.tile_empty(turn).arrive();
  }
  ptx::bulk_wait_group();
  if (params.clears_padding_rows != 0) {
    pipeline.starts_checked().wait();
    const bool ascend = pipeline.starts_ascend() != 0;
    clear_padding_rows<Out, Shape::kComputeThreads>(params, ascend, live_rows(params, ascend), blockIdx.x, gridDim.x);
  }
}

/// Calls `step(masked)` for `block` and those before it down to `first`; blocks [common_begin, common_end) need no
/// mask.
template <typename Step>
__device__ __forceinline__ void for_each_block(int32_t& block, int32_t first, int32_t common_begin, int32_t common_end,
                                               const Step& step) {
#pragma unroll 1
  for (; block >= max(first, common_end); --block) step(true);
#pragma unroll 1
  for (; block >= max(first, common_begin); --block) step(false);
#pragma unroll 1
  for (; block >= first; --block) step(true);
}

}  // namespace xa::hopper
