// The epilogue of decode: the warps of a CTA had different keys of the same rows, so their states are merged.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "softmax.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// The states of a CTA's warps in shared memory. They are merged in the order of warps, so results are deterministic.
template <typename Shape>
class WarpStates {
  static constexpr int kWarps = Shape::kKeyWarps, kRows = Shape::kRows, kPitch = Shape::kWarpStatesPitch;
  float* outputs_;  // [kWarps, kRows, kPitch]
  float2* states_;  // [kWarps, kRows] (max, sum)

 public:
  /// `shared` holds `Shape::kWarpStatesBytes` bytes.
  __device__ __forceinline__ explicit WarpStates(uint8_t* shared)
      : outputs_(reinterpret_cast<float*>(shared)),
        states_(reinterpret_cast<float2*>(outputs_ + kWarps * kRows * kPitch)) {}

  template <typename State>
  __device__ __forceinline__ void store(const State& state) const {
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t index = warp * kRows + 8 * half + g;
      for_columns<Shape::kIsFp8>(state.output[0], half, [&](int32_t column, const auto& columns) {
        store_columns(outputs_ + index * kPitch + column, columns);
      });
      if (t == 0) states_[index] = make_float2(state.max[0][half], state.sum[0][half]);
    }
  }

  /// The merged state of columns `column` to `column + 3` of a row. A barrier has to follow `store` first.
  __device__ __forceinline__ PartialState merged(int32_t row, int32_t column, float log2_unit) const {
    PartialState part = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) part.max = fmaxf(part.max, states_[warp * kRows + row].x);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const int32_t index = warp * kRows + row;
      const float weight = merge_weight(states_[index].x, part.max, log2_unit);
      const float4 o = *reinterpret_cast<const float4*>(outputs_ + index * kPitch + column);
      part.output.x = __fmaf_rn(weight, o.x, part.output.x);
      part.output.y = __fmaf_rn(weight, o.y, part.output.y);
      part.output.z = __fmaf_rn(weight, o.z, part.output.z);
      part.output.w = __fmaf_rn(weight, o.w, part.output.w);
      part.sum = __fmaf_rn(weight, states_[index].y, part.sum);
    }
    return part;
  }
};

/// The merged state of the KV splits that the CTA has finished of a tile, in shared memory (batch_invariant). A thread
/// has the same columns of the same rows each time. A row's max and sum are read by all of its threads, so they are
/// double buffered: no thread overwrites what another one still reads.
template <typename Shape>
class MergedRows {
  float4* outputs_;  // [kRows, kHeadDim / 4]
  float2* states_;   // [2, kRows] (max, sum)
  int32_t parity_;

 public:
  /// `shared` holds `Shape::kMergedRowsBytes` bytes; `work_tile` counts the work tiles of the CTA's range.
  __device__ __forceinline__ MergedRows(uint8_t* shared, int32_t work_tile)
      : outputs_(reinterpret_cast<float4*>(shared)),
        states_(reinterpret_cast<float2*>(shared + Shape::kRows * Shape::kHeadDim * 4)),
        parity_(work_tile % 2) {}

  /// The stored state merged with `next`.
  __device__ __forceinline__ PartialState with(const PartialState& next, int32_t row, int32_t column,
                                               float log2_unit) const {
    const float2 state = states_[(parity_ ^ 1) * Shape::kRows + row];
    PartialState part = {state.x, state.y, outputs_[(row * Shape::kHeadDim + column) / 4]};
    merge(part, next, log2_unit);
    return part;
  }
  __device__ __forceinline__ void store(const PartialState& part, int32_t row, int32_t column) const {
    outputs_[(row * Shape::kHeadDim + column) / 4] = part.output;
    if (column == 0) states_[parity_ * Shape::kRows + row] = make_float2(part.max, part.sum);
  }
};

/// Merges the warps' states of a work tile and stores the result where the WorkRange says: in the merged rows, in the
/// workspace as a partial, or in out and lse. All threads of the CTA call it; `shared` is free up to the WorkTile.
template <typename Shape, typename Writer, typename State>
__device__ __forceinline__ void store_result(const AttentionParams& params, const WorkTile& work, const Writer& writer,
                                             const State& state, uint8_t* shared, float log2_unit) {
  constexpr int kRowVectors = Shape::kHeadDim / 4;  // float4
  const WarpStates<Shape> warps(shared);
  warps.store(state);
  __syncthreads();
  const WorkRange& range = *reinterpret_cast<const WorkRange*>(shared + Shape::kWorkRangeOffset);
  const MergedRows<Shape> merged(shared + Shape::kMergedRowsOffset, range.work_tile_index);
  const PartialRows partial(params.partial, work.kv_head);
  const bool merges_into = range.merges != 0 && range.work_tile_index > 0;
  const bool stays = range.merges != 0 && !range.is_last_work_tile();
  for (int32_t item = threadIdx.x; item < work.tile.num_rows * kRowVectors; item += Shape::kThreads) {
    const int32_t row = item / kRowVectors, column = item % kRowVectors * 4;
    if (column >= params.value_dim) continue;
    PartialState part = warps.merged(row, column, log2_unit);
    if (merges_into) part = merged.with(part, row, column, log2_unit);
    if (stays) {
      merged.store(part, row, column);
    } else if (range.partial_row >= 0) {
      partial.store(range.partial_row + row, column, part);
    } else {
      writer.write(row, column, part, log2_unit);
    }
  }
}

}  // namespace xa
