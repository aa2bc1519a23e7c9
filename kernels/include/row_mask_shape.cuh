// The tile of attention_row_masks.cu and its shared memory: the query rows and the ring of the CTA as in prefill
// (tile_shape.cuh); then what outlives a work tile: WorkTile, WorkRange, the rows' ranges of keys and, with fp8, the
// factors of the query rows; with batch_invariant KeptStates.
#pragma once

#include <cstdint>

#include "key_ranges.cuh"
#include "shared_rows.cuh"
#include "tiles/row_masks.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// `T` is the operand type of the products, `Stored` the element type of K and V.
template <typename T, typename Stored, int kHeadDim_>
struct RowMaskShape : tiles::RowMasks<sizeof(Stored), kHeadDim_> {
  using Config = tiles::RowMasks<sizeof(Stored), kHeadDim_>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRowTiles = 1;
  /// Columns of Q, K, V and O of a warp, which has 16 rows.
  static constexpr int kWarpColumns = kHeadDim / Config::kColumnWarps, kRows = 16 * kWarps / Config::kColumnWarps;
  /// Rows of a block that one warp copies.
  static constexpr int kKeysPerLoad = Config::kKeys / kWarps;
  static constexpr bool kIsFp8 = sizeof(Stored) == 1;

  static constexpr int kQueryRowBytes = kHeadDim * static_cast<int>(sizeof(T)), kQueryPitch = kQueryRowBytes + 16;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Stored));
  using Rows = PaddedRows<kRowBytes>;
  static constexpr int kBlockBytes = Config::kKeys * Rows::kPitch;
  static constexpr int kRingsOffset = kRows * kQueryPitch;
  static constexpr int kWorkTileOffset = kRingsOffset + 2 * Config::kStages * kBlockBytes;
  static constexpr int kWorkRangeOffset = kWorkTileOffset + static_cast<int>(sizeof(WorkTile));
  static constexpr int kRangesOffset = kWorkRangeOffset + static_cast<int>(sizeof(WorkRange));
  static constexpr int kFactorsOffset = kRangesOffset + kRows * static_cast<int>(sizeof(RowRange));
  static constexpr int kKeptStatesOffset = kFactorsOffset + (kIsFp8 ? 4 * kRows : 0);
  /// Only launches with fixed-size splits have this memory: the elements of a thread's SoftmaxState.
  static constexpr int kKeptStatesBytes = kThreads * (4 + kWarpColumns / 2) * 4;
  /// Elsewhere batch_invariant leaves tiles whole.
  static constexpr bool kHasFixedSplits = kKeptStatesOffset + kKeptStatesBytes <= 163 * 1024;

  static_assert(Config::kSharedBytes == kKeptStatesOffset, "shared_bytes in variants.toml is what the launch asks for");
  static_assert(Config::kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a CTA 99 KB");
};

}  // namespace xa
