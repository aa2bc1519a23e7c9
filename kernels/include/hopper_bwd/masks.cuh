// Masks of the backward on Hopper, whose scores are transposed: rows are keys, columns are queries. With bounds of rows
// key_ranges.cuh has what differs.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Query blocks [begin, end) of a tile: those in which a warpgroup's keys need no mask, or those that attend to some of
/// these keys.
struct BlockRange {
  int32_t begin;
  int32_t end;

  __device__ __forceinline__ bool contains(int32_t block) const { return block >= begin && block < end; }
};

__device__ __forceinline__ int32_t floor_div(int32_t x, int32_t y) { return x >= 0 ? x / y : -((-x + y - 1) / y); }

/// Calls `mask(column, element)` for each masked score of [64 keys, kQueries]. Few blocks need it, so all that it
/// depends on is computed anew each time.
template <typename Shape, typename Mask>
__device__ __forceinline__ void for_masked(const AttentionParams& forward, const BackwardTile& tile, int32_t block,
                                           const Mask& mask) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, lane = thread % 32;
  const int32_t first_key = tile.key_block * Shape::kKeys + thread / 32 * 16 + lane / 4;
  const int32_t first_query = block * Shape::kQueries + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t key = first_key + 8 * half, position = key - tile.shift - first_query;
    // Queries that attend to the key, counted from this lane's first one. Keys past the last one are zeros, whose
    // probabilities may overflow, so they are masked; with a bias clear_absent_keys does that.
    int32_t begin = forward.window_right < 0 ? INT32_MIN : position - forward.window_right;
    int32_t end = forward.window_left < 0 ? INT32_MAX : position + forward.window_left + 1;
    if (!Shape::kHasBias && key >= tile.num_keys) begin = INT32_MAX;
    if constexpr (Shape::kMasksQueriesPastEnd) end = min(end, tile.num_queries - first_query);
#pragma unroll
    for (int column = 0; column < Shape::kQueries / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t query = 8 * column + i;
        if (query < begin || query >= end) mask(column, 2 * half + i);
      }
    }
  }
}

}  // namespace xa::hopper
