// Where the tiles of a decode launch may be cut (work_partition.cuh).
#pragma once

#include <cstdint>

namespace xa {

/// Quotients of numbers that are not negative. Most 64-bit ones fit 32 bits, whose division is several times faster.
__device__ __forceinline__ int32_t divide(int32_t x, int32_t divisor) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) / static_cast<uint32_t>(divisor));
}
__device__ __forceinline__ int64_t divide(int64_t x, int64_t divisor) {
  if (((x | divisor) >> 32) == 0) return static_cast<uint32_t>(x) / static_cast<uint32_t>(divisor);
  return x / divisor;
}
template <typename Index>
__device__ __forceinline__ Index divide_up(Index x, Index divisor) {
  return divide(x + divisor - 1, divisor);
}

/// Where tiles may be cut. All in units.
struct KvSplit {
  static constexpr int32_t kNeverSplit = INT32_MAX;

  int64_t range_chunks;        // of a share, before its ends move
  int32_t min_chunks;          // the fewest of a part
  int32_t max_unsplit_chunks;  // tiles of up to so many stay whole
  int32_t num_ranges;          // number of shares
  int32_t max_fixed_splits;    // batch_invariant: the most spans of a tile; else 0
  int32_t min_shift;           // batch_invariant: log2 of the fewest units of a span

  /// batch_invariant: log2 of the units of a span, for a tile of `units`.
  __device__ __forceinline__ int32_t fixed_split_shift(int32_t chunks) const {
    int32_t shift = min_shift;
    while (max_fixed_splits << shift < chunks) ++shift;
    return shift;
  }
  /// batch_invariant: spans of a tile of `units`.
  __device__ __forceinline__ int32_t num_fixed_splits(int32_t chunks) const {
    const int32_t shift = fixed_split_shift(chunks);
    return (chunks + (1 << shift) - 1) >> shift;
  }

  /// Offsets in a tile at which an end of a share stays inside of it, after it has moved to the nearest multiple of
  /// 2^shift.
  struct Boundaries {
    int32_t first;
    int32_t last;
    int32_t shift;

    /// As a multiple of 2^shift.
    __device__ __forceinline__ int32_t place(int32_t offset) const { return (offset + (1 << shift) / 2) >> shift; }
  };
  __device__ __forceinline__ Boundaries boundaries(int32_t chunks) const {
    if (chunks <= max_unsplit_chunks) return Boundaries{(chunks + 1) / 2, (chunks + 1) / 2 - 1, 0};
    if (max_fixed_splits == 0) return Boundaries{min_chunks, chunks - min_chunks, 0};
    const int32_t shift = fixed_split_shift(chunks), half = (1 << shift) / 2;
    return Boundaries{half, min((num_fixed_splits(chunks) << shift) - half, chunks) - 1, shift};
  }

  /// Where in a tile of `units` an end of a share at `offset` comes to lie: 0 and `units` are the ends of the tile.
  __device__ __forceinline__ int32_t place(int32_t offset, int32_t chunks) const {
    const Boundaries range = boundaries(chunks);
    if (offset < range.first) return 0;
    return offset > range.last ? chunks : range.place(offset) << range.shift;
  }

  /// Shares that begin inside of a tile: `first` to `last`, none where these are in the wrong order.
  struct RangeStarts {
    int64_t first;
    int64_t last;
  };
  __device__ __forceinline__ RangeStarts range_starts(int64_t tile_begin, int32_t chunks) const {
    const Boundaries range = boundaries(chunks);
    return RangeStarts{divide_up<int64_t>(tile_begin + range.first, range_chunks),
                       divide(tile_begin + range.last, range_chunks)};
  }

  /// batch_invariant: how many spans of the tile the first part folds; 0 where the tile is not cut.
  __device__ __forceinline__ int32_t fixed_splits_before_boundary(int64_t tile_begin, int32_t chunks) const {
    const Boundaries range = boundaries(chunks);
    const int64_t offset = divide_up<int64_t>(tile_begin + range.first, range_chunks) * range_chunks - tile_begin;
    return offset > range.last ? 0 : range.place(static_cast<int32_t>(offset));
  }
  /// batch_invariant: parts of the tile that go to the workspace.
  __device__ __forceinline__ int32_t num_partials(int64_t tile_begin, int32_t chunks) const {
    const int32_t folded = fixed_splits_before_boundary(tile_begin, chunks);
    return folded == 0 ? 0 : 1 + num_fixed_splits(chunks) - folded;
  }
};

}  // namespace xa
