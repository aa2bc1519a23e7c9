// Tile shape and shared memory of the f32 prefill kernel of sm_90a. As shape.cuh, but Q, K and V are f32, and shared
// memory holds each of their elements as three bf16 (f32_parts.cuh): a tile is kParts tiles of bf16, one per part.
// K and V are loaded as f32 [key][column] first; they share kStages buffers for that.
//
//   f32 K or V [kStages] | Q | K | V | PrefillTile [2] | mbarriers
#pragma once

#include <cstdint>

#include "hopper/f32_parts.cuh"
#include "hopper/shape.cuh"
#include "hopper/swizzle_atom.cuh"
#include "tiles/hopper_prefill.cuh"

namespace xa::hopper {

/// `Config` is a row of tiles::HopperPrefill (kernels/variants.toml).
template <typename Config>
struct F32PrefillShape : Config {
  static constexpr int kClusterSize = 1, kNoRows = 0;
  static constexpr int kHeadDim = Config::kDim, kValueDim = Config::kValueDim;
  static constexpr int kColumnWarpgroups = 1, kOutputColumns = kValueDim, kValueStages = Config::kStages;
  using Tile = PrefillTile;
  static constexpr int kRows = 64 * Config::kWarpgroups;
  static constexpr int kComputeThreads = 128 * Config::kWarpgroups;
  static constexpr int kComputeWarps = kComputeThreads / 32;
  static constexpr int kThreads = kComputeThreads + 128;
  /// Warps that load K and V, all of them each block.
  static constexpr int kLoadWarps = 2, kKeyLoadWarps = kLoadWarps;
  /// Warps that transpose V, which 8-bit operands need.
  static constexpr int kTransposeWarps = 0;
  static constexpr bool kOutputTypeAtRunTime = false, kMayWidenOutput = false;
  static constexpr bool kConvertsKv = false;
  static constexpr int kConverterWarps = 0, kScaleStages = 0;
  static constexpr bool kHasPaddingHeads = false;
  static constexpr bool kHasWarpgroupBlocks = false;
  /// Its load warps fence themselves (f32_load.cuh).
  static constexpr bool kHasCpAsyncLoader = false;

  using Atom = SwizzleAtom<64>;
  /// kRows rows of kColumns columns, [part][atom column][row].
  template <int kRows, int kColumns>
  struct Block {
    static constexpr int kAtomColumnBytes = kRows * Atom::kRowBytes;
    static constexpr int kPartBytes = kColumns / Atom::kColumns * kAtomColumnBytes;
    static constexpr int kBytes = kParts * kPartBytes;
  };
  using QueryBlock = Block<kRows, kHeadDim>;
  using KeyParts = Block<Config::kKeys, kHeadDim>;
  using ValueParts = Block<Config::kKeys, kValueDim>;
  /// K or V as it is loaded.
  struct KeyBlock {
    static constexpr int kBytes = Config::kKeys * kHeadDim * 4;
  };
  using ValueBlock = KeyBlock;
  using LoadedKeyBlock = KeyBlock;
  using LoadedValueBlock = KeyBlock;
  static constexpr int kLoadedKeyStages = Config::kStages, kLoadedValueStages = Config::kStages;

  static constexpr int kKeysOffset = 0, kValuesOffset = 0;
  static constexpr int kQueryOffset = Config::kStages * KeyBlock::kBytes;
  static constexpr int kKeyPartsOffset = kQueryOffset + QueryBlock::kBytes;
  static constexpr int kValuePartsOffset = kKeyPartsOffset + KeyParts::kBytes;
  static constexpr int kTilesOffset = kValuePartsOffset + ValueParts::kBytes;
  static constexpr int kBarriersOffset = kTilesOffset + 2 * static_cast<int>(sizeof(PrefillTile));
  /// O is stored from registers.
  static constexpr bool kHasOutputStaging = false;
  static constexpr bool kStagesOutputInValues = false, kHasBias = false;
  static constexpr int kBiasStages = 0;
  static constexpr bool kShiftsBias = false;
  static constexpr int kOutputOffset = 0, kOutputWarpBytes = 0;
  static constexpr int kAlignment = 1024;

  static_assert(Config::kRegisters * kComputeThreads + Config::kLoaderRegisters * 128 <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "setmaxnreg redistributes the registers that the CTA was launched with");
  static_assert(Config::kKeys % 16 == 0 && kHeadDim % Atom::kColumns == 0 && kValueDim % Atom::kColumns == 0);
};

}  // namespace xa::hopper
