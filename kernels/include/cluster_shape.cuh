// The tile of cluster_decode.cu and its shared memory: query rows and rings as in decode (tile_shape.cuh), which the
// warps' states replace at the end of a tile; then what outlives a tile: a WorkTile per warp, the sequences, for
// 8-bit K and V the factors of the query rows, and what the CTA receives of split tiles.
#pragma once

#include <cstdint>

#include "cluster_call.cuh"
#include "cluster_merge.cuh"
#include "cluster_partition.cuh"
#include "fp8.cuh"
#include "shared_rows.cuh"
#include "tiles/cluster_decode.cuh"
#include "work_tile.cuh"

namespace xa {

/// What a CTA keeps in shared memory while it computes a tile.
template <int kWarps, int kRows, int kKvChunkKeys>
struct ClusterWork {
  WorkTile work_tiles[kWarps];  // of each warp; all have the same tile
  LaneSequence<kRows, kKvChunkKeys> sequences[32];
  SplitTile split_tiles[2];  // one that begins before the CTA's range, one that goes on after it
  uint64_t received[2];      // mbarriers: whether the other parts of the CTA's slices of these have arrived
};

/// `T` is the operand type of the products, `Stored` the element type of K and V.
template <typename T, typename Stored, int kHeadDim_, typename Call>
struct ClusterShape : tiles::ClusterDecode<sizeof(Stored), kHeadDim_> {
  using Config = tiles::ClusterDecode<sizeof(Stored), kHeadDim_>;
  static constexpr bool kIsPlain = Call::kIsPlain, kHasClusterPerSequence = Call::kHasClusterPerSequence;
  static constexpr int kHeadDim = kHeadDim_, kRowTiles = 1, kRows = kIsPlain || sizeof(Stored) == 1 ? 8 : 16;
  static constexpr int kWarps = Config::kKeyWarps, kThreads = 32 * kWarps;
  static constexpr int kKvChunkKeys = kWarps * Config::kKeys;
  /// As in TileShape (tile_shape.cuh).
  static constexpr bool kIsFp8 = sizeof(Stored) == 1, kHasTokenScales = xa::kHasTokenScales<Stored>;
  static constexpr bool kAppendsKv = !kIsFp8;
  static constexpr int kTileRows = kIsFp8 ? kRows : 16, kColumnWarps = 1;
  static constexpr bool kHoldsAddresses = true;

  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Stored));
  static constexpr int kQueryRowBytes = kHeadDim * static_cast<int>(sizeof(T)), kQueryPitch = kQueryRowBytes + 16;
  using Rows = SwizzledRows<kRowBytes>;
  static constexpr int kBlockBytes = Config::kKeys * Rows::kPitch;
  /// Of the keys of a stage, as in TileShape.
  static constexpr int kScaleBytes = kHasTokenScales ? 8 * Config::kKeys : 0;
  static constexpr int kRingBytes = Config::kStages * (2 * kBlockBytes + kScaleBytes);
  static constexpr int kRingsOffset = kRows * kQueryPitch;
  static constexpr int kStreamBytes = kRingsOffset + kWarps * kRingBytes;
  /// f32 rows with 4 spare columns, then (max, sum) of each row and warp.
  static constexpr int kWarpStatesPitch = kHeadDim + 4;
  static constexpr int kWarpStatesBytes = kWarps * kRows * (kWarpStatesPitch + 2) * 4;

  using Work = ClusterWork<kWarps, kRows, kKvChunkKeys>;
  /// An item of a result: four columns of a row.
  static constexpr int kRowItems = kHeadDim / 4;
  using Buffer = MergeBuffer<kRows * kRowItems>;
  static constexpr int kWorkOffset = kStreamBytes;
  /// 8-bit K and V: factors of the query rows (query_rows.cuh), of which a lane reads two.
  static constexpr int kFactorsOffset = kWorkOffset + static_cast<int>(sizeof(Work));
  static constexpr int kFactorBytes = kIsFp8 ? 4 * 16 : 0;
  static constexpr int kBuffersOffset = (kFactorsOffset + kFactorBytes + 15) / 16 * 16;

  static_assert(kStreamBytes >= kWarpStatesBytes && kStreamBytes % 16 == 0, "the warps' states replace rows and rings");
  static_assert(kRingsOffset % 128 == 0 && kRingBytes % 128 == 0, "rings begin at a multiple of 128 bytes");
  static constexpr int kUsedBytes = kBuffersOffset + 2 * Buffer::kBytes;
  static constexpr bool kIsLargest = !kIsPlain && kHasTokenScales == kIsFp8;
  static_assert(kIsLargest ? Config::kSharedBytes == kUsedBytes : Config::kSharedBytes >= kUsedBytes,
                "shared_bytes in variants.toml is what the launch asks for");
};

}  // namespace xa
