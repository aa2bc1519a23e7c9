// The epilogue of decode: the warps of a CTA had different keys of the same rows, so their states are merged.
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

/// Merges the states of a row in the order of warps, so results are deterministic. `states` [kKeyWarps, kRows] are
/// (max, sum), `output(warp)` four columns.
template <typename Shape, typename Output>
__device__ __forceinline__ PartialState merge_warps(const float2* states, int32_t row, float log2_unit,
                                                    const Output& output) {
  PartialState part = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
  for (int warp = 0; warp < Shape::kKeyWarps; ++warp) part.max = fmaxf(part.max, states[warp * Shape::kRows + row].x);
#pragma unroll
  for (int warp = 0; warp < Shape::kKeyWarps; ++warp) {
    const float2 state = states[warp * Shape::kRows + row];
    const float weight = merge_weight(state.x, part.max, log2_unit);
    const float4 o = output(warp);
    part.output.x = __fmaf_rn(weight, o.x, part.output.x);
    part.output.y = __fmaf_rn(weight, o.y, part.output.y);
    part.output.z = __fmaf_rn(weight, o.z, part.output.z);
    part.output.w = __fmaf_rn(weight, o.w, part.output.w);
    part.sum = __fmaf_rn(weight, state.y, part.sum);
  }
  return part;
}

/// The states of a CTA's warps in shared memory. Warps that have different columns have the same (max, sum).
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
    const uint32_t thread = opaque_if<Shape::kHasTokenScales>(threadIdx.x);
    const int32_t warp = thread / 32 / Shape::kColumnWarps, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int32_t first_column = first_warp_column<Shape>();
#pragma unroll
    for (int half = 0; half < State::kHalves; ++half) {
      for_row_columns<Shape::kIsFp8>(state, half, lane, [&](int32_t row, int32_t column, const auto& columns) {
        store_columns(outputs_ + (warp * kRows + row) * kPitch + first_column + column, columns);
      });
      if (t != 0 || first_column != 0) continue;
      states_[warp * kRows + 8 * half + g] = make_float2(state.max[0][half], state.sum[0][half]);
    }
  }

  /// The merged state of columns `column` to `column + 3` of a row. A barrier has to follow `store` first.
  __device__ __forceinline__ PartialState merged(int32_t row, int32_t column, float log2_unit) const {
    return merge_warps<Shape>(states_, row, log2_unit, [&](int warp) {
      return *reinterpret_cast<const float4*>(outputs_ + (warp * kRows + row) * kPitch + column);
    });
  }
};

/// Merges the warps' states of a work tile and stores the result where the WorkRange says: in the workspace as a
/// partial, or in out and lse. All threads of the CTA call it; `shared` is free up to the WorkTile.
template <typename Shape, typename Writer, typename State>
__device__ __forceinline__ void store_result(const AttentionParams& params, const WorkTile& work, const Writer& writer,
                                             const State& state, uint8_t* shared, float log2_unit) {
  constexpr int kRowVectors = Shape::kHeadDim / 4;  // float4
  const WarpStates<Shape> warps(shared);
  warps.store(state);
  __syncthreads();
  const WorkRange& range = *reinterpret_cast<const WorkRange*>(shared + Shape::kWorkRangeOffset);
  const PartialRows partial(params.partial, work.kv_head);
  for (int32_t item = threadIdx.x; item < work.tile.num_rows * kRowVectors; item += Shape::kThreads) {
    const int32_t row = item / kRowVectors, column = item % kRowVectors * 4;
    if (column >= params.value_dim) continue;
    const PartialState part = warps.merged(row, column, log2_unit);
    if (range.partial_row >= 0) {
      partial.store(range.partial_row + row, column, part);
    } else {
      writer.write(row, column, part, log2_unit);
    }
  }
}

}  // namespace xa
