// Tile shapes of multi-head latent attention (the tiles of variants.toml), and their shared memory.
//
// A CTA has kRows packed rows, which are query heads of adjacent queries, and all warps read the same blocks of latent
// rows. S = Q K^T and O += P V divide them differently: P goes through shared memory.
//
//            keys                            value columns
//         |  16  |  16  |            | 128 | 128 | 128 | 128 |
//  16 rows|  w0  |  w4  |    32 rows |  w0 |  w2 |  w4 |  w6 |       large: 64 rows, 8 warps, 32 keys
//         |  w1  |  w5  |            |  w1 |  w3 |  w5 |  w7 |       small: 32 rows, 4 warps, 16 keys
//         |  w2  |  w6  |
//         |  w3  |  w7  |
//
// Tiles of few rows would leave most of these warps without work. Their warps are kKeyGroups groups instead, and each
// group attends to blocks of its own, block i being that of group i % kKeyGroups. They meet at the end of the tile,
// where their states are merged:
//
//            keys            value columns
//         |   16   |   16   | 128 | 128 | 128 | 128 |
//  16 rows| w0, w2 | w1, w3 | w0  | w1  | w2  | w3  |      rows_16: 16 rows, groups of four warps, 32 keys
//
// Two warps share the scores of 16 keys: each computes the products of half of the columns.
//
// Shared memory: the query rows; for each group kStages blocks of latent rows, P, maxima and sums of rows; fp8: a block
// that is converted to the queries' type, or with groups the factors of the queries' scores; the CTA's WorkTile and
// WorkRange.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "fp8.cuh"
#include "shared_rows.cuh"
#include "tiles/mla.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::mla {

// Values of the axis `operands` of variants.toml: the types of q and of the cache. e4m3fn is converted by shifts, which
// every GPU can do: a block is converted once for all heads.
using types_f16 = OperandTypes<F16, F16>;
using types_bf16 = OperandTypes<Bf16, Bf16>;
using types_f16_fp8 = OperandTypes<F16, Fp8<true>>;
using types_bf16_fp8 = OperandTypes<Bf16, Fp8<true>>;
using types_f32 = OperandTypes<F32, F32>;
/// With groups, q of either type and fragments of the rows are converted to f16 in registers (tile_math.cuh).
using types_fp8 = operands_fp8;
using types_fp8_shifted = operands_fp8_shifted;

/// Columns of a latent row, and of those the values. Other sizes are padded with zeros in shared memory.
constexpr int kLatentDim = 576, kLatentValueDim = 512;

template <typename Config_, typename T, typename Stored>
struct Shape : Config_ {
  using Config = Config_;
  static constexpr bool kIsFp8 = sizeof(Stored) == 1;
  /// Whether 8-bit rows are converted in registers, and not in shared memory for all warps.
  static constexpr bool kConvertsFragments = Config::kKeyGroups > 1;
  static constexpr int kRows = Config::kRows;
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kWarps = Config::kWarps;
  static constexpr int kThreads = 32 * kWarps, kHeadDim = kLatentDim;
  static constexpr int kKeyGroups = Config::kKeyGroups, kGroupWarps = kWarps / kKeyGroups;

  /// S = Q K^T: 16 rows and 16 keys per warp. Warps past these have no part in it.
  static constexpr int kScoreRowWarps = kRows / 16, kScoreKeyWarps = kKeys / 16;
  static constexpr int kScoreWarps = kScoreRowWarps * kScoreKeyWarps;
  /// Groups: warps that each compute a part of the sum over columns of the same scores.
  static constexpr int kSumWarps = kKeyGroups > 1 ? kGroupWarps / kScoreWarps : 1;
  /// float4 [2, kScoreWarps, 32]
  static constexpr int kSumBytes = (kSumWarps - 1) * kScoreWarps * 32 * 32;
  /// O += P V: kRowTiles x 16 rows and kColumns columns per warp.
  static constexpr int kRowTiles = kRows < 32 ? 1 : 2;
  static constexpr int kRowWarps = kRows / (16 * kRowTiles), kColumnWarps = kGroupWarps / kRowWarps;
  static constexpr int kColumns = kLatentValueDim / kColumnWarps;
  /// Latent rows of a block that one warp copies.
  static constexpr int kKeysPerLoad = kKeys / kGroupWarps;

  static constexpr int kQueryRowBytes = kLatentDim * static_cast<int>(sizeof(T));
  using Rows = PaddedRows<kQueryRowBytes>;
  static constexpr int kQueryPitch = Rows::kPitch;
  static constexpr int kQueryBytes = kRows * kQueryPitch;
  /// Blocks of latent rows as they are stored, and in the type of the products.
  using StoredRows = PaddedRows<kLatentDim* static_cast<int>(sizeof(Stored))>;
  static constexpr int kStageBytes = kKeys * StoredRows::kPitch;
  static constexpr int kConvertedBytes = kIsFp8 && !kConvertsFragments ? kKeys * Rows::kPitch : 0;
  static constexpr int kPPitch = kKeys * static_cast<int>(sizeof(T)) + 16;
  /// Those of the first group; each group's are kGroupBytes after the ones before.
  static constexpr int kStagesOffset = kQueryBytes;
  static constexpr int kConvertedOffset = kStagesOffset + Config::kStages * kStageBytes;
  static constexpr int kPOffset = kConvertedOffset + kConvertedBytes;
  /// f32 [kScoreKeyWarps + 1, kRows]: the maxima of a block; at the end the sums, then the maxima.
  static constexpr int kPBytes = kRows * kPPitch;
  static constexpr int kRowStatesOffset = kPOffset + (kPBytes > kSumBytes ? kPBytes : kSumBytes);
  static constexpr int kGroupBytes = kRowStatesOffset + 4 * (kScoreKeyWarps + 1) * kRows - kStagesOffset;
  /// f32 [kRows]
  static constexpr int kFactorsOffset = kStagesOffset + kKeyGroups * kGroupBytes;
  static constexpr int kWorkTileOffset = kFactorsOffset + (kConvertsFragments ? 4 * kRows : 0);
  static constexpr int kWorkRangeOffset = kWorkTileOffset + static_cast<int>(sizeof(WorkTile));

  /// At the end, the output in f32 takes the place of blocks, and with a single group of query rows too.
  static constexpr int kOutputPitch = 4 * (kLatentValueDim + 4);
  static constexpr int kOutputOffset = kKeyGroups > 1 ? kStagesOffset : 0;

  static_assert(kOutputOffset + kRows * kOutputPitch <= kPOffset);
  static_assert(kWarps % kKeyGroups == 0 && kScoreWarps <= kGroupWarps && kGroupWarps % kRowWarps == 0);
  static_assert(kRows % (16 * kRowTiles) == 0 && kKeys % kGroupWarps == 0 && kSumWarps <= 2);
  static_assert(kIsFp8 || !kConvertsFragments);
  static_assert(Config::kSharedBytes == kWorkRangeOffset + static_cast<int>(sizeof(WorkRange)),
                "shared_bytes in variants.toml is what the launch asks for");
};

}  // namespace xa::mla
