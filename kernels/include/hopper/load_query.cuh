// The load of a prefill tile's rows of Q, by TMA.
#pragma once

#include <cstdint>

#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// Bytes of an atom column of Q that its whole queries have.
template <typename Shape>
__device__ __forceinline__ int32_t query_column_bytes(const AttentionParams& params) {
  const int32_t rows = params.tile_queries.divisor / Shape::kClusterSize * params.group;
  return rows * (Shape::kQueryAtomColumnBytes / Shape::kRows);
}

/// Clears the rows of Q past the last whole query, which no load writes. They are computed and not stored, and NaN
/// would slow all rows of a warp down.
template <typename Shape>
__device__ __forceinline__ void clear_rest_of_query(const AttentionParams& params, const Pipeline<Shape>& pipeline) {
  const int32_t lane_byte = threadIdx.x % 32 * 16;
  for (int32_t column = 0; column < Shape::kQueryAtomColumns; ++column) {
    const uint32_t to = pipeline.query() + column * Shape::kQueryAtomColumnBytes;
    for (int32_t byte = query_column_bytes<Shape>(params) + lane_byte; byte < Shape::kQueryAtomColumnBytes;
         byte += 32 * 16) {
      xa::ptx::clear_shared_16(to + byte);
    }
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
}

/// Issues the load of a tile's query rows, the CTA's tile number `tile_count`. Rows past the sequence's last one are
/// loaded too; the epilogue does not store them.
template <typename Shape>
__device__ __forceinline__ void load_query(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                           const PrefillTile& tile, int32_t tile_count) {
  if (threadIdx.x % 32 != 0) return;
  const Barrier full = pipeline.query_full(tile_count);
  pipeline.query_empty(tile_count).producer_wait();
  full.arrive_expect_tx(Shape::kQueryAtomColumns * query_column_bytes<Shape>(params.attention));
  constexpr int kAtomElements = Shape::kHeadDim / Shape::kQueryAtomColumns;
  const int32_t boxes = params.query_boxes_are_columns != 0 ? Shape::kQueryAtomColumns : 1;
#pragma unroll 1
  for (int32_t box = 0; box < boxes; ++box) {
    const uint32_t to = pipeline.query() + box * Shape::kQueryAtomColumnBytes;
    const int32_t column = box * kAtomElements;
    ptx::tma_load(to, params.q, full.address, column, 0, tile.work.kv_head, tile.work.tile.first_token, 0);
  }
}

}  // namespace xa::hopper
