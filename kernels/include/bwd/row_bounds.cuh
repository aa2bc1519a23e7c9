// Gradients of query rows with bounds of their keys (key_ranges.cuh).
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "bwd/sequence_segment.cuh"
#include "key_ranges.cuh"
#include "params/key_ranges.cuh"

namespace xa {

/// The first query from `query` on that attends to some of the keys [low, high] of the sequence in `tile`; len_q if
/// there is none. All lanes of a warp call this and get the same query. One step reads the bounds of 128 queries.
__device__ __forceinline__ int32_t next_attending_query(const KeyRangeSource& ranges, const Visibility& visibility,
                                                        const QoTile& tile, int32_t query, int32_t low, int32_t high) {
  constexpr int kAtOnce = 4;
  const int32_t lane = ptx::thread() % 32;
#pragma unroll 1
  for (; query < tile.len_q; query += 32 * kAtOnce) {
    bool attends[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t own = query + 32 * i + lane;
      const RowRange range = own < tile.len_q ? row_range(ranges, visibility, tile, own) : RowRange{0, 0};
      attends[i] = range.begin <= high && range.end > low;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t lanes = __ballot_sync(~0u, attends[i]);
      if (lanes != 0) return query + 32 * i + __ffs(lanes) - 1;
    }
  }
  return tile.len_q;
}

/// Sets P and dS of a warp to 0 for keys outside of the ranges of query rows: its rows are the keys from `first_key`
/// on, its columns the query rows of `ranges`. Selects instead of multiplying, because masked values may be NaN.
template <int kTiles, int kBlocks>
__device__ __forceinline__ void mask_columns(float (&p)[kTiles][kBlocks][4], float (&ds)[kTiles][kBlocks][4],
                                             const RowRange* ranges, int32_t first_key) {
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const RowRange range = ranges[8 * block + 2 * t + side];
      const uint32_t length = range.end - range.begin;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t from_begin = first_key + 16 * tile + 8 * half + g - range.begin;
          const bool masked = from_begin >= length;
          p[tile][block][2 * half + side] = masked ? 0.0f : p[tile][block][2 * half + side];
          ds[tile][block][2 * half + side] = masked ? 0.0f : ds[tile][block][2 * half + side];
        }
      }
    }
  }
}

/// Whether the ranges of `kCount` rows hold all of the keys [begin, end). All lanes of a warp call this.
template <int kCount>
__device__ __forceinline__ bool all_hold(const RowRange* ranges, int32_t begin, int32_t end) {
  bool hold = true;
#pragma unroll
  for (int first = 0; first < kCount; first += 32) {
    const int32_t row = first + ptx::thread() % 32;
    if (kCount % 32 != 0 && row >= kCount) continue;
    const RowRange range = ranges[row];
    hold = hold && range.begin <= begin && end <= range.end;
  }
  return __all_sync(~0u, hold);
}

}  // namespace xa
