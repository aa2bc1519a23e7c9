// Sizes of the backward's tiles and of their place in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/swizzle_atom.cuh"
#include "tiles/hopper_bwd.cuh"

namespace xa::hopper {

/// Rows of a *group*, the sums of dQ of which are the accumulators of a warp: [columns / 8][lane][4].
constexpr int32_t kRowTileRows = 16;

/// One for each bucket of D and Dv and each form of scores.
template <int kHeadDim_, typename LogitsTransform>
struct BackwardShape : tiles::HopperBwd<kHeadDim_, LogitsTransform> {
  using Config = tiles::HopperBwd<kHeadDim_, LogitsTransform>;
  static constexpr int kHeadDim = kHeadDim_;
  /// Logits go through a soft cap, or have a bias that follows from the distance of query and key.
  static constexpr bool kHasSoftcap = std::is_same_v<LogitsTransform, tiles::logits_softcap>;
  static constexpr bool kHasAlibi = std::is_same_v<LogitsTransform, tiles::logits_alibi>;
  /// A step: so many queries with a block of keys.
  static constexpr int kQueries = Config::kQueries, kKeys = 128;
  static constexpr int kQueryStages = 3, kDoutStages = 2;
  /// dQ is a sum over CTAs, in a fixed order.
  static constexpr bool kAccumulatesDq = true;
  /// Two of arithmetic, one of loads and of dQ.
  static constexpr int kWarpgroups = 3, kThreads = 128 * kWarpgroups, kComputeWarps = 8;

  using Atom = SwizzleAtom<Config::kSwizzleColumns>;
  static constexpr int kAtomColumns = kHeadDim / Atom::kColumns;
  static constexpr int kKeyAtomColumnBytes = kKeys * Atom::kRowBytes,
                       kQueryAtomColumnBytes = kQueries * Atom::kRowBytes;
  static constexpr int kKeyBytes = kAtomColumns * kKeyAtomColumnBytes,
                       kQueryBytes = kAtomColumns * kQueryAtomColumnBytes;
  /// dS^T [kKeys, kQueries] in panels of 64 queries.
  using DsAtom = SwizzleAtom<64>;
  static constexpr int kDsAtomColumnBytes = kKeys * DsAtom::kRowBytes;
  static constexpr int kDsBytes = kKeys * kQueries * 2;
  /// dQ of a step in f32. By the queries and columns a warpgroup makes 64 each, or the columns that are left.
  static constexpr bool kSplitsDqColumns = kQueries == 64;
  static_assert(kSplitsDqColumns ? kHeadDim > 64 && kHeadDim <= 128 : kQueries == 128 && kHeadDim == 64);
  /// dQ is stored while S of the next step is under way, not before S starts: 7 % fewer cycles at D 128, 3 % more at
  /// D 64.
  static constexpr bool kStoresDqDuringS = kSplitsDqColumns;
  /// dP is taken from delta as its products go on, so that dS needs nothing more of delta: 2 % fewer cycles at D 96, 1
  /// % more at D 128. 128 queries a step leave no registers for it.
  static constexpr bool kInitializesDpWithDelta = kHeadDim == 96;
  static constexpr int kDqBytes = kQueries * kHeadDim * 4;
  static constexpr int kFirstDqHalfBytes = 64 * 64 * 4;
  /// The second warpgroup makes 64 columns too, the first ones of them in vain.
  static constexpr int kRepeatedDqColumns = kSplitsDqColumns ? 128 - kHeadDim : 0;
  /// lse or delta of the queries, and the slope of their head.
  static constexpr int kSlopeOffset = 4 * kQueries;
  static constexpr int kRowStatBytes = kQueries * 4 + (kHasAlibi ? 16 : 0);

  static constexpr int kKeysOffset = 0;
  static constexpr int kValuesOffset = kKeysOffset + kKeyBytes;
  static constexpr int kQueriesOffset = kValuesOffset + kKeyBytes;
  static constexpr int kDoutsOffset = kQueriesOffset + kQueryStages * kQueryBytes;
  static constexpr int kDsOffset = kDoutsOffset + kDoutStages * kQueryBytes;
  static constexpr int kDqOffset = kDsOffset + 2 * kDsBytes;
  static constexpr int kLsesOffset = kDqOffset + kDqBytes;
  static constexpr int kDeltasOffset = kLsesOffset + kQueryStages * kRowStatBytes;
  static constexpr int kTilesOffset = kDeltasOffset + kDoutStages * kRowStatBytes;
  static constexpr int kBarriersOffset = kTilesOffset + 2 * 64;
  static_assert(Config::kSharedBytes == kBarriersOffset + 32 * 8);
  // dK and dV of a tile leave through the places of dS and of dQ.
  static_assert(2 * kDsBytes >= kKeyBytes && kDqBytes >= kKeyBytes);
};

}  // namespace xa::hopper
