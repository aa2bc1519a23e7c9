// Split-KV: where the boundaries of work ranges may split the tiles of a decode launch (work_partition.cuh).
#pragma once

#include <cstdint>

#include "division.cuh"

namespace xa {

/// Quotients of non-negative numbers. 64-bit operands mostly fit 32 bits, whose division is several times faster.
__device__ __forceinline__ int32_t divide(int32_t x, int32_t divisor) {
  return static_cast<int32_t>(divide_mostly_small(x, divisor));
}
__device__ __forceinline__ int64_t divide(int64_t x, int64_t divisor) {
  if (((x | divisor) >> 32) == 0) return divide_mostly_small(static_cast<uint32_t>(x), static_cast<uint32_t>(divisor));
  return x / divisor;
}
template <typename Index>
__device__ __forceinline__ Index divide_up(Index x, Index divisor) {
  return divide(x + divisor - 1, divisor);
}

/// The rules by which tiles are split, the same in every CTA. All sizes are in KV chunks.
///
/// The boundary between work ranges g - 1 and g is at chunk g * range_chunks of the KV head. Where that is inside of a
/// tile, the boundary moves to an offset at which the tile may be split, or to one of the tile's ends.
struct KvSplit {
  static constexpr int32_t kNeverSplit = INT32_MAX;

  int64_t range_chunks;           // of a work range, before its boundaries move
  int32_t min_chunks;             // of a split
  int32_t max_unsplit_chunks;     // tiles of at most this many chunks are never split
  int32_t num_ranges;             // work ranges per KV head
  int32_t max_fixed_splits;       // batch_invariant: maximum fixed-size splits per tile; else 0
  int32_t min_fixed_split_shift;  // batch_invariant: log2 of the minimum chunks of a fixed-size split
  int32_t is_aligned;             // whether every tile begins with a work range

  /// batch_invariant: log2 of the chunks per fixed-size split of a tile of `chunks`.
  __device__ __forceinline__ int32_t fixed_split_shift(int32_t chunks) const {
    int32_t shift = min_fixed_split_shift;
    while (max_fixed_splits << shift < chunks) ++shift;
    return shift;
  }
  /// batch_invariant: fixed-size splits of a tile of `chunks`.
  __device__ __forceinline__ int32_t num_fixed_splits(int32_t chunks) const {
    const int32_t shift = fixed_split_shift(chunks);
    return (chunks + (1 << shift) - 1) >> shift;
  }

  /// The offsets in a tile, `first` to `last`, from which a boundary moves to the nearest multiple of 2^shift. From an
  /// offset before `first` or after `last` it moves to the tile's nearer end.
  struct InnerOffsets {
    int32_t first;
    int32_t last;
    int32_t shift;

    /// The nearest multiple of 2^shift, divided by 2^shift.
    __device__ __forceinline__ int32_t round(int32_t offset) const { return (offset + (1 << shift) / 2) >> shift; }
  };
  /// For a tile of `chunks`. If it must stay whole, `last` is less than `first`.
  __device__ __forceinline__ InnerOffsets inner_offsets(int32_t chunks) const {
    if (chunks <= max_unsplit_chunks) {
      // An aligned range has the whole tile, which may be longer than the range.
      const int32_t middle = is_aligned != 0 ? 1 : (chunks + 1) / 2;
      return InnerOffsets{middle, middle - 1, 0};
    }
    if (max_fixed_splits == 0) return InnerOffsets{min_chunks, chunks - min_chunks, 0};
    const int32_t shift = fixed_split_shift(chunks), half = (1 << shift) / 2;
    return InnerOffsets{half, min((num_fixed_splits(chunks) << shift) - half, chunks) - 1, shift};
  }

  /// The offset to which a boundary at `offset` moves in a tile of `chunks`: 0 and `chunks` are the tile's ends.
  __device__ __forceinline__ int32_t move_boundary(int32_t offset, int32_t chunks) const {
    const InnerOffsets inner = inner_offsets(chunks);
    if (offset < inner.first) return 0;
    return offset > inner.last ? chunks : inner.round(offset) << inner.shift;
  }

  /// Aligned: work ranges of `chunks_per_range` that have a part of a tile of `chunks`, by the rules of
  /// `move_boundary`.
  __device__ __forceinline__ int32_t num_splits(int32_t chunks, int32_t chunks_per_range) const {
    return chunks <= max_unsplit_chunks ? 1 : 1 + divide(chunks - min_chunks, chunks_per_range);
  }

  /// The work ranges that start inside of a tile: `first` to `last`, none if `last` is less than `first`.
  struct Ranges {
    int64_t first;
    int64_t last;
  };
  __device__ __forceinline__ Ranges ranges_starting_in(int64_t tile_begin, int32_t chunks) const {
    const InnerOffsets inner = inner_offsets(chunks);
    return Ranges{divide_up<int64_t>(tile_begin + inner.first, range_chunks),
                  divide(tile_begin + inner.last, range_chunks)};
  }

  /// batch_invariant: fixed-size splits before the first boundary inside of the tile; 0 if the tile is not split.
  __device__ __forceinline__ int32_t fixed_splits_before_boundary(int64_t tile_begin, int32_t chunks) const {
    const InnerOffsets inner = inner_offsets(chunks);
    const int64_t offset = divide_up<int64_t>(tile_begin + inner.first, range_chunks) * range_chunks - tile_begin;
    return offset > inner.last ? 0 : inner.round(static_cast<int32_t>(offset));
  }
  /// batch_invariant: partials of the tile in the workspace. The fixed-size splits before the first boundary are merged
  /// into one; each one after it has its own.
  __device__ __forceinline__ int32_t num_partials(int64_t tile_begin, int32_t chunks) const {
    const int32_t merged = fixed_splits_before_boundary(tile_begin, chunks);
    return merged == 0 ? 0 : 1 + num_fixed_splits(chunks) - merged;
  }
};

}  // namespace xa
