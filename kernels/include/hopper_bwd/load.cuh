// The producer warps of a backward CTA up to 128 columns. One takes tiles and loads K, Q and lse, the other loads V, dO
// and delta, and the bias of calls that have one. A single warp would need more registers than setmaxnreg leaves to its
// threads.
#pragma once

#include <cstdint>

#include "hopper_bwd/bias.cuh"
#include "hopper_bwd/key_ranges.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Starts the TMA loads of `kRows` rows of one head, one per atom column. Rows past the end of the sequence become
/// zeros.
template <typename Shape, int kRows>
__device__ __forceinline__ void load_rows(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t head,
                                          const RaggedRows& rows, int32_t first) {
  using Atom = typename Shape::Atom;
#pragma unroll
  for (int atom_column = 0; atom_column < Shape::kAtomColumns; ++atom_column) {
    ptx::tma_load(to + atom_column * kRows * Atom::kRowBytes, map, barrier, atom_column * Atom::kColumns, head,
                  rows.base + first, rows.end, RaggedRows::kEnd);
  }
}

/// Starts to copy lse or delta of a query block, and the ALiBi slope of its head. Rows past `count` become zeros: a
/// query row of zeros then has finite probabilities and gradients of 0, which add nothing.
template <typename Shape>
__device__ __forceinline__ void load_row_stats(uint32_t to, const float* from, const float* slope, uint32_t barrier,
                                               int32_t count) {
#pragma unroll
  for (int first = 0; first < Shape::kQueries; first += 32) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x % 32);
    ptx::cp_async_4_zfill(to + 4 * row, row < count ? from + row : from, row < count);
  }
  if constexpr (Shape::kHasAlibi) {
    if (threadIdx.x % 32 == 0) {
      ptx::cp_async_4_zfill(to + Shape::kSlopeOffset, slope == nullptr ? from : slope, slope != nullptr);
    }
  }
  ptx::cp_async_arrive(barrier);
}

/// What a producer warp loads: K and Q, or V and dO.
enum class BackwardLoad { keys, values };

/// Starts to load K or V of a tile when the one before has been read.
template <typename Shape, BackwardLoad kLoad>
__device__ __forceinline__ void load_key_block(const HopperBackwardParams& params,
                                               const BackwardPipeline<Shape>& pipeline, const BackwardTile& tile,
                                               int32_t tile_count) {
  constexpr bool kLoadsKeys = kLoad == BackwardLoad::keys;
  const Barrier full = kLoadsKeys ? pipeline.keys_full(tile_count) : pipeline.values_full(tile_count);
  const Barrier empty = kLoadsKeys ? pipeline.keys_empty(tile_count) : pipeline.values_empty(tile_count);
  empty.producer_wait();
  if (threadIdx.x % 32 == 0) {
    full.arrive_expect_tx(Shape::kKeyBytes);
    load_rows<Shape, Shape::kKeys>(kLoadsKeys ? pipeline.keys() : pipeline.values(), kLoadsKeys ? params.k : params.v,
                                   full.address, tile.kv_head / params.head_splits,
                                   RaggedRows(tile.first_key, tile.num_keys), tile.key_block * Shape::kKeys);
  }
}

/// Loads the keys of each tile of the CTA, and the query blocks that attend to them, for each query head of the KV
/// head. Executed by a warp; the one that loads K also takes the tiles.
template <typename Shape, BackwardLoad kLoad>
__device__ __forceinline__ void load_tiles(const HopperBackwardParams& params,
                                           const BackwardPipeline<Shape>& pipeline) {
  constexpr bool kLoadsKeys = kLoad == BackwardLoad::keys;
  const AttentionParams& forward = params.base.forward;
  const bool is_leader = threadIdx.x % 32 == 0;
  RingPipelineState<kLoadsKeys ? Shape::kQueryStages : Shape::kDoutStages> write_state;
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    BackwardTile& tile = pipeline.tile(tile_state);
    if constexpr (kLoadsKeys) {
      unsigned long long next = 0;
      if (is_leader) next = atomicAdd(reinterpret_cast<unsigned long long*>(&params.plan->next_tile), 1ull);
      const int32_t tile_index = uniform(static_cast<int32_t>(min(next, 0x7fffffffull)));
      pipeline.tile_empty(tile_state).producer_wait();
      locate_tile<Shape>(params, tile_index, tile);
      __syncwarp();
      if (is_leader) pipeline.tile_full(tile_state).arrive();
    } else {
      pipeline.tile_full(tile_state).wait();
    }
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    const int32_t num_queries = tile.num_queries, first_query = tile.first_query;
    int32_t block = tile.first_block, step = 1;
    const int32_t num_blocks = tile.num_blocks;
    const int32_t first_head = tile.first_head, end_head = first_head + tile.num_heads;
    load_key_block<Shape, kLoad>(params, pipeline, tile, tile_count);
    if (tile.queries_ascend == 0) {
      block += num_blocks - 1;
      step = -1;
    }
    if constexpr (!kLoadsKeys) {
      __syncwarp();
      if (is_leader) pipeline.tile_empty(tile_state).arrive();
    }
    int32_t row = block * Shape::kQueries;
    const RaggedRows rows(first_query, num_queries);
#pragma unroll 1
    for (int32_t blocks_left = num_blocks; blocks_left > 0; --blocks_left, row += step * Shape::kQueries) {
#pragma unroll 1
      for (int32_t head = first_head; head < end_head; ++head) {
        const float* const stats = (kLoadsKeys ? params.lse_log2 : params.base.delta) +
                                   (static_cast<int64_t>(head) * forward.num_tokens + first_query);
        const float* slope = nullptr;
        if constexpr (kLoadsKeys && Shape::kHasAlibi) {
          if (forward.alibi_slopes != nullptr) {
            slope = forward.alibi_slopes + tile.sequence * forward.alibi_stride + head;
          }
        }
        Barrier full, empty;
        if constexpr (kLoadsKeys) {
          full = pipeline.query_full(write_state);
          empty = pipeline.query_empty(write_state);
        } else {
          const PipelineState<2> dout_state(write_state.stage + 2 * static_cast<int32_t>(write_state.phase));
          full = pipeline.dout_full(dout_state);
          empty = pipeline.dout_empty(dout_state);
        }
        empty.producer_wait();
        // The phase cannot complete before this lane's cp.async arrives, so no lane can miss it.
        if (is_leader) {
          full.arrive_expect_tx(Shape::kQueryBytes);
          load_rows<Shape, Shape::kQueries>(
              kLoadsKeys ? pipeline.queries(write_state.stage) : pipeline.douts(write_state.stage),
              kLoadsKeys ? params.q : params.dout, full.address, head, rows, row);
        }
        __syncwarp();
        if constexpr (kLoadsKeys && Shape::kHasKeyRanges) {
          const HopperKeyRangeBackwardParams& with_ranges = with_key_ranges(params);
          copy_row_keys<Shape>(pipeline.lses(write_state.stage), with_ranges.row_keys + (first_query + row),
                               with_ranges.query_block_keys + (tile.first_query_block + row / Shape::kQueries),
                               num_queries - row);
        }
        load_row_stats<Shape>(kLoadsKeys ? pipeline.lses(write_state.stage) : pipeline.deltas(write_state.stage),
                              stats + row, slope, full.address, num_queries - row);
        write_state.advance();
      }
    }
  }
  // With the lanes converged at the end, ptxas takes fewer registers for the whole function.
  __syncwarp();
}

/// `load_tiles` of V and dO for calls with a bias, of which it also copies that and its gradient. It reads the tile
/// again for each step, because the registers that hold it elsewhere are taken.
template <typename Shape>
__device__ __forceinline__ void load_values_and_bias(const HopperBackwardParams& params,
                                                     const BackwardPipeline<Shape>& pipeline) {
  const bool is_leader = threadIdx.x % 32 == 0;
  const BiasCopy<Shape> bias_copy(params, pipeline);
  const HiddenRows<Shape> hidden_rows(params, pipeline);
  if (is_leader) bias_copy.init();
  int32_t step = 0;
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    pipeline.tile_full(tile_state).wait();
    const BackwardTile& tile = pipeline.tile(tile_state);
    if (uniform(tile.key_block) < 0) break;
    load_key_block<Shape, BackwardLoad::values>(params, pipeline, tile, tile_count);
    if (is_leader) bias_copy.begin(tile);
#pragma unroll 1
    for (int32_t blocks_left = tile.num_blocks; blocks_left > 0; --blocks_left) {
#pragma unroll 1
      for (int32_t i = 0; i < tile.num_heads; ++i, ++step) {
        const int32_t block = tile.queries_ascend != 0 ? tile.num_blocks - blocks_left : blocks_left - 1;
        const int32_t row = (tile.first_block + block) * Shape::kQueries, head = tile.first_head + i;
        const PipelineState<2> dout_state(step);
        const Barrier full = pipeline.dout_full(dout_state);
        pipeline.dout_empty(dout_state).producer_wait();
        if (is_leader) {
          full.arrive_expect_tx(Shape::kQueryBytes);
          load_rows<Shape, Shape::kQueries>(pipeline.douts(dout_state.stage), params.dout, full.address, head,
                                            RaggedRows(tile.first_query, tile.num_queries), row);
        }
        __syncwarp();
        const float* const deltas =
            params.base.delta + (static_cast<int64_t>(head) * params.base.forward.num_tokens + tile.first_query);
        load_row_stats<Shape>(pipeline.deltas(dout_state.stage), deltas + row, nullptr, full.address,
                              tile.num_queries - row);
        if (is_leader) bias_copy.copy_step(step, row, head);
        __syncwarp();
        if (with_bias(params).stores_dbias != 0) {
          hidden_rows.clear_share(tile.num_blocks - blocks_left, head);
          __syncwarp();
        }
      }
    }
    if (is_leader) pipeline.tile_empty(PipelineState<2>(xa::ptx::opaque(tile_count))).arrive();
    __syncwarp();
  }
  if (is_leader) bias_copy.end(step);
  ptx::bulk_wait_group();
  __syncwarp();
}

}  // namespace xa::hopper
