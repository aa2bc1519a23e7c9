// The epilogue of attention_row_masks.cu. A warp's state is the result of a split: a partial in the workspace, or rows
// of out and lse, of all columns or of the warp's. With batch_invariant the states of fixed-size splits are merged in
// order (work_partition.cuh), in shared memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "column_warps.cuh"
#include "element.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "softmax.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// The thread's state of the fixed-size splits so far. No other thread reads it.
template <typename Shape>
class KeptState {
  float* const mine_;

 public:
  explicit __device__ __forceinline__ KeptState(uint8_t* shared)
      : mine_(reinterpret_cast<float*>(shared + Shape::kKeptStatesOffset) + threadIdx.x) {}

  template <typename State>
  __device__ __forceinline__ void keep(const State& state) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      at(half) = state.max[0][half];
      at(2 + half) = state.sum[0][half];
    }
#pragma unroll
    for (int i = 0; i < Shape::kWarpColumns / 2; ++i) at(4 + i) = state.output[0][i / 4][i % 4];
  }
  /// Merges `state`, that of the keys that follow, into the kept one, by the operations of xa::merge, and sets `state`
  /// to the result.
  template <typename State>
  __device__ __forceinline__ void merge_into(State& state, float log2_unit) const {
    float kept_weight[2], weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = fmaxf(at(half), state.max[0][half]);
      kept_weight[half] = merge_weight(at(half), largest, log2_unit);
      weight[half] = merge_weight(state.max[0][half], largest, log2_unit);
      state.max[0][half] = largest;
      state.sum[0][half] = weighted_sum(at(2 + half), kept_weight[half], state.sum[0][half], weight[half]);
    }
#pragma unroll
    for (int i = 0; i < Shape::kWarpColumns / 2; ++i) {
      float& output = state.output[0][i / 4][i % 4];
      output = weighted_sum(at(4 + i), kept_weight[i % 4 / 2], output, weight[i % 4 / 2]);
    }
  }

 private:
  __device__ __forceinline__ float& at(int i) const { return mine_[i * Shape::kThreads]; }
};

/// Stores the warp's 16 rows from row `first_row` of the tile on as a partial, whose row 0 is at `partial_row`.
template <typename Shape, typename State>
__device__ __forceinline__ void store_partial(const AttentionParams& params, const WorkTile& work, const State& state,
                                              int32_t first_row, int32_t partial_row) {
  const PartialRows partial(params.partial, work.kv_head);
  const int32_t first_column = first_warp_column<Shape>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = first_row + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
    if (row >= work.tile.num_rows) continue;
    if (threadIdx.x % 4 == 0 && first_column == 0) {
      partial.store_state(partial_row + row, state.max[0][half], state.sum[0][half]);
    }
    for_columns<Shape::kIsFp8>(state.output[0], half, [&](int32_t column, const auto& columns) {
      column += first_column;
      if (column < params.value_dim) store_columns(partial.output(partial_row + row, column), columns);
    });
  }
}

/// The end of the chunks of the current split, which begins at `range.fixed_split_begin`: with batch_invariant a
/// fixed-size split, else all of the work tile.
__device__ __forceinline__ int32_t current_split_end(const WorkRange& range) {
  if (range.fixed_split_chunks == 0) return range.split_end;
  return min(range.fixed_split_begin + range.fixed_split_chunks, range.split_end);
}

/// Stores the warp's state of the keys of the current split.
template <typename Shape, typename T, typename State>
__device__ __forceinline__ void store_split(const AttentionParams& params, const WorkTile& work, const WorkRange& range,
                                            State& state, uint8_t* shared, float log2_unit) {
  // Opaque: computed here, because in a register throughout the loop over keys it spills.
  const int32_t first_row = ptx::opaque(threadIdx.x) / (32 * Shape::kColumnWarps) * 16;
  const int32_t begin = range.fixed_split_begin, end = current_split_end(range);
  const bool has_fixed_splits = Shape::kHasFixedSplits && range.fixed_split_chunks > 0;
  const bool merges = has_fixed_splits && range.split_begin == 0;
  const KeptState<Shape> kept(shared);
  if (merges && begin > 0) kept.merge_into(state, log2_unit);
  if (merges && end < range.split_end) {
    kept.keep(state);
  } else if (range.partial_row >= 0) {
    // The fixed-size splits at the beginning of a tile are one partial, every later one is a partial of its own.
    const int32_t index =
        has_fixed_splits && !merges ? (begin - range.split_begin) >> (31 - __clz(range.fixed_split_chunks)) : 0;
    store_partial<Shape>(params, work, state, first_row, range.partial_row + index * work.tile.num_rows);
  } else {
    const RowWriter<T, Shape::kIsFp8> writer(params, work.tile, work.kv_head);
    write_warp_rows<Shape, T>(params, writer, state, first_row, first_warp_column<Shape>(),
                              shared + first_row * Shape::kQueryPitch, log2_unit);
  }
}

}  // namespace xa
