// Tile shapes of the portable attention kernels, by work shape, element type and head dimension (the tiles of
// variants.toml), and their shared memory.
//
// prefill:       each warp has its own rows; all warps read the same blocks of keys. prefill_scales is for rows with
//                scales past 256 columns, which leave no room for as many keys.
// decode:        the warps share 16 rows; warp w has every kKeyWarps-th block of keys. Their states are merged.
// Past 256 columns, the accumulators of a row do not fit one warp: several warps have the same rows and keys but
// different columns (column_warps.cuh).
// decode_8rows:  decode of 8-bit K and V whose warps share 8 rows.
// decode_8warps: decode with 8 warps, for GPUs that give a CTA 163 KB of shared memory.
// fused:         decode in the CTAs of Hopper's prefill (hopper/fused.cuh).
//
// Shared memory: the query rows, each followed by 16 unused bytes, then the rings (one per CTA in prefill, one per warp
// in decode), each of kStages blocks of K and as many of V (shared_rows.cuh) and, where rows have them, their scales.
// At the end of a work tile in decode, the warps' states replace both. What outlives a work tile follows: the CTA's
// WorkTile; in decode its WorkRange; with fp8 the factors of the query rows; in fused the rings' mbarriers; with
// batch_invariant the memory of FixedSplits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "fp8.cuh"
#include "shared_rows.cuh"
#include "tiles/attention.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// `T` is the operand type of the products, `Stored` the element type of K and V.
template <typename Shape, typename T, typename Stored, int kHeadDim_>
struct TileShape : tiles::Attention<Shape, sizeof(Stored), kHeadDim_> {
  using Config = tiles::Attention<Shape, sizeof(Stored), kHeadDim_>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarps = Config::kRowWarps * Config::kKeyWarps * Config::kColumnWarps;
  /// Columns of Q, K, V and O of a warp.
  static constexpr int kWarpColumns = kHeadDim / Config::kColumnWarps;
  static constexpr int kThreads = 32 * kWarps;
  /// Row tiles per warp, and rows of each.
  static constexpr int kTileRows = Config::kWarpRows < 16 ? 8 : 16, kRowTiles = Config::kWarpRows / kTileRows;
  static constexpr int kRows = Config::kWarpRows * Config::kRowWarps;
  /// Whether the keys of a tile are divided, between warps or between CTAs: all shapes but those of prefill.
  static constexpr bool kSplitsKeys =
      !std::is_same_v<Shape, tiles::shape_prefill> && !std::is_same_v<Shape, tiles::shape_prefill_scales>;
  static constexpr int kRings = kSplitsKeys ? kWarps : 1;
  /// Prefill: rows of a block that one warp copies.
  static constexpr int kKeysPerLoad = Config::kKeys / kWarps;

  /// Whether K and V have elements of 8 bits: fp8, or int8 with scales.
  static constexpr bool kIsFp8 = sizeof(Stored) == 1;
  static constexpr bool kHasTokenScales = xa::kHasTokenScales<Stored>;
  static constexpr int kQueryRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kQueryPitch = kQueryRowBytes + 16;
  /// Decode: whether a warp keeps the query rows in registers.
  static constexpr bool kHoldsQuery = kWarpColumns * sizeof(T) <= 256;
  /// Decode of 8-bit K and V: whether a lane keeps the addresses of its rows in registers.
  static constexpr bool kHoldsAddresses = kTileRows == 8;
  /// Bytes of a row in a ring. A ring of decode has its warp's columns only.
  static constexpr int kRowBytes = (kSplitsKeys ? kWarpColumns : kHeadDim) * static_cast<int>(sizeof(Stored));
  static constexpr bool kLoadsByTma = std::is_same_v<Shape, tiles::shape_fused>;
  /// Prefill is bound by arithmetic and registers: padded rows need the least address arithmetic. Decode is bound by
  /// memory: swizzled rows keep a 128-byte line of global memory in one line of shared memory.
  using Rows = std::conditional_t<kLoadsByTma, SwizzleAtomRows<kRowBytes>,
                                  std::conditional_t<kSplitsKeys, SwizzledRows<kRowBytes>, PaddedRows<kRowBytes>>>;
  static constexpr int kBlockBytes = Config::kKeys * Rows::kPitch;
  /// Scales of the keys of a stage, K's and V's; a ring's blocks are followed by them (token_scales.cuh).
  static constexpr int kScaleBytes = kHasTokenScales ? 8 * Config::kKeys : 0;
  static constexpr int kRingBytes = Config::kStages * (2 * kBlockBytes + kScaleBytes);
  static constexpr int kQueryBytes = kRows * kQueryPitch;
  static constexpr int kRingsOffset = kLoadsByTma ? (kQueryBytes + 1023) / 1024 * 1024 : kQueryBytes;
  static constexpr int kStreamBytes = kRingsOffset + kRings * kRingBytes;

  /// The warps' states in decode: f32 rows with 4 spare columns, then (max, sum) of each row and warp. They replace
  /// query rows and rings.
  static constexpr int kWarpStatesPitch = kHeadDim + 4;
  static constexpr int kWarpStatesBytes = kSplitsKeys ? Config::kKeyWarps * kRows * (kWarpStatesPitch + 2) * 4 : 0;

  static constexpr int kWorkTileOffset = kStreamBytes > kWarpStatesBytes ? kStreamBytes : kWarpStatesBytes;
  static constexpr int kWorkRangeOffset = kWorkTileOffset + static_cast<int>(sizeof(WorkTile));
  /// Factors of the query rows (query_rows.cuh).
  static constexpr int kFactorsOffset = kWorkRangeOffset + (kSplitsKeys ? static_cast<int>(sizeof(WorkRange)) : 0);
  /// A lane reads those of rows lane / 4 and lane / 4 + 8.
  static constexpr int kFactorBytes = kIsFp8 ? 4 * (kRows < 16 ? 16 : kRows) : 0;
  /// One mbarrier for each stage of each ring.
  static constexpr int kBarriersOffset = kFactorsOffset + kFactorBytes;

  /// FixedSplits (fixed_splits.cuh): only launches with batch_invariant have this memory. The first merged rows take
  /// the place of the query rows if these are in registers.
  static constexpr int kFixedSplitsOffset = kBarriersOffset + (kLoadsByTma ? kRings * 8 * Config::kStages : 0);
  /// Whether a warp's ring goes on loading from one fixed-size split to the next: a stage has room for the warp's
  /// output, and registers suffice. Elsewhere each fixed-size split starts anew.
  static constexpr bool kLoadsAcrossSplits =
      2 * kBlockBytes >= kTileRows * kWarpColumns * 4 && kWarpColumns * sizeof(T) <= 512;
  static constexpr int kMergedRowsInQuery = kHoldsQuery ? kRows / 2 : 0;
  static constexpr int kFixedSplitsBytes =
      kSplitsKeys ? (kRows - kMergedRowsInQuery) * kHeadDim * 4 + (2 + Config::kKeyWarps) * kRows * 8 + 32 : 0;

  static constexpr int kMaxKilobytes =
      std::is_same_v<Shape, tiles::shape_fused> ? 227 : (std::is_same_v<Shape, tiles::shape_decode_8warps> ? 163 : 99);
  static_assert(Config::kRowWarps == 1 || Config::kKeyWarps == 1, "warps divide either rows or keys");
  static_assert(Config::kColumnWarps == 1 || Config::kKeyWarps == 1, "column warps add up scores of the same keys");
  static_assert(
      Config::kSharedBytes == kFixedSplitsOffset - kRings * Config::kStages * kScaleBytes + (kLoadsByTma ? 1024 : 0),
      "shared_bytes in variants.toml is what the launch asks for, besides token scales; TMA boxes are aligned "
      "to 1024 bytes");
  static_assert(kFixedSplitsOffset % 16 == 0, "merged rows are stored as float4");
  static_assert(!kLoadsByTma || (kBarriersOffset % 8 == 0 && kBarriersOffset >= kWarpStatesBytes),
                "mbarriers are aligned to 8 bytes and lie past the warps' states");
  static_assert(kRingsOffset % 128 == 0 && kRingBytes % 128 == 0, "rings begin at a multiple of 128 bytes");
  static_assert(kFixedSplitsOffset <= kMaxKilobytes * 1024,
                "sm_86, sm_89 and sm_120 give a CTA 99 KB, sm_80 163, sm_90 227");
  /// The longest rows of f32, or with scales, leave no room: elsewhere, prefill takes all sequences of such calls.
  static constexpr int kMaxFixedSplitsKilobytes =
      Config::kColumnWarps > 1 && (sizeof(Stored) == 4 || kHasTokenScales) ? 163 : kMaxKilobytes;
  static_assert(kFixedSplitsOffset + kFixedSplitsBytes <= kMaxFixedSplitsKilobytes * 1024,
                "batch_invariant needs kFixedSplitsBytes more");
};

}  // namespace xa
