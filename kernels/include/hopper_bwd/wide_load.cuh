// The producer warps past 128 columns. One takes tiles and loads Q, K and lse, the other loads V, dO and delta.
#pragma once

#include <cstdint>

#include "hopper_bwd/load.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Starts the TMA loads of a tile's held rows: `kAtomColumns` atom columns, in boxes of 64 rows.
template <typename Shape, int kAtomColumns>
__device__ __forceinline__ void load_held(uint32_t to, const TensorMap& map, const Barrier& full, int32_t head,
                                          const RaggedRows& rows, int32_t first) {
  full.arrive_expect_tx(kAtomColumns * Shape::kHeldAtomColumnBytes);
#pragma unroll
  for (int atom_column = 0; atom_column < kAtomColumns; ++atom_column) {
#pragma unroll
    for (int row = 0; row < Shape::kHeldRows; row += 64) {
      ptx::tma_load(to + atom_column * Shape::kHeldAtomColumnBytes + row * Shape::Atom::kRowBytes, map, full.address,
                    atom_column * 64, head, rows.base + first + row, rows.end, RaggedRows::kEnd);
    }
  }
}

/// Writes query tile `index` to `to`. Indices count the query blocks of all heads; returns false if the index belongs
/// to no sequence. Within a sequence, indices ascend over head groups whose K and V fit into L2, in a head group over
/// query blocks, and in a block over the heads of the group. The last query blocks come first; they attend to most keys
/// under a causal mask. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ bool locate_query_tile(const HopperBackwardParams& params, int32_t index, QueryTile& to) {
  const AttentionParams& forward = params.base.forward;
  const int32_t num_heads = params.num_q_heads;
  const SequencePlan& sequence =
      params
          .sequences_by_row[find_sequence<ByQueryBlock>(params.sequences_by_row, forward.max_seqs, index / num_heads)];
  const int32_t num_queries = sequence.num_queries, blocks = ceil_div(num_queries, Shape::kQueries);
  const int32_t in_sequence = index - sequence.first_query_block * num_heads;
  if (in_sequence < 0 || in_sequence >= blocks * num_heads) return false;
  constexpr float kL2Bytes = 16.8e6f, kRowBytes = 4.0f * Shape::kHeadDim;
  const float cached_heads = fminf(kL2Bytes / (kRowBytes * static_cast<float>(sequence.num_keys)), 1e6f);
  const int32_t group_heads = min(max(static_cast<int32_t>(cached_heads), 1) * params.kv_group, num_heads);
  const int32_t first_head = in_sequence / (blocks * group_heads) * group_heads;
  const int32_t in_group = in_sequence - first_head * blocks, heads = min(group_heads, num_heads - first_head);
  const int32_t blocks_before = in_group / heads, block = blocks - 1 - blocks_before;
  const VisibleBlocks<Shape> visible_blocks = {num_queries, sequence.num_keys, sequence.shift, forward.window_left,
                                               forward.window_right};
  to.block = block;
  to.head = first_head + in_group - blocks_before * heads;
  to.first_block = visible_blocks.first_key_block(block);
  to.num_blocks = visible_blocks.last_key_block(block) - to.first_block + 1;
  to.first_query = sequence.first_query;
  to.num_queries = num_queries;
  to.first_key = sequence.first_key;
  to.num_keys = sequence.num_keys;
  to.shift = sequence.shift;
  to.sequence = sequence.sequence;
  return true;
}

/// Takes the next tile of the CTA from the global counter. Executed by a warp.
template <typename Shape, typename Tile>
__device__ __forceinline__ void take_tile(const HopperBackwardParams& params, Tile& tile) {
  const auto next_index = [](unsigned long long* from) {
    unsigned long long next = 0;
    if (threadIdx.x % 32 == 0) next = atomicAdd(from, 1ull);
    return uniform(static_cast<int32_t>(min(next, 0x7fffffffull)));
  };
  if constexpr (Shape::kComputesDkDv) {
    locate_tile<Shape>(params, next_index(reinterpret_cast<unsigned long long*>(&params.plan->next_tile)), tile);
  } else {
    const AttentionParams& forward = params.base.forward;
    const int32_t end = forward.max_seqs == 0 ? 0 : params.num_query_blocks * params.num_q_heads;
    int32_t index;
    do {
      index = next_index(reinterpret_cast<unsigned long long*>(&params.plan->next_query_tile));
    } while (index < end && !locate_query_tile<Shape>(params, index, tile));
    if (index >= end) tile.block = -1;
  }
}

/// Loads the held rows of each tile of the CTA and the rows that stream past them. Executed by a warp; the one that
/// loads Q and K also takes the tiles.
template <typename Shape, bool kLoadsValues>
__device__ __forceinline__ void load_wide_tiles(const HopperWideBackwardParams& wide_params,
                                                const WidePipeline<Shape>& pipeline) {
  const HopperBackwardParams& params = wide_params.common;
  constexpr int kAtomColumns = kLoadsValues ? Shape::kValueAtomColumns : Shape::kAtomColumns;
  const AttentionParams& forward = params.base.forward;
  const bool is_leader = threadIdx.x % 32 == 0;
  std::conditional_t<kLoadsValues, typename WidePipeline<Shape>::StreamedValuesState,
                     typename WidePipeline<Shape>::StreamedState>
      write_state;
  int32_t step = 0;
  // Loads a block of rows through the ring, one stage with `bytes` bytes per atom column.
  const auto load_block = [&](const TensorMap& map, int32_t bytes, int32_t head, const RaggedRows& rows,
                              int32_t first) {
#pragma unroll 1
    for (int atom_column = 0; atom_column < kAtomColumns; ++atom_column, write_state.advance()) {
      Barrier full, empty;
      uint32_t to;
      if constexpr (kLoadsValues) {
        full = pipeline.streamed_values_full(write_state);
        empty = pipeline.streamed_values_empty(write_state);
        to = pipeline.streamed_values(write_state);
      } else {
        full = pipeline.streamed_full(write_state);
        empty = pipeline.streamed_empty(write_state);
        to = pipeline.streamed(write_state);
      }
      empty.producer_wait();
      if (is_leader) {
        full.arrive_expect_tx(bytes);
        ptx::tma_load(to, map, full.address, atom_column * 64, head, rows.base + first, rows.end, RaggedRows::kEnd);
      }
      __syncwarp();
    }
  };
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    auto& tile = pipeline.tile(tile_state);
    if constexpr (!kLoadsValues) {
      pipeline.tile_empty(tile_state).producer_wait();
      take_tile<Shape>(params, tile);
      __syncwarp();
      if (is_leader) pipeline.tile_full(tile_state).arrive();
    } else {
      pipeline.tile_full(tile_state).wait();
    }
    int32_t held_block, held_head;
    if constexpr (Shape::kComputesDkDv) {
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
    // Tiles of keys count parts of KV heads, those of queries query heads.
    const int32_t key_head = held_head / (Shape::kComputesDkDv ? params.head_splits : params.kv_group);
    if constexpr (Shape::kStreamsHeld) {
      load_block(kLoadsValues ? params.v : params.k, Shape::kHeldAtomColumnBytes, key_head, keys,
                 held_block * Shape::kKeys);
    } else {
      const Barrier empty = kLoadsValues ? pipeline.held_values_empty(tile_count) : pipeline.held_empty(tile_count);
      empty.producer_wait();
      if (is_leader) {
        const Barrier full = kLoadsValues ? pipeline.held_values_full(tile_count) : pipeline.held_full(tile_count);
        const uint32_t to = kLoadsValues ? pipeline.held_values() : pipeline.held();
        if constexpr (Shape::kComputesDkDv) {
          load_held<Shape, kAtomColumns>(to, kLoadsValues ? params.v : params.k, full, key_head, keys,
                                         held_block * Shape::kKeys);
        } else {
          load_held<Shape, kAtomColumns>(to, kLoadsValues ? wide_params.dout : wide_params.q, full, held_head, queries,
                                         held_block * Shape::kQueries);
        }
      }
    }
    __syncwarp();
    if constexpr (kLoadsValues) {
      if (is_leader) pipeline.tile_empty(tile_state).arrive();
    }
    if constexpr (Shape::kComputesDkDv) {
      const int32_t first_head = tile.first_head, end_head = first_head + tile.num_heads;
#pragma unroll 1
      for (int32_t head = first_head; head < end_head; ++head) {
        const float* const stats = (kLoadsValues ? params.base.delta : params.lse_log2) +
                                   (static_cast<int64_t>(head) * forward.num_tokens + first_query);
        const float* slope = nullptr;
        if constexpr (!kLoadsValues && Shape::kHasAlibi) {
          if (forward.alibi_slopes != nullptr) slope = forward.alibi_slopes + sequence * forward.alibi_stride + head;
        }
#pragma unroll 1
        for (int32_t block = first_block; block < first_block + num_blocks; ++block, ++step) {
          const PipelineState<2> step_state(step);
          const Barrier empty = kLoadsValues ? pipeline.deltas_empty(step_state) : pipeline.lses_empty(step_state);
          empty.producer_wait();
          const Barrier full = kLoadsValues ? pipeline.deltas_full(step_state) : pipeline.lses_full(step_state);
          load_row_stats<Shape>(kLoadsValues ? pipeline.deltas(step_state.stage) : pipeline.lses(step_state.stage),
                                stats + block * Shape::kQueries, slope, full.address,
                                num_queries - block * Shape::kQueries);
          load_block(kLoadsValues ? params.dout : params.q, Shape::kAtomColumnBytes, head, queries,
                     block * Shape::kQueries);
        }
      }
    } else {
#pragma unroll 1
      for (int32_t block = first_block; block < first_block + num_blocks; ++block) {
        load_block(kLoadsValues ? wide_params.v : wide_params.k, Shape::kAtomColumnBytes, key_head, keys,
                   block * Shape::kKeys);
      }
    }
  }
  __syncwarp();
}

}  // namespace xa::hopper
