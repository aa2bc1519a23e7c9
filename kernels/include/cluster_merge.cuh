// How the CTAs of a cluster merge the parts of a split tile through distributed shared memory.
//
// A tile's result has `items`: four columns of a row each. Every CTA that has a part of the tile merges a slice of the
// items: the others store that slice of their partial results in its shared memory. A CTA has parts of at most two
// split tiles: of one that begins before its range, and of one that goes on after it. Each has its own place, which is
// written only once, so that no CTA waits for another one before the end. An mbarrier counts the bytes that arrive
// there.
#pragma once

#include <cmath>
#include <cstdint>

#include "cluster_async.cuh"
#include "hopper/ptx.cuh"
#include "output_rows.cuh"
#include "params/cluster_decode.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// How the items of a tile are divided into a slice per part.
struct MergeSlices {
  int32_t size;  // items of a slice; the last slices may have fewer, or none
  float reciprocal;

  __device__ __forceinline__ MergeSlices(int32_t items, int32_t num_parts)
      : size(divide_small(items + num_parts - 1, ptx::reciprocal_approx(static_cast<float>(num_parts)))),
        reciprocal(ptx::reciprocal_approx(static_cast<float>(size))) {}
  __device__ __forceinline__ int32_t slice(int32_t item) const { return divide_small(item, reciprocal); }
  /// How many of a tile's `items` slice `index` has.
  __device__ __forceinline__ int32_t count(int32_t items, int32_t index) const {
    return clamp(items - index * size, 0, size);
  }
};

/// Stores the warp's state of the tile's live rows where `WarpStates` (tile_result.cuh) finds them.
template <typename Shape, typename State>
__device__ __forceinline__ void store_live_rows(uint8_t* shared, const State& state, int32_t num_rows) {
  constexpr int kRows = Shape::kRows, kPitch = Shape::kWarpStatesPitch;
  float* const outputs = reinterpret_cast<float*>(shared);
  float2* const states = reinterpret_cast<float2*>(outputs + Shape::kWarps * kRows * kPitch);
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < State::kHalves; ++half) {
    const int32_t index = warp * kRows + 8 * half + lane / 4;
    if (State::kTileRows == 16 && 8 * half + lane / 4 >= num_rows) break;
    for_row_columns<Shape::kIsFp8>(state, half, lane, [&](int32_t row, int32_t column, const auto& columns) {
      if (State::kTileRows == 16 || row < num_rows) {
        store_columns(outputs + (warp * kRows + row) * kPitch + column, columns);
      }
    });
    if (lane % 4 == 0) states[index] = make_float2(state.max[0][half], state.sum[0][half]);
  }
}

/// A split tile of which the CTA has a part.
struct SplitTile {
  QoTile tile;
  int32_t part;
  int32_t num_parts;  // 0: there is no such tile
};

/// The shared memory in which a CTA receives its slice of all parts of a split tile; at the same address in each CTA.
template <int kItems>
class MergeBuffer {
  static constexpr int kPlaces = kItems + kLargestCluster;  // slices are rounded up

 public:
  static constexpr int kBytes = kPlaces * static_cast<int>(sizeof(float4) + sizeof(float2));

  __device__ __forceinline__ explicit MergeBuffer(uint8_t* shared)
      : outputs_(reinterpret_cast<float4*>(shared)), states_(reinterpret_cast<float2*>(outputs_ + kPlaces)) {}

  /// Stores an item of a part in CTA `rank`: item `index` of its slice. `barrier` is the buffer's mbarrier.
  __device__ __forceinline__ void send(int32_t rank, const MergeSlices& slices, int32_t part, int32_t index,
                                       const PartialState& state, uint32_t barrier) const {
    const int32_t place = part * slices.size + index;
    ptx::store_async_16(ptx::shared_address(outputs_ + place), rank, state.output, barrier);
    ptx::store_async_8(ptx::shared_address(states_ + place), rank, make_float2(state.max, state.sum), barrier);
  }
  /// One thread says how many items the CTA receives, in its slice of `num_parts` parts.
  static __device__ __forceinline__ void expect(int32_t count, int32_t num_parts, uint32_t barrier) {
    constexpr int32_t kItemBytes = sizeof(float4) + sizeof(float2);
    hopper::ptx::mbarrier_arrive_expect_tx(barrier, count * num_parts * kItemBytes);
  }
  /// Item `index` of the slice, merged in the order of keys.
  __device__ __forceinline__ PartialState merged(const MergeSlices& slices, int32_t num_parts, int32_t index,
                                                 float log2_unit) const {
    PartialState parts[kLargestCluster];
    PartialState state = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int part = 0; part < kLargestCluster; ++part) {
      parts[part] = state;
      if (part < num_parts) parts[part] = load(part * slices.size + index);
    }
#pragma unroll
    for (int part = 0; part < kLargestCluster; ++part) state.max = fmaxf(state.max, parts[part].max);
#pragma unroll
    for (int part = 0; part < kLargestCluster; ++part) {
      const PartialState& next = parts[part];
      const float weight = merge_weight(next.max, state.max, log2_unit);
      state.sum = __fmaf_rn(next.sum, weight, state.sum);
      state.output.x = __fmaf_rn(next.output.x, weight, state.output.x);
      state.output.y = __fmaf_rn(next.output.y, weight, state.output.y);
      state.output.z = __fmaf_rn(next.output.z, weight, state.output.z);
      state.output.w = __fmaf_rn(next.output.w, weight, state.output.w);
    }
    return state;
  }

 private:
  __device__ __forceinline__ PartialState load(int32_t place) const {
    return PartialState{states_[place].x, states_[place].y, outputs_[place]};
  }

  float4* outputs_;  // [parts, slice]
  float2* states_;   // (max, sum) of each
};

}  // namespace xa
