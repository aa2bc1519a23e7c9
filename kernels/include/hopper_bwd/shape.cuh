// Sizes of the backward's tiles and of their place in shared memory.
#pragma once

#include <cstdint>

#include "hopper/panel.cuh"

namespace xa::hopper {

/// Sums of dQ of 16 rows (a *group*) and 64 columns: [columns / 8][lane][4], the accumulators of a warp.
constexpr int32_t kSumChunk = 16 * 64, kSumChunkBytes = 4 * kSumChunk;

/// One for each bucket of D and Dv.
template <int kHeadDim_>
struct BackwardShape {
  static constexpr int kHeadDim = kHeadDim_;
  static_assert(kHeadDim == 64 || kHeadDim == 128);
  /// A step: so many queries with a block of keys. Accumulators of 64 x kQueries scores and 64 x kHeadDim gradients are
  /// as many registers at both buckets.
  static constexpr int kQueries = kHeadDim == 128 ? 64 : 128;
  static constexpr int kKeys = 128;
  static constexpr int kQueryStages = 3, kDoutStages = 2;
  /// Two of arithmetic, one of loads and of dQ.
  static constexpr int kWarpgroups = 3, kThreads = 128 * kWarpgroups, kComputeWarps = 8;

  using Panel = SwizzledPanel<64>;
  static constexpr int kPanels = kHeadDim / Panel::kColumns;
  static constexpr int kKeyPanelBytes = kKeys * Panel::kRowBytes, kQueryPanelBytes = kQueries * Panel::kRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes, kQueryBytes = kPanels * kQueryPanelBytes;
  /// dS^T [kKeys, kQueries] in panels of 64 queries.
  static constexpr int kScoreBytes = kKeys * kQueries * 2;
  /// dQ of a step in f32. A warpgroup makes half of it: 64 of the queries and 64 of the columns.
  static constexpr int kSumBytes = kQueries * kHeadDim * 4;
  static constexpr int kRowStatBytes = kQueries * 4;
  static_assert(kSumBytes == 2 * 64 * 64 * 4);

  static constexpr int kKeysOffset = 0;
  static constexpr int kValuesOffset = kKeysOffset + kKeyBytes;
  static constexpr int kQueriesOffset = kValuesOffset + kKeyBytes;
  static constexpr int kDoutsOffset = kQueriesOffset + kQueryStages * kQueryBytes;
  static constexpr int kScoresOffset = kDoutsOffset + kDoutStages * kQueryBytes;
  static constexpr int kSumsOffset = kScoresOffset + 2 * kScoreBytes;
  static constexpr int kLsesOffset = kSumsOffset + kSumBytes;
  static constexpr int kDeltasOffset = kLsesOffset + kQueryStages * kRowStatBytes;
  static constexpr int kTilesOffset = kDeltasOffset + kDoutStages * kRowStatBytes;
  static constexpr int kBarriersOffset = kTilesOffset + 2 * 64;
  static constexpr int kSharedBytes = kBarriersOffset + 32 * 8;
};

}  // namespace xa::hopper
