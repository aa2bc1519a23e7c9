// Trees of query rows: `tree_mask`, which is device data. Among the newest len_q keys of a sequence, those of its own
// query rows, a row attends to the keys whose bits are set, in place of the causal mask. All older keys are visible as
// far as windows and k_start and k_end let them.
#pragma once

#include <cstdint>

#include "key_ranges.cuh"
#include "params/tree_mask.cuh"
#include "work_tile.cuh"

namespace xa {

/// The bits of the sequence of a tile.
class TreeMask {
 public:
  __device__ __forceinline__ TreeMask(const TreeMaskSource& source, const QoTile& tile)
      : words_(nullptr), query_words_(source.query_words), first_key_(tile.len_k - tile.len_q) {
    if (source.words == nullptr || tile.len_q > source.max_queries) return;
    words_ = source.words + static_cast<int64_t>(tile.sequence) * source.max_queries * query_words_;
  }

  /// Whether the sequence has a tree.
  __device__ __forceinline__ bool exists() const { return words_ != nullptr; }
  /// The key of bit 0. It is negative if the sequence has more queries than keys.
  __device__ __forceinline__ int32_t first_key() const { return first_key_; }

  /// Bit i is set unless the tree hides key `first` + i of the sequence from its query `query`.
  __device__ __forceinline__ uint64_t among_64(int32_t query, int32_t first) const {
    const int32_t offset = first - first_key_;
    if (!exists() || offset <= -64) return ~uint64_t{0};
    const int32_t older = max(-offset, 0), bit = max(offset, 0), shift = bit % 32;
    const uint32_t* const words = words_ + static_cast<int64_t>(query) * query_words_;
    const uint64_t low = word(words, bit / 32) | word(words, bit / 32 + 1) << 32;
    const uint64_t bits = shift == 0 ? low : low >> shift | word(words, bit / 32 + 2) << (64 - shift);
    return bits << older | ~(~uint64_t{0} << older);
  }

 private:
  __device__ __forceinline__ uint64_t word(const uint32_t* words, int32_t index) const {
    return index < query_words_ ? __ldg(words + index) : 0;
  }

  const uint32_t* words_;
  int32_t query_words_;
  int32_t first_key_;
};

/// The masks of the rows of a tile: ranges in shared memory, as in RowRanges, and the bits of a tree. Few blocks need
/// them, so that what follows from the tile is computed again there instead of being kept in registers.
template <int kRows>
class RowMasks {
  const RowMaskParams& params_;
  const QoTile& tile_;
  const RowRange* ranges_;

 public:
  __device__ __forceinline__ RowMasks(const RowMaskParams& params, const QoTile& tile, const RowRange* ranges)
      : params_(params), tile_(tile), ranges_(ranges) {}

  /// Bit i is set if row `row` attends to key `first` + i.
  __device__ __forceinline__ uint64_t among_64(int32_t row, int32_t first) const {
    // Rows past the tile's last have no keys, and the tree no bits for them.
    const uint64_t keys = ranges_[row].among_64(first);
    if (keys == 0) return 0;
    const int32_t query = PackedRows(params_.attention, tile_.first_row).query(row);
    return keys & TreeMask(params_.tree, tile_).among_64(query, first);
  }
  /// As of RowRanges, by the ranges alone.
  template <int kBlock>
  __device__ __forceinline__ int32_t next_block(int32_t from, int32_t end) const {
    return RowRanges<kRows>(ranges_).template next_block<kBlock>(from, end);
  }
  /// Bit i is set if a row attends to key `first` + i.
  __device__ __forceinline__ uint64_t attended_64(int32_t first) const {
    uint64_t keys = 0;
#pragma unroll 1
    for (int32_t row = threadIdx.x % 32; row < kRows; row += 32) keys |= among_64(row, first);
    __syncwarp();
    const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(keys));
    return static_cast<uint64_t>(__reduce_or_sync(~0u, static_cast<uint32_t>(keys >> 32))) << 32 | low;
  }
};

/// Sets scores of keys outside of the rows' masks to -inf, as for RowRanges.
template <int kKeyTiles, int kRows>
__device__ __forceinline__ void mask_keys(float (&scores)[kKeyTiles][4], const RowMasks<kRows>& masks,
                                          int32_t first_row, int32_t first_key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = first_row + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
    const uint64_t keys = masks.among_64(row, first_key) >> 2 * (threadIdx.x % 4);
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if ((keys >> (8 * block + i) & 1) == 0) scores[block][2 * half + i] = -INFINITY;
      }
    }
  }
}

}  // namespace xa
