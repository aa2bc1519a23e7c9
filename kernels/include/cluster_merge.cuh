// How the CTAs of a cluster merge the parts of a split tile through distributed shared memory.
//
// A tile's result has `items`: four columns of a row each. Every CTA that has a part of the tile merges a slice of the
// items: the others store that slice of their partial results in its shared memory. A CTA has parts of at most two
// split tiles: of one that begins before its range, and of one that goes on after it. Each has its own place, which is
// written only once, so that no CTA waits for another one before the end.
#pragma once

#include <cstdint>

#include "hopper/cluster_ptx.cuh"
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
      : size((items + num_parts - 1) / num_parts), reciprocal(1.0f / static_cast<float>(size)) {}
  __device__ __forceinline__ int32_t slice(int32_t item) const { return divide_small(item, reciprocal); }
};

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

  /// Stores an item of a part in CTA `rank`: item `index` of its slice.
  __device__ __forceinline__ void send(int32_t rank, const MergeSlices& slices, int32_t part, int32_t index,
                                       const PartialState& state) const {
    const int32_t place = part * slices.size + index;
    ptx::store_cluster_16(ptx::shared_address(outputs_ + place), rank, state.output);
    ptx::store_cluster_8(ptx::shared_address(states_ + place), rank, make_float2(state.max, state.sum));
  }
  /// Item `index` of the slice, merged in the order of keys.
  __device__ __forceinline__ PartialState merged(const MergeSlices& slices, int32_t num_parts, int32_t index,
                                                 float log2_unit) const {
    PartialState state = load(index);
#pragma unroll 1
    for (int32_t part = 1; part < num_parts; ++part) merge(state, load(part * slices.size + index), log2_unit);
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
