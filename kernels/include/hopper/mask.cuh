// The mask of a prefill warp's scores.
#pragma once

#include <cmath>
#include <cstdint>

#include "hopper/shape.cuh"
#include "key_ranges.cuh"
#include "params/hopper_prefill.cuh"
#include "tree_mask.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Bit i says whether column i of a lane's row of scores, which is column 8 (i / 2) + i % 2 after its first one, is
/// before column `end`.
template <int kKeyTiles>
__device__ __forceinline__ uint32_t columns_before(int32_t end) {
  static_assert(2 * kKeyTiles <= 32, "a bit per column");
  const int32_t columns = clamp(end, 0, 8 * kKeyTiles), count = columns / 8 * 2 + min(columns % 8, 2);
  return count == 32 ? ~0u : (1u << count) - 1;
}

/// Bits 0, 1, 8, 9, 16, ... of `keys`, those of a lane's columns, next to each other.
__device__ __forceinline__ uint32_t lane_columns(uint32_t keys) {
  keys &= 0x03030303u;
  return (keys | keys >> 6 | keys >> 12 | keys >> 18) & 0xff;
}

/// Which columns of a lane's two rows are visible, as `columns_before`.
struct VisibleColumns {
  uint32_t bits[2];
};

/// The columns of query `query` of a tile, of which the first one is key `first_column`. The end comes before the
/// begin: in the other order ptxas spills at D 256.
template <int kKeyTiles>
__device__ __forceinline__ uint32_t columns_of_query(const HopperPrefillParams&, const PrefillTile&,
                                                     const Visibility& visibility, int32_t query,
                                                     int32_t first_column) {
  return columns_before<kKeyTiles>(visibility.end(query) - first_column) &
         ~columns_before<kKeyTiles>(visibility.begin(query) - first_column);
}
/// Rows past the tile's last one, which are not stored, have the columns of its last query.
template <int kKeyTiles>
__device__ __forceinline__ uint32_t columns_of_query(const HopperPrefillParams&, const KeyRangeTile& tile,
                                                     const Visibility& visibility, int32_t query,
                                                     int32_t first_column) {
  const RowRange keys = row_range(tile.ranges, visibility, tile.work.tile, min(query, tile.num_queries - 1));
  return columns_before<kKeyTiles>(keys.end - first_column) & ~columns_before<kKeyTiles>(keys.begin - first_column);
}

/// The masks of the queries of a tile, which are numbered as in their sequence.
class TileRowMasks {
 public:
  __device__ __forceinline__ TileRowMasks(const HopperPrefillParams& prefill, const QoTile& sequence)
      : ranges_(reinterpret_cast<const HopperRowMaskParams&>(prefill).ranges),
        sequence_(sequence),
        visibility_(prefill.attention, sequence, sequence.len_k - sequence.len_q),
        tree_(reinterpret_cast<const HopperRowMaskParams&>(prefill).tree, sequence) {
    // A tree takes the place of the causal mask.
    if (tree_.exists()) visibility_.window_right = -1;
  }
  __device__ __forceinline__ const TreeMask& tree() const { return tree_; }
  /// The keys of a query, of which a tree may hide some. `first_token` is the row of q of query 0.
  __device__ __forceinline__ RowRange range(int32_t query, int32_t first_token) const {
    QoTile from = sequence_;
    from.first_token = first_token;
    return row_range(ranges_, visibility_, from, query);
  }
  /// Bit i is set if the query attends to key `first` + i.
  __device__ __forceinline__ uint64_t among_64(int32_t query, int32_t first_token, int32_t first) const {
    const uint64_t keys = range(query, first_token).among_64(first);
    return keys == 0 ? 0 : keys & tree_.among_64(query, first);
  }

 private:
  const KeyRangeSource& ranges_;
  const QoTile& sequence_;
  Visibility visibility_;
  TreeMask tree_;
};

/// Likewise.
template <int kKeyTiles>
__device__ __forceinline__ uint32_t columns_of_query(const HopperPrefillParams& prefill, const RowMaskTile& tile,
                                                     const Visibility&, int32_t query, int32_t first_column) {
  const TileRowMasks masks(prefill, tile.work.tile);
  const int32_t first_query = tile.first_query(), row = min(first_query + query, tile.work.tile.len_q - 1);
  const RowRange keys = masks.range(row, tile.work.tile.first_token - first_query);
  uint32_t bits =
      columns_before<kKeyTiles>(keys.end - first_column) & ~columns_before<kKeyTiles>(keys.begin - first_column);
  if (masks.tree().exists()) {
#pragma unroll
    for (int first = 0; first < kKeyTiles; first += 8) {
      const uint64_t among = masks.tree().among_64(row, first_column + 8 * first);
      const uint32_t columns =
          lane_columns(static_cast<uint32_t>(among)) | lane_columns(static_cast<uint32_t>(among >> 32)) << 8;
      bits &= columns << 2 * first | ~(0xffffu << 2 * first);
    }
  }
  return bits;
}

/// Bit i is set if a row of the tile attends to key `first` + i. Every lane calls this.
__device__ __forceinline__ uint64_t attended_64(const HopperPrefillParams& prefill, const RowMaskTile& tile,
                                                int32_t first) {
  const TileRowMasks masks(prefill, tile.work.tile);
  const int32_t first_query = tile.first_query();
  const int32_t end_query = first_query + query_of_row(prefill, tile.work.tile.num_rows - 1) + 1;
  uint64_t keys = 0;
#pragma unroll 1
  for (int32_t query = first_query + static_cast<int32_t>(threadIdx.x % 32); query < end_query; query += 32) {
    keys |= masks.among_64(query, tile.work.tile.first_token - first_query, first);
  }
  __syncwarp();
  const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(keys));
  return static_cast<uint64_t>(__reduce_or_sync(~0u, static_cast<uint32_t>(keys >> 32))) << 32 | low;
}

/// Those of a block whose first key is `first_key`. With kAddsFirstRow, the tile's first row, which is 0, is read and
/// added: then rows are not kept in registers.
template <int kKeyTiles, bool kAddsFirstRow = false, typename Tile>
__device__ __forceinline__ VisibleColumns visible_columns(const HopperPrefillParams& prefill, const Tile& tile,
                                                          int32_t first_row, int32_t first_key) {
  const Visibility visibility(prefill.attention, tile.work.tile, tile.shift);
  const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
  VisibleColumns columns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t tile_row = kAddsFirstRow ? tile.work.tile.first_row : 0;
    const int32_t query = query_of_row(prefill, tile_row + first_row + 8 * half + threadIdx.x % 32 / 4);
    columns.bits[half] = columns_of_query<kKeyTiles>(prefill, tile, visibility, query, first_column);
  }
  return columns;
}

/// Sets the scores of the other columns to -inf. The bits of a mask become predicates, seven by one instruction, where
/// a comparison per score takes as long as its selection.
template <int kKeyTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kKeyTiles][4], const VisibleColumns& columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      if ((columns.bits[half] & 1u << i) == 0) scores[i / 2][2 * half + i % 2] = -INFINITY;
    }
  }
}

/// Sets the scores of masked keys to -inf, in a block whose first key is `first_key`.
template <bool kAddsFirstRow = false, int kKeyTiles, typename Tile>
__device__ __forceinline__ void mask_scores(float (&scores)[kKeyTiles][4], const HopperPrefillParams& prefill,
                                            const Tile& tile, int32_t first_row, int32_t first_key) {
  mask_scores(scores, visible_columns<kKeyTiles, kAddsFirstRow>(prefill, tile, first_row, first_key));
}

}  // namespace xa::hopper
