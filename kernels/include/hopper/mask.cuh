// The mask of a prefill warp's scores.
#pragma once

#include <cmath>
#include <cstdint>

#include "hopper/shape.cuh"
#include "key_ranges.cuh"
#include "params/hopper_prefill.cuh"
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

/// Which columns of a lane's two rows are visible, as `columns_before`.
struct VisibleColumns {
  uint32_t bits[2];
};

/// The columns of query `query` of a tile, of which the first one is key `first_column`. The end comes before the
/// begin: in the other order ptxas spills at D 256.
template <int kKeyTiles>
__device__ __forceinline__ uint32_t columns_of_query(const PrefillTile&, const Visibility& visibility, int32_t query,
                                                     int32_t first_column) {
  return columns_before<kKeyTiles>(visibility.end(query) - first_column) &
         ~columns_before<kKeyTiles>(visibility.begin(query) - first_column);
}
/// Rows past the tile's last one, which are not stored, have the columns of its last query.
template <int kKeyTiles>
__device__ __forceinline__ uint32_t columns_of_query(const KeyRangeTile& tile, const Visibility& visibility,
                                                     int32_t query, int32_t first_column) {
  const RowRange keys = row_range(tile.ranges, visibility, tile.work.tile, min(query, tile.num_queries - 1));
  return columns_before<kKeyTiles>(keys.end - first_column) & ~columns_before<kKeyTiles>(keys.begin - first_column);
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
    columns.bits[half] = columns_of_query<kKeyTiles>(tile, visibility, query, first_column);
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
