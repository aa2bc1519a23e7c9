// Tile shapes of the portable backward kernels, by element type and head dimension, and their shared memory.
//
// A CTA holds a block of kHeld rows of two operands in shared memory (dQ kernel: Q and dO; dK/dV kernel: K and V) and
// streams blocks of kBlock rows of the other two (K and V; Q and dO). Its warps are kRowWarps x kColumnWarps: warps of
// one row of that grid have the same rows of the block and divide the columns of the gradients. They also divide the
// columns of the scores if a streamed block is exactly kColumnWarps chunks (kExchanges); P and dS then go from warp to
// warp through shared memory. Otherwise each of these warps computes all scores of its rows.
//
// Shared memory:
//
//     rows held (2 operands) | kStages blocks of streamed rows (2 operands) | exchanged P, dS | QueryRowStats |
//     dK/dV: ColumnRange of each key; with bounds of keys (shape_key_ranges), RowRange of each query row |
//     with a bias (shape_bias): the index of each query row in it, or kHasPlaces: QueryRowPlace of each query row of
//     two blocks; kStoresDs: where each query row is in dS (score_gradients.cuh); kShiftsBias: where the bias of each
//     query row begins | SequenceSegment | kStagesBias: the bias of kBiasStages blocks (staged_bias.cuh)
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/key_order.cuh"
#include "bwd/sequence_segment.cuh"
#include "bwd/shifted_bias_place.cuh"
#include "element.cuh"
#include "shared_rows.cuh"
#include "tiles/attention_bwd.cuh"

namespace xa {

/// The columns of `Rows` that one of kWarps warps has: every kWarps-th group of 32 bytes. Consecutive columns of a warp
/// are then a multiple of 32 kWarps bytes apart, so a step between them leaves the address bits alone that select the
/// warp, as Rows::moved requires.
template <typename Rows, int kWarps>
struct ColumnGroups : Rows {
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return Rows::moved(address, rows, chunks * kWarps);
  }
};

template <typename Gradient, typename Shape, typename T, int kHeadDim_>
struct BackwardShape : tiles::AttentionBwd<Gradient, Shape, sizeof(T), kHeadDim_> {
  using Config = tiles::AttentionBwd<Gradient, Shape, sizeof(T), kHeadDim_>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHoldsKeys = std::is_same_v<Gradient, tiles::gradient_dkdv>;
  /// Whether query rows have bounds of their keys (key_ranges.cuh).
  static constexpr bool kHasRanges = std::is_same_v<Shape, tiles::shape_key_ranges>;
  /// Whether pairs of rows and keys have a bias (score_bias.cuh).
  static constexpr bool kHasBias =
      std::is_same_v<Shape, tiles::shape_bias> || std::is_same_v<Shape, tiles::shape_bias_large> ||
      std::is_same_v<Shape, tiles::shape_bias_aligned> || std::is_same_v<Shape, tiles::shape_bias_shifted> ||
      std::is_same_v<Shape, tiles::shape_bias_f32> || std::is_same_v<Shape, tiles::shape_bias_f32_aligned> ||
      std::is_same_v<Shape, tiles::shape_bias_f32_own> || std::is_same_v<Shape, tiles::shape_bias_f32_own_small>;
  /// Whether the bias is of f32, and its gradient dS. Other shapes take f32 beside 16-bit operands by a branch, or do
  /// not.
  static constexpr bool kHasOwnF32Bias =
      std::is_same_v<Shape, tiles::shape_bias_f32_own> || std::is_same_v<Shape, tiles::shape_bias_f32_own_small>;
  /// Whether rows of one of f32 begin with chunks (aligned_f32_bias.cuh). dS is the gradient or in the workspace.
  static constexpr bool kHasAlignedF32Bias = std::is_same_v<Shape, tiles::shape_bias_f32_aligned>;
  static constexpr bool kHasF32Bias =
      kHasOwnF32Bias || kHasAlignedF32Bias || std::is_same_v<Shape, tiles::shape_bias_f32>;
  using Bias = std::conditional_t<kHasF32Bias, float, T>;
  /// Whether rows of the bias do not begin with chunks of 16 bytes, but are staged as if they did (shifted_bias.cuh).
  static constexpr bool kShiftsBias =
      (kHasF32Bias && !kHasAlignedF32Bias) || std::is_same_v<Shape, tiles::shape_bias_shifted>;
  /// Whether dS replaces the bias in shared memory, because it is its gradient or because that is f32.
  static constexpr bool kReplacesBias =
      kHasOwnF32Bias || kHasAlignedF32Bias || std::is_same_v<Shape, tiles::shape_bias_shifted>;
  using Ds = std::conditional_t<kReplacesBias, Bias, T>;
  /// Whether they begin with chunks (aligned_bias.cuh), or are staged so.
  static constexpr bool kHasAlignedBias =
      kShiftsBias || kHasAlignedF32Bias || std::is_same_v<Shape, tiles::shape_bias_aligned>;
  using Keys = std::conditional_t<kHasAlignedF32Bias, KeysOfRows,
                                  std::conditional_t<kHasAlignedBias && !kHoldsKeys, KeysOfLanes, KeysInOrder>>;
  static constexpr int kWarps = Config::kRowWarps * Config::kColumnWarps, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * Config::kRowTiles;
  /// Rows of the block that the CTA holds.
  static constexpr int kHeld = kWarpRows * Config::kRowWarps;
  /// Columns of the gradients that a warp computes.
  static constexpr int kColumns = kHeadDim / Config::kColumnWarps;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr bool kExchanges =
      Config::kColumnWarps > 1 && Config::kBlock / Config::kColumnWarps == Config::kChunk;
  /// Streamed rows that the CTA processes at a time.
  static constexpr int kAtOnce = kExchanges ? Config::kBlock : Config::kChunk;
  static_assert(kHasBias || !Config::kStagesBias);
  static_assert(!Config::kStoresDs || (kHoldsKeys && (kHasAlignedBias || (kHasBias && kExchanges))));
  using Rows = SwizzledRows<kRowBytes>;
  using Columns = ColumnGroups<Rows, Config::kColumnWarps>;

  static constexpr int kHeldBytes = kHeld * Rows::kPitch;
  static constexpr int kBlockBytes = Config::kBlock * Rows::kPitch;
  /// Streamed blocks: a stage is a block of K or Q, followed by one of V or dO.
  static constexpr int kStreamOffset = 2 * kHeldBytes;
  static constexpr int kExchangeOffset = kStreamOffset + 2 * Config::kStages * kBlockBytes;
  /// Exchanged matrices [kHeld, kBlock] of the operands' type: P and dS, or dS alone in the dQ kernel. 16 bytes of
  /// padding per row keep ldmatrix free of bank conflicts.
  static constexpr int kExchangePitch = Config::kBlock * static_cast<int>(sizeof(T)) + 16;
  static constexpr int kExchangeMatrix = kHeld * kExchangePitch;
  static constexpr int kExchangeBytes = kExchanges ? (kHoldsKeys ? 2 : 1) * kExchangeMatrix : 0;
  static constexpr int kQueryRows = kHoldsKeys ? Config::kStages * Config::kBlock : kHeld;
  static constexpr int kQueryRowsOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kColumnRangesOffset = kQueryRowsOffset + kQueryRows * static_cast<int>(sizeof(QueryRowStats));
  static constexpr int kRanges = kHasRanges ? kQueryRows : (kHoldsKeys ? kHeld : 0);
  static constexpr int kBiasRowsOffset = kColumnRangesOffset + kRanges * static_cast<int>(sizeof(ColumnRange));
  static constexpr int kBiasRows = kHasBias && !(kHasAlignedBias && kHoldsKeys) ? kQueryRows : 0;
  /// Whether there is a QueryRowPlace for each row of two blocks.
  static constexpr bool kHasPlaces = kHoldsKeys && kHasAlignedBias;
  static constexpr int kPlacesOffset =
      (kBiasRowsOffset + kBiasRows * static_cast<int>(sizeof(BiasRowIndex)) + 15) / 16 * 16;
  static constexpr int kPlaces = kHasPlaces ? 2 * Config::kBlock : 0;
  /// Its place in the bias: the first chunk of the held keys, or the first element, kNoBias if it has none.
  using Place = QueryRowPlace<std::conditional_t<kShiftsBias, ShiftedBiasPlace, int64_t>>;
  /// Whether dS of a block is stored during the next one, when a barrier has passed after it. The bias has a stage more
  /// for that, which one of f32 has no room for on GPUs of 99 KB (the small shape).
  static constexpr bool kStoresLater =
      kReplacesBias && !kExchanges && !std::is_same_v<Shape, tiles::shape_bias_f32_own_small>;
  static constexpr int kBiasStages = Config::kStages + (kStoresLater ? 1 : 0);
  static constexpr int kBiasStageRows = Config::kStoresDs ? kBiasStages * Config::kBlock : 0;
  /// The elements at which the query rows of each of these stages begin in dS.
  static constexpr int kDsRowsOffset = kPlacesOffset + kPlaces * static_cast<int>(sizeof(Place));
  /// The bytes at which the query rows of each of them begin in the stage.
  static constexpr int kBiasBeginsOffset = kDsRowsOffset + kBiasStageRows * static_cast<int>(sizeof(int64_t));
  static constexpr int kBiasBegins = kShiftsBias ? kBiasStageRows : 0;
  static constexpr int kSegmentOffset = kBiasBeginsOffset + kBiasBegins * static_cast<int>(sizeof(uint32_t));

  /// The query rows and keys of a stage of the bias, and the bytes of a row of elements E.
  static constexpr int kStagedRows = kHoldsKeys ? Config::kBlock : kHeld;
  static constexpr int kStagedKeys = kHoldsKeys ? kHeld : Config::kBlock;
  template <typename E>
  static constexpr int kStagedPitch = kStagedKeys * static_cast<int>(sizeof(E)) + 16;
  /// Whether a bias of f32 is staged where warps then exchange P and dS. Other shapes that have a branch for it, and do
  /// not store dS, take more shared memory than for one of T.
  static constexpr bool kStagesF32InExchange = Config::kStagesBias && Config::kStoresDs && !kHasAlignedBias;
  static_assert(!kStagesF32InExchange || (Config::kStages == 1 && kStagedRows * kStagedPitch<float> <= kExchangeBytes));
  /// Where the stages begin, and their bytes.
  static constexpr int kBiasOffset = (kSegmentOffset + static_cast<int>(sizeof(SequenceSegment)) + 15) / 16 * 16;
  static constexpr int kBiasBytes = Config::kStagesBias ? kBiasStages * kStagedRows * kStagedPitch<Bias> : 0;
  static constexpr int kNeededBytes =
      kBiasBytes > 0 ? kBiasOffset + kBiasBytes : kSegmentOffset + static_cast<int>(sizeof(SequenceSegment));

  static_assert(Config::kBlock % Config::kChunk == 0 && Config::kChunk % 16 == 0);
  static_assert(!kHasAlignedBias || (Config::kChunk == 32 && Config::kRowTiles == 2 && sizeof(T) == 2));
  static_assert(Config::kSharedBytes == kNeededBytes,
                "shared_bytes in variants.toml must be the bytes that the kernel uses");
};

}  // namespace xa
