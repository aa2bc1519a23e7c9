// Tile shape and shared memory of the backward kernel of sm_90a up to 128 columns.
//
// Shared memory, with K, V, Q, dO and dS in swizzle atoms (hopper/swizzle_atom.cuh):
//
//   K | V | Q [kQueryStages] | dO [kDoutStages] | dS [2] | dQ | bias [kBiasStages][2] | lse [kQueryStages] |
//   delta [kDoutStages] | BackwardTile [2] | mbarriers | BiasPlaces
//
// With bounds of the keys of each row, what key_ranges.cuh says follows each lse. Only calls with a bias have one, for
// each warpgroup (bias.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/swizzle_atom.cuh"
#include "tiles/hopper_bwd.cuh"

namespace xa::hopper {

/// Rows of a *row tile* of dQ, the unit of the f32 accumulators in memory. They have the register layout of a warp's
/// wgmma accumulators: [columns / 8][lane][4].
constexpr int32_t kRowTileRows = 16;

/// `kHeadDim_` is the bucket of D and Dv; tiles::HopperBwd is a table of kernels/variants.toml.
template <int kHeadDim_, typename LogitsTransform>
struct BackwardShape : tiles::HopperBwd<kHeadDim_, LogitsTransform> {
  using Config = tiles::HopperBwd<kHeadDim_, LogitsTransform>;
  static constexpr int kHeadDim = kHeadDim_;
  /// The logits transform: a soft cap, or ALiBi's bias, which depends on the distance of query and key.
  static constexpr bool kHasSoftcap = std::is_same_v<LogitsTransform, tiles::logits_softcap>;
  static constexpr bool kHasAlibi = std::is_same_v<LogitsTransform, tiles::logits_alibi>;
  /// Each query row has bounds of its keys (key_ranges.cuh), and there is no logits transform.
  static constexpr bool kHasKeyRanges = std::is_same_v<LogitsTransform, tiles::logits_key_ranges>;
  /// Pairs of a row and a key have a bias, of the operands' type or of f32 (bias.cuh), and there is no logits
  /// transform.
  static constexpr bool kHasF32Bias = std::is_same_v<LogitsTransform, tiles::logits_bias_f32>;
  static constexpr bool kHasBias = kHasF32Bias || std::is_same_v<LogitsTransform, tiles::logits_bias>;
  /// Queries past the last one have finite probabilities without a mask, except with ALiBi, whose slopes may be
  /// negative, and with a bias.
  static constexpr bool kMasksQueriesPastEnd = kHasAlibi || kHasBias;
  /// A step of the main loop: kQueries queries of one head with the tile's kKeys keys.
  static constexpr int kQueries = Config::kQueries, kKeys = 128;
  /// Stages of Q and of the bias: those that shared memory has room for.
  static constexpr int kQueryStages = Config::kQueryStages, kDoutStages = 2, kBiasStages = Config::kBiasStages;
  static_assert(kHasBias == (kBiasStages > 0));
  /// CTAs add their contributions to dQ in global memory, in a fixed order.
  static constexpr bool kAccumulatesDq = true;
  /// Two compute warpgroups, and one that loads and accumulates dQ.
  static constexpr int kWarpgroups = 3, kThreads = 128 * kWarpgroups, kComputeWarps = 8;
  /// Registers per thread of the producer warps and of the compute warps. At 128 columns the compute warps leave no
  /// more for the warp that copies a bias.
  static constexpr bool kHasWideProducers = kHasBias && kHeadDim < 128;
  static constexpr int kProducerRegisters = kHasWideProducers ? 40 : 24,
                       kComputeRegisters = kHasWideProducers ? 232 : 240;

  using Atom = SwizzleAtom<Config::kSwizzleColumns>;
  static constexpr int kAtomColumns = kHeadDim / Atom::kColumns;
  static constexpr int kKeyAtomColumnBytes = kKeys * Atom::kRowBytes,
                       kQueryAtomColumnBytes = kQueries * Atom::kRowBytes;
  static constexpr int kKeyBytes = kAtomColumns * kKeyAtomColumnBytes,
                       kQueryBytes = kAtomColumns * kQueryAtomColumnBytes;
  /// dS^T [kKeys, kQueries], in atom columns of 64 queries.
  using DsAtom = SwizzleAtom<64>;
  static constexpr int kDsAtomColumnBytes = kKeys * DsAtom::kRowBytes;
  static constexpr int kDsBytes = kKeys * kQueries * 2;
  /// dQ of a step in f32, in two halves, one per warpgroup. With kSplitsDqColumns a half is 64 queries and the first
  /// kDqColumns or the remaining columns, otherwise 64 of the 128 queries and all columns.
  static constexpr bool kSplitsDqColumns = kQueries == 64;
  static_assert(kSplitsDqColumns ? kHeadDim <= 128 : kQueries == 128 && kHeadDim == 64);
  static constexpr int kDqColumns = kSplitsDqColumns && kHeadDim == 64 ? 32 : 64;
  /// Stores dQ while S of the next step is computed, instead of before S starts: 7 % fewer cycles at D 128, 3 % more at
  /// D 64.
  static constexpr bool kStoresDqDuringS = kSplitsDqColumns;
  /// Initializes the accumulators of dP with delta and subtracts the products, so that dS needs delta no more: 2 %
  /// fewer cycles at D 96, 1 % more at D 128. With 128 queries per step there are no registers for it.
  static constexpr bool kInitializesDpWithDelta = kHeadDim == 96 && !kHasBias;
  static constexpr int kDqBytes = kQueries * kHeadDim * 4;
  static constexpr int kFirstDqHalfBytes = 64 * kDqColumns * 4;
  /// The second warpgroup computes the last kDqColumns columns of dQ. The first of these repeat columns of the first
  /// warpgroup and are not stored.
  static constexpr int kRepeatedDqColumns = kSplitsDqColumns ? 2 * kDqColumns - kHeadDim : 0;
  /// lse or delta of a step's queries, followed by the ALiBi slope of their head.
  static constexpr int kSlopeOffset = 4 * kQueries;
  static constexpr int kRowStatBytes = kQueries * 4 + (kHasAlibi ? 16 : 0);
  /// Behind the lse of a step: the RowKeys of its queries and their QueryBlockKeys.
  static constexpr int kRowKeysOffset = kRowStatBytes, kBlockKeysOffset = kRowKeysOffset + 8 * kQueries;
  static constexpr int kLseBytes = kHasKeyRanges ? kBlockKeysOffset + 16 : kRowStatBytes;

  static constexpr int kKeysOffset = 0;
  static constexpr int kValuesOffset = kKeysOffset + kKeyBytes;
  static constexpr int kQueriesOffset = kValuesOffset + kKeyBytes;
  static constexpr int kDoutsOffset = kQueriesOffset + kQueryStages * kQueryBytes;
  static constexpr int kDsOffset = kDoutsOffset + kDoutStages * kQueryBytes;
  static constexpr int kDqOffset = kDsOffset + 2 * kDsBytes;
  static constexpr int kBiasOffset = kDqOffset + kDqBytes;
  /// The bias of a step and of the 64 keys of a warpgroup: boxes of 128 bytes of each query's keys, one after the
  /// other.
  static constexpr int kBiasBoxKeys = kHasF32Bias ? 32 : 64, kBiasBoxes = 64 / kBiasBoxKeys;
  static constexpr int kBiasBoxBytes = kQueries * 128, kBiasBytes = kBiasBoxes * kBiasBoxBytes;
  static constexpr int kLsesOffset = kBiasOffset + kBiasStages * 2 * kBiasBytes;
  static constexpr int kDeltasOffset = kLsesOffset + kQueryStages * kLseBytes;
  static constexpr int kTilesOffset = kDeltasOffset + kDoutStages * kRowStatBytes;
  static constexpr int kBarriersOffset = kTilesOffset + 2 * 64;
  static constexpr int kBiasPlacesOffset = kBarriersOffset + (kBiasStages > 1 ? 34 : 30) * 8;
  static_assert(Config::kSharedBytes == kBiasPlacesOffset + (kHasBias ? 32 + 16 * kBiasStages : 16));
  // The epilogue stages dK of a tile in the buffer of dS, and dV in that of dQ.
  static_assert(2 * kDsBytes >= kKeyBytes && kDqBytes >= kKeyBytes);
};

}  // namespace xa::hopper
