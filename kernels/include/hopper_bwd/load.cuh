// The warps of a backward CTA that fetch: one draws tiles and fetches K, and Q with the lse of its rows, one fetches V,
// and dO with delta. Together they would need more registers than a thread of theirs has.
#pragma once

#include <cstdint>

#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Starts to copy a block of `kRows` rows of one head, in panels; zeros in the place of rows past the sequence's last.
template <typename Shape, int kRows>
__device__ __forceinline__ void load_rows(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t head,
                                          const RaggedRows& rows, int32_t first) {
  using Panel = typename Shape::Panel;
#pragma unroll
  for (int panel = 0; panel < Shape::kPanels; ++panel) {
    ptx::tma_load(to + panel * kRows * Panel::kRowBytes, map, barrier, panel * Panel::kColumns, head, rows.base + first,
                  rows.end, RaggedRows::kEnd);
  }
}

/// Starts to copy the numbers of a block of queries, each lane some, and the slope of their head, if any; zeros
/// likewise: a row of zeros then has finite weights and gradients of 0, which add nothing.
template <typename Shape>
__device__ __forceinline__ void load_row_stats(uint32_t to, const float* from, const float* slope, uint32_t barrier,
                                               int32_t count) {
#pragma unroll
  for (int first = 0; first < Shape::kQueries; first += 32) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x % 32);
    ptx::cp_async_4_or_zero(to + 4 * row, row < count ? from + row : from, row < count);
  }
  if constexpr (Shape::kBiased) {
    if (threadIdx.x % 32 == 0) {
      ptx::cp_async_4_or_zero(to + Shape::kSlopeOffset, slope == nullptr ? from : slope, slope != nullptr);
    }
  }
  ptx::cp_async_arrive(barrier);
}

/// What a warp fetches: K and Q, or V and dO.
enum class BackwardLoad { keys, values };

/// Fetches the keys of each tile of the CTA, and the blocks of queries that see them, of each the heads of the group.
/// The work of a warp; that of the keys finds the tiles.
template <typename Shape, BackwardLoad kLoad>
__device__ __forceinline__ void load_tiles(const HopperBackwardParams& params,
                                           const BackwardPipeline<Shape>& pipeline) {
  constexpr bool kOfKeys = kLoad == BackwardLoad::keys;
  const AttentionParams& forward = params.base.forward;
  const bool leads = threadIdx.x % 32 == 0;
  RingPosition<kOfKeys ? Shape::kQueryStages : Shape::kDoutStages> at;
#pragma unroll 1
  for (int32_t count = 0;; ++count) {
    const PipelineState<2> turn(count);
    BackwardTile& tile = pipeline.tile(turn);
    if constexpr (kOfKeys) {
      unsigned long long next = 0;
      if (leads) next = atomicAdd(reinterpret_cast<unsigned long long*>(&params.plan->next_tile), 1ull);
      const int32_t tile_index = uniform(static_cast<int32_t>(min(next, 0x7fffffffull)));
      pipeline.tile_empty(turn).producer_wait();
      find_tile<Shape>(params, tile_index, tile);
      __syncwarp();
      if (leads) pipeline.tile_full(turn).arrive();
    } else {
      pipeline.tile_full(turn).wait();
    }
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    const int32_t num_queries = tile.num_queries, first_query = tile.first_query;
    int32_t block = tile.first_block, step = 1;
    const int32_t num_blocks = tile.num_blocks;
    const int32_t first_head = tile.kv_head * forward.group;
    {
      const Barrier full = kOfKeys ? pipeline.keys_full(count) : pipeline.values_full(count);
      const Barrier empty = kOfKeys ? pipeline.keys_empty(count) : pipeline.values_empty(count);
      empty.producer_wait();
      if (leads) {
        full.arrive_expect_tx(Shape::kKeyBytes);
        load_rows<Shape, Shape::kKeys>(kOfKeys ? pipeline.keys() : pipeline.values(), kOfKeys ? params.k : params.v,
                                       full.address, tile.kv_head, RaggedRows(tile.first_key, tile.num_keys),
                                       key_block * Shape::kKeys);
      }
    }
    if (tile.ascends == 0) {
      block += num_blocks - 1;
      step = -1;
    }
    if constexpr (!kOfKeys) {
      __syncwarp();
      if (leads) pipeline.tile_empty(turn).arrive();
    }
    int32_t row = block * Shape::kQueries;
    const RaggedRows rows(first_query, num_queries);
#pragma unroll 1
    for (int32_t left = num_blocks; left > 0; --left, row += step * Shape::kQueries) {
#pragma unroll 1
      for (int32_t head = first_head; head < first_head + forward.group; ++head) {
        const float* const stats = (kOfKeys ? params.lse_log2 : params.base.delta) +
                                   (static_cast<int64_t>(head) * forward.num_tokens + first_query);
        const float* slope = nullptr;
        if constexpr (kOfKeys && Shape::kBiased) {
          if (forward.alibi_slopes != nullptr) {
            slope = forward.alibi_slopes + tile.sequence * forward.alibi_stride + head;
          }
        }
        Barrier full, empty;
        if constexpr (kOfKeys) {
          full = pipeline.query_full(at);
          empty = pipeline.query_empty(at);
        } else {
          const PipelineState<2> place(at.stage + 2 * static_cast<int32_t>(at.phase));
          full = pipeline.dout_full(place);
          empty = pipeline.dout_empty(place);
        }
        empty.producer_wait();
        // Without the copy of this lane the phase lasts: no lane can miss it.
        if (leads) {
          full.arrive_expect_tx(Shape::kQueryBytes);
          load_rows<Shape, Shape::kQueries>(kOfKeys ? pipeline.queries(at.stage) : pipeline.douts(at.stage),
                                            kOfKeys ? params.q : params.dout, full.address, head, rows, row);
        }
        __syncwarp();
        load_row_stats<Shape>(kOfKeys ? pipeline.lses(at.stage) : pipeline.deltas(at.stage), stats + row, slope,
                              full.address, num_queries - row);
        at.advance();
      }
    }
  }
  // Where the lanes are together at the end, ptxas takes fewer registers for all of it.
  __syncwarp();
}

}  // namespace xa::hopper
