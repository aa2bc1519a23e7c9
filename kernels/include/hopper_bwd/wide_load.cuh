// The warps of a CTA of wide rows that fetch: one draws tiles and fetches what products of q and K take, and lse; one V
// and dout, and delta.
#pragma once

#include <cstdint>

#include "hopper_bwd/load.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Starts to copy what a tile holds: `kPanels` panels of rows, in boxes of 64.
template <typename Shape, int kPanels>
__device__ __forceinline__ void load_held(uint32_t to, const TensorMap& map, const Barrier& full, int32_t head,
                                          const RaggedRows& rows, int32_t first) {
  full.arrive_expect_tx(kPanels * Shape::kHeldPanelBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int row = 0; row < Shape::kHeldRows; row += 64) {
      ptx::tma_load(to + panel * Shape::kHeldPanelBytes + row * Shape::Panel::kRowBytes, map, full.address, panel * 64,
                    head, rows.base + first + row, rows.end, RaggedRows::kEnd);
    }
  }
}

/// Puts the tile of queries with an index into `to`; an index without a tile is passed over. The work of a warp.
template <typename Shape>
__device__ __forceinline__ bool find_query_tile(const HopperBackwardParams& params, int32_t index, QueryTile& to) {
  const AttentionParams& forward = params.base.forward;
  // The last blocks of queries first, which see most under a causal mask.
  const int32_t head = index / params.num_turns, place = params.num_turns - 1 - (index - head * params.num_turns);
  const SequencePlan& sequence = params.by_row[last_before<OfTurns>(params.by_row, forward.max_seqs, place)];
  const int32_t block = place - sequence.first_turn, num_queries = sequence.num_queries;
  if (block < 0 || block * Shape::kQueries >= num_queries) return false;
  const Band<Shape> band = {num_queries, sequence.num_keys, sequence.shift, forward.window_left, forward.window_right};
  to.block = block;
  to.head = head;
  to.first_block = band.first_key_block(block);
  to.num_blocks = band.last_key_block(block) - to.first_block + 1;
  to.first_query = sequence.first_query;
  to.num_queries = num_queries;
  to.first_key = sequence.first_key;
  to.num_keys = sequence.num_keys;
  to.shift = sequence.shift;
  to.sequence = sequence.sequence;
  return true;
}

/// Draws the next tile of the CTA. The work of a warp.
template <typename Shape, typename Tile>
__device__ __forceinline__ void draw_tile(const HopperBackwardParams& params, Tile& tile) {
  const auto draw = [](unsigned long long* from) {
    unsigned long long next = 0;
    if (threadIdx.x % 32 == 0) next = atomicAdd(from, 1ull);
    return uniform(static_cast<int32_t>(min(next, 0x7fffffffull)));
  };
  if constexpr (Shape::kOfKeys) {
    find_tile<Shape>(params, draw(reinterpret_cast<unsigned long long*>(&params.plan->next_tile)), tile);
  } else {
    const int32_t end = params.num_turns * params.base.forward.num_kv_heads * params.base.forward.group;
    int32_t index;
    do {
      index = draw(reinterpret_cast<unsigned long long*>(&params.plan->next_query_tile));
    } while (index < end && !find_query_tile<Shape>(params, index, tile));
    if (index >= end) tile.block = -1;
  }
}

/// Fetches what each tile of the CTA holds and what streams past it. The work of a warp; that of q and K finds the
/// tiles.
template <typename Shape, bool kOfValues>
__device__ __forceinline__ void load_wide_tiles(const HopperWideBackwardParams& wide_params,
                                                const WidePipeline<Shape>& pipeline) {
  const HopperBackwardParams& params = wide_params.common;
  constexpr int kPanels = kOfValues ? Shape::kValuePanels : Shape::kPanels;
  const AttentionParams& forward = params.base.forward;
  const bool leads = threadIdx.x % 32 == 0;
  std::conditional_t<kOfValues, typename WidePipeline<Shape>::ValueAt, typename WidePipeline<Shape>::At> at;
  int32_t step = 0;
  // A block of rows, panel by panel.
  const auto load_block = [&](const TensorMap& map, int32_t head, const RaggedRows& rows, int32_t first) {
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel, at.advance()) {
      Barrier full, empty;
      uint32_t to;
      if constexpr (kOfValues) {
        full = pipeline.full_values(at);
        empty = pipeline.empty_values(at);
        to = pipeline.value_panel(at);
      } else {
        full = pipeline.full(at);
        empty = pipeline.empty(at);
        to = pipeline.panel(at);
      }
      empty.producer_wait();
      if (leads) {
        full.arrive_expect_tx(Shape::kPanelBytes);
        ptx::tma_load(to, map, full.address, panel * 64, head, rows.base + first, rows.end, RaggedRows::kEnd);
      }
      __syncwarp();
    }
  };
#pragma unroll 1
  for (int32_t count = 0;; ++count) {
    const PipelineState<2> turn(count);
    auto& tile = pipeline.tile(turn);
    if constexpr (!kOfValues) {
      pipeline.tile_empty(turn).producer_wait();
      draw_tile<Shape>(params, tile);
      __syncwarp();
      if (leads) pipeline.tile_full(turn).arrive();
    } else {
      pipeline.tile_full(turn).wait();
    }
    int32_t held_block, held_head;
    if constexpr (Shape::kOfKeys) {
      held_block = uniform(tile.key_block);
      held_head = tile.kv_head;
    } else {
      held_block = uniform(tile.block);
      held_head = tile.head;
    }
    if (held_block < 0) break;
    const RaggedRows queries(tile.first_query, tile.num_queries), keys(tile.first_key, tile.num_keys);
    const int32_t num_queries = tile.num_queries, first_query = tile.first_query, num_blocks = tile.num_blocks;
    const int32_t first_block = tile.first_block, sequence = tile.sequence;
    const Barrier held_empty = kOfValues ? pipeline.held_values_empty(count) : pipeline.held_empty(count);
    held_empty.producer_wait();
    if (leads) {
      const Barrier full = kOfValues ? pipeline.held_values_full(count) : pipeline.held_full(count);
      const uint32_t to = kOfValues ? pipeline.held_values() : pipeline.held();
      if constexpr (Shape::kOfKeys) {
        load_held<Shape, kPanels>(to, kOfValues ? params.v : params.k, full, held_head, keys,
                                  held_block * Shape::kKeys);
      } else {
        load_held<Shape, kPanels>(to, kOfValues ? wide_params.dout : wide_params.q, full, held_head, queries,
                                  held_block * Shape::kQueries);
      }
    }
    __syncwarp();
    if constexpr (kOfValues) {
      if (leads) pipeline.tile_empty(turn).arrive();
    }
    if constexpr (Shape::kOfKeys) {
      const int32_t first_head = held_head * forward.group;
#pragma unroll 1
      for (int32_t head = first_head; head < first_head + forward.group; ++head) {
        const float* const stats = (kOfValues ? params.base.delta : params.lse_log2) +
                                   (static_cast<int64_t>(head) * forward.num_tokens + first_query);
        const float* slope = nullptr;
        if constexpr (!kOfValues && Shape::kBiased) {
          if (forward.alibi_slopes != nullptr) slope = forward.alibi_slopes + sequence * forward.alibi_stride + head;
        }
#pragma unroll 1
        for (int32_t block = first_block; block < first_block + num_blocks; ++block, ++step) {
          const PipelineState<2> now(step);
          const Barrier empty = kOfValues ? pipeline.deltas_empty(now) : pipeline.lses_empty(now);
          empty.producer_wait();
          const Barrier full = kOfValues ? pipeline.deltas_full(now) : pipeline.lses_full(now);
          load_row_stats<Shape>(kOfValues ? pipeline.deltas(now.stage) : pipeline.lses(now.stage),
                                stats + block * Shape::kQueries, slope, full.address,
                                num_queries - block * Shape::kQueries);
          load_block(kOfValues ? params.dout : params.q, head, queries, block * Shape::kQueries);
        }
      }
    } else {
      const int32_t kv_head = forward.group == 1 ? held_head : held_head / forward.group;
#pragma unroll 1
      for (int32_t block = first_block; block < first_block + num_blocks; ++block) {
        load_block(kOfValues ? wide_params.v : wide_params.k, kv_head, keys, block * Shape::kKeys);
      }
    }
  }
  __syncwarp();
}

}  // namespace xa::hopper
