// The end of the backward kernels of sm_90a: rounds dq_accum to dQ, and writes zeros to rows that nothing else writes:
// queries that belong to no sequence or attend to no key, keys that no query attends to, and the gradient of a bias at
// keys that no tile has.
//
// Compute warps that find no further tile take this work from a global counter while other CTAs compute the last tiles.
// The tiles rarely fill the last round of all SMs, and much of dq_accum is still in L2.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/dbias_rows.cuh"
#include "element.cuh"
#include "hopper/epilogue.cuh"
#include "hopper_bwd/bias.cuh"
#include "hopper_bwd/dq_accumulate.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Heads of a row tile of dQ, and rows to clear, per *finish item*, the unit of this work.
constexpr int32_t kFinishHeads = 4, kFinishRows = 32;

/// Selectors for `find_sequence`: the first index of a sequence and the number of its indices. First indices ascend in
/// row order.
struct ByQuery {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_query); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) { return __ldg(&plan.num_queries); }
};
struct ByKey {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_key); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) { return __ldg(&plan.num_keys); }
};
struct ByRowTile {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_row_tile); }
};

/// Whether this lane's row belongs to a sequence; the lanes have 32 consecutive rows. Executed by a warp.
template <typename By>
__device__ __forceinline__ bool belongs_to_sequence(const HopperBackwardParams& params, int32_t row) {
  const int32_t num_seqs = params.base.forward.max_seqs, first = row / 32 * 32;
  const SequencePlan* const sequences = params.sequences_by_row;
  // Binary search in [begin, end) for the last sequence that begins at or before the row.
  int32_t begin = find_sequence<By>(sequences, num_seqs, first);
  int32_t end = find_sequence<By>(sequences, num_seqs, first + 31) + 1;
  while (end - begin > 1) {
    const int32_t middle = begin + (end - begin) / 2;
    (By::first(sequences[middle]) <= row ? begin : end) = middle;
  }
  if (num_seqs == 0) return false;
  const int32_t in_sequence = row - By::first(sequences[begin]);
  return in_sequence >= 0 && in_sequence < By::count(sequences[begin]);
}

/// Clears a row of a gradient, which is f32 if `widens` and otherwise of type T. Executed by a warp.
template <typename T>
__device__ __forceinline__ void clear_row(void* gradient, int32_t widens, int64_t row, int32_t columns) {
  const int32_t bytes = columns * static_cast<int32_t>(widens != 0 ? sizeof(float) : sizeof(T));
  auto* const to = static_cast<uint8_t*>(gradient) + row * bytes;
#pragma unroll 1
  for (int32_t i = xa::ptx::opaque(threadIdx.x) % 32 * 16; i < bytes; i += 32 * 16) {
    *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
  }
}

/// Calls `clear(row)` for those of kFinishRows rows that belong to no sequence. Executed by a warp.
template <typename By, typename Clear>
__device__ __forceinline__ void clear_unwritten_rows(const HopperBackwardParams& params, int32_t item, int32_t num_rows,
                                                     const Clear& clear) {
  const int32_t first = item * kFinishRows, row = first + xa::ptx::opaque(threadIdx.x) % 32;
  const bool is_unwritten = !belongs_to_sequence<By>(params, row) && row < num_rows;
  for (uint32_t unwritten = __ballot_sync(~0u, is_unwritten); unwritten != 0; unwritten &= unwritten - 1)
    clear(first + __ffs(unwritten) - 1);
}

/// Stores dQ of a row tile of kFinishHeads heads as soon as all key blocks have contributed. `item` counts the row
/// tiles of all heads. Within a sequence, the last row tiles of the first heads come first, as most tiles complete them
/// in this order. Executed by a warp.
template <typename Shape, typename T>
__device__ __forceinline__ void store_dq_row_tile(const HopperBackwardParams& params, int64_t item,
                                                  int32_t head_blocks) {
  const AttentionParams& forward = params.base.forward;
  const int32_t b =
      find_sequence<ByRowTile>(params.sequences_by_row, forward.max_seqs, static_cast<int32_t>(item / head_blocks));
  const SequencePlan& sequence = params.sequences_by_row[b];
  const int32_t num_queries = sequence.num_queries, row_tiles = ceil_div(num_queries, kRowTileRows);
  const int64_t in_sequence = item - static_cast<int64_t>(sequence.first_row_tile) * head_blocks;
  // Between two sequences are row tiles that belong to none.
  if (in_sequence < 0 || in_sequence >= static_cast<int64_t>(row_tiles) * head_blocks) return;
  const int32_t head_block = static_cast<int32_t>(in_sequence / row_tiles);
  const int32_t row_tile = row_tiles - 1 - static_cast<int32_t>(in_sequence - int64_t{head_block} * row_tiles);
  const int32_t first_row = row_tile * kRowTileRows, rows = min(num_queries - first_row, kRowTileRows);
  const int32_t num_heads = params.num_q_heads;
  const int32_t lane = xa::ptx::opaque(threadIdx.x) % 32, row = lane / 4;
  const int32_t first_head = head_block * kFinishHeads, end_head = min(first_head + kFinishHeads, num_heads);
  bool is_accumulated = true;  // whether some key block contributes
  {
    const VisibleBlocks<Shape> visible_blocks = {num_queries, sequence.num_keys, sequence.shift, forward.window_left,
                                                 forward.window_right};
    const int32_t block = first_row / Shape::kQueries;
    int32_t contributions;
    if constexpr (Shape::kHasKeyRanges) {
      const ContributingBlocks blocks = contributing_blocks<Shape>(params, sequence.first_query_block + block);
      contributions = blocks.end - blocks.begin;
      is_accumulated = contributions > 0;
    } else {
      contributions = visible_blocks.last_key_block(block) - visible_blocks.first_key_block(block) + 1;
    }
    const int32_t* const semaphore =
        params.dq_semaphore +
        min(first_head + lane % kFinishHeads, end_head - 1) * static_cast<int64_t>(params.num_query_blocks) +
        (sequence.first_query_block + block);
    while (ptx::load_acquire(semaphore) < contributions) {
    }
    __syncwarp();
  }
  const int64_t token = sequence.first_query + first_row + row;
  const float scale = params.base.softmax_scale;
  float4 accum[2][Shape::kHeadDim / 8];
  const auto load = [&](int32_t head, float4(&to)[Shape::kHeadDim / 8]) {
    constexpr int kPart = Shape::kDqColumns;
#pragma unroll
    for (int part = 0; part < Shape::kHeadDim; part += kPart) {
      const auto* const from = reinterpret_cast<const float4*>(dq_accum_row_tile<Shape>(
                                   params, head, part / kPart, sequence.first_row_tile + row_tile)) +
                               lane;
#pragma unroll
      for (int column = part; column < min(part + kPart, Shape::kHeadDim); column += 8) {
        to[column / 8] = is_accumulated ? from[4 * (column - part)] : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
    }
  };
  // The next head's accumulators are loaded while this one's are rounded.
  load(first_head, accum[0]);
#pragma unroll
  for (int i = 0; i < kFinishHeads; ++i) {
    const int32_t head = first_head + i;
    if (head >= end_head) break;
    if (i + 1 < kFinishHeads && head + 1 < end_head) load(head + 1, accum[(i + 1) % 2]);
    const int64_t element = (token * num_heads + head) * forward.head_dim;
    const int64_t eight_rows = int64_t{8} * num_heads * forward.head_dim;
    if (params.base.widens_gradients != 0) {
      float* const to = static_cast<float*>(params.base.dq) + element + lane % 4 * 2;
#pragma unroll
      for (int column = 0; column < Shape::kHeadDim / 8; ++column) {
        if (8 * column >= forward.head_dim) break;
        const float4 dq = accum[i % 2][column];
        if (row < rows) store_columns(to + 8 * column, make_float2(dq.x * scale, dq.y * scale));
        if (row + 8 < rows) store_columns(to + eight_rows + 8 * column, make_float2(dq.z * scale, dq.w * scale));
      }
      continue;
    }
    T* const to = static_cast<T*>(params.base.dq) + element;
#pragma unroll
    for (int part = 0; part < Shape::kHeadDim / 32; ++part) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 dq = accum[i % 2][4 * part + j];
        upper[j] = Element<T>::pack(dq.x * scale, dq.y * scale);
        lower[j] = Element<T>::pack(dq.z * scale, dq.w * scale);
      }
      // Each lane now has eight consecutive columns of one row.
      const uint4 upper_row = transpose_in_quad(upper), lower_row = transpose_in_quad(lower);
      const int32_t column = 32 * part + 8 * (lane % 4);
      if (column >= forward.head_dim) continue;
      if (row < rows) *reinterpret_cast<uint4*>(to + column) = upper_row;
      if (row + 8 < rows) *reinterpret_cast<uint4*>(to + eight_rows + column) = lower_row;
    }
  }
}

/// Stores zeros to kFinishRows rows of the gradient of each pair's own bias, of which `item` counts those of all
/// matrices, where no tile has their keys. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ void clear_dbias_outside_tiles(const HopperBackwardParams& params, int64_t item) {
  using E = std::conditional_t<Shape::kHasF32Bias, float, uint16_t>;
  const HopperBiasBackwardParams& with = with_bias(params);
  const int32_t items_per_matrix = ceil_div(with.rows, kFinishRows);
  const auto matrix = static_cast<int32_t>(item / items_per_matrix);
  const int32_t first_row = static_cast<int32_t>(item - int64_t{matrix} * items_per_matrix) * kFinishRows;
  const int32_t sequence = matrix / params.num_q_heads;
  const SequencePlan& plan = params.sequences_by_row[sequence];
  int32_t begin = 0, end = 0;
  if (plan.num_queries > 0) {
    begin = min(plan.first_key - params.sequence_starts[sequence].key, with.keys);
    end = min(begin + ceil_div(plan.num_keys, Shape::kKeys) * Shape::kKeys, with.keys);
  }
  if (end - begin == with.keys) return;
  E* to = static_cast<E*>(with.dbias_data) + (int64_t{matrix} * with.rows + first_row) * with.keys;
#pragma unroll 1
  for (int32_t row = first_row; row < min(first_row + kFinishRows, with.rows); ++row, to += with.keys) {
    clear_elements(to, begin);
    clear_elements(to + end, with.keys - end);
  }
}

/// Takes finish items until none is left. Executed by each compute warp when its CTA has found no further tile: all
/// tiles that an item waits for are then computed by running CTAs.
template <typename Shape, typename T>
__device__ __forceinline__ void process_finish_items(const HopperBackwardParams& params) {
  const AttentionParams& forward = params.base.forward;
  const int32_t num_heads = params.num_q_heads, head_blocks = ceil_div(num_heads, kFinishHeads);
  const int32_t query_items = ceil_div(forward.num_tokens, kFinishRows),
                clear_items = query_items + ceil_div(forward.capacity, kFinishRows);
  int64_t num_items = clear_items;
  if (Shape::kAccumulatesDq && forward.max_seqs > 0) {
    num_items += static_cast<int64_t>(params.num_row_tiles) * head_blocks;
  }
  const int64_t first_dbias_item = num_items;
  if constexpr (Shape::kHasBias) {
    const HopperBiasBackwardParams& with = with_bias(params);
    const int64_t matrices = static_cast<int64_t>(forward.max_seqs) * num_heads;
    if (with.stores_dbias != 0) num_items += matrices * ceil_div(with.rows, kFinishRows);
  }
  auto* const counter = reinterpret_cast<unsigned long long*>(&params.plan->next_finish_item);
  // Computed anew, because the loops over tiles before this have no register to keep it.
  const bool is_leader = xa::ptx::opaque(threadIdx.x) % 32 == 0;
  // The index of the next item is on its way while this one is processed.
  unsigned long long next = 0;
  if (is_leader) next = atomicAdd(counter, 1ull);
#pragma unroll 1
  while (true) {
    const int64_t item = static_cast<int64_t>(__shfl_sync(~0u, next, 0));
    if (item >= num_items) break;
    if (is_leader) next = atomicAdd(counter, 1ull);
    if (item < query_items) {
      clear_unwritten_rows<ByQuery>(params, static_cast<int32_t>(item), forward.num_tokens, [&](int64_t row) {
        clear_row<T>(params.base.dq, params.base.widens_gradients, row, num_heads * forward.head_dim);
      });
    } else if (item < clear_items) {
      clear_unwritten_rows<ByKey>(params, static_cast<int32_t>(item) - query_items, forward.capacity, [&](int64_t row) {
        const int32_t widens = params.widens_key_gradients;
        clear_row<T>(params.base.dk, widens, row, forward.num_kv_heads * forward.head_dim);
        clear_row<T>(params.base.dv, widens, row, forward.num_kv_heads * forward.value_dim);
      });
    } else if (Shape::kHasBias && item >= first_dbias_item) {
      if constexpr (Shape::kHasBias) clear_dbias_outside_tiles<Shape>(params, item - first_dbias_item);
    } else if constexpr (Shape::kAccumulatesDq) {
      store_dq_row_tile<Shape, T>(params, item - clear_items, head_blocks);
    }
  }
}

}  // namespace xa::hopper
