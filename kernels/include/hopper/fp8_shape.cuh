// Tile shape and shared memory of the fp8 prefill kernel of sm_90a. As shape.cuh, but Q, K and V are e4m3fn and O is
// 16-bit, and shared memory holds V twice: as loaded, and transposed, because wgmma takes 8-bit operands K-major only.
//
//   Q | K [kStages] | V transposed [kStages] | V as loaded [kStages] | O staging | PrefillTile [2] | mbarriers
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/shape.cuh"
#include "hopper/swizzle_atom.cuh"
#include "tiles/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// `Config` is a row of tiles::HopperPrefill (kernels/variants.toml).
template <typename Config, Storage kStorage_>
struct Fp8PrefillShape : Config {
  static constexpr int kHeadDim = Config::kDim, kValueDim = Config::kValueDim;
  static constexpr int kColumnWarpgroups = 1, kOutputColumns = kValueDim, kValueStages = Config::kStages;
  static constexpr Storage kStorage = kStorage_;
  static constexpr int kClusterSize = 1, kNoRows = 0;
  /// As in PrefillShape.
  static constexpr bool kHasWarpgroupBlocks = Config::kWarpgroups > 1 && Config::kStages > 2;
  using Tile = std::conditional_t<kHasWarpgroupBlocks, WarpgroupTile, PrefillTile>;
  static constexpr int kRows = 64 * Config::kWarpgroups;
  static constexpr int kComputeThreads = 128 * Config::kWarpgroups;
  static constexpr int kComputeWarps = kComputeThreads / 32;
  static constexpr int kThreads = kComputeThreads + 128;
  /// Warps that transpose V: the one that loads V, and one more.
  static constexpr int kTransposeWarps = 2;
  static constexpr int kLoadWarps = 1 + kTransposeWarps, kKeyLoadWarps = 1;
  /// As in PrefillShape; a block takes half as long.
  static constexpr int kBlocksToGo = 4;
  /// The transpose warps clear rows of V.
  static constexpr bool kHasLeanLoop = false;
  /// O is bf16 or f16, which the parameters say.
  static constexpr bool kOutputTypeAtRunTime = true, kMayWidenOutput = false;
  /// P is multiplied by 2^kWeightLog2, so that fewer small weights underflow; the largest e4m3fn is 448.
  static constexpr int kWeightLog2 = 8;

  static constexpr bool kTakesClippedPages = false;
  static constexpr bool kHasPaddingHeads = false;
  static constexpr bool kHasCpAsyncLoader = false;
  /// Atom of O.
  using Atom = SwizzleAtom<64>;
  /// Atom of Q, K and V as loaded: rows of 128 e4m3fn elements, or of 64.
  using Fp8Atom = SwizzleAtom<kHeadDim % 128 == 0 ? 64 : 32>;
  /// Atom of transposed V: rows of 128 keys.
  using TransposedAtom = SwizzleAtom<64>;
  static constexpr int kQueryAtomColumns = kHeadDim / Fp8Atom::kRowBytes;
  static constexpr int kQueryAtomColumnBytes = kRows * Fp8Atom::kRowBytes;
  static constexpr int kQueryBytes = kQueryAtomColumns * kQueryAtomColumnBytes;

  struct LoadedValueBlock {
    static constexpr int kAtomColumns = kQueryAtomColumns;
    static constexpr int kBytes = kAtomColumns * Config::kKeys * Fp8Atom::kRowBytes;
    static constexpr int kLeadingByteOffset =
        kStorage == Storage::paged ? Fp8Atom::kBytes : Config::kKeys * Fp8Atom::kRowBytes;
    static constexpr int kStrideByteOffset =
        kStorage == Storage::paged ? kAtomColumns * Fp8Atom::kBytes : Fp8Atom::kBytes;
  };
  using KeyBlock = LoadedValueBlock;
  using LoadedKeyBlock = KeyBlock;
  static constexpr bool kConvertsKv = false;
  static constexpr int kConverterWarps = 0, kScaleStages = 0;
  static constexpr int kLoadedKeyStages = Config::kStages, kLoadedValueStages = Config::kStages;
  /// V transposed: atom columns of 128 keys, [atom column][column of V][key].
  struct ValueBlock {
    static constexpr int kAtomColumns = kValueDim / Atom::kColumns;  // of O
    static constexpr int kLeadingByteOffset = kValueDim * TransposedAtom::kRowBytes;
    static constexpr int kBytes = (Config::kKeys + 127) / 128 * kLeadingByteOffset;
  };

  static constexpr int kKeysOffset = kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + Config::kStages * KeyBlock::kBytes;
  static constexpr int kLoadedValuesOffset = kValuesOffset + Config::kStages * ValueBlock::kBytes;
  static constexpr int kOutputOffset = kLoadedValuesOffset + Config::kStages * LoadedValueBlock::kBytes;
  /// TMA boxes of O per warp. 256 columns are staged one atom column after another, in two buffers, because there is no
  /// room for all of them; the host's tensor map of O has boxes of as many (`stages_out_by_atom_column`).
  static constexpr int kOutputPasses = kValueDim > 128 ? ValueBlock::kAtomColumns : 1;
  static constexpr int kOutputWarpBytes = 16 * (kOutputPasses > 1 ? 2 * Atom::kRowBytes : 2 * kValueDim);
  static constexpr int kOutputBytes = kComputeWarps * kOutputWarpBytes;
  static constexpr bool kHasOutputStaging = true;
  static constexpr bool kStagesOutputInValues = false, kHasBias = false;
  static constexpr int kBiasStages = 0;
  static constexpr bool kShiftsBias = false;
  static constexpr int kTilesOffset = kOutputOffset + kOutputBytes;
  static constexpr int kBarriersOffset = kTilesOffset + 2 * static_cast<int>(sizeof(Tile));
  static constexpr int kAlignment = 1024;

  static_assert(Config::kRegisters * kComputeThreads + Config::kLoaderRegisters * 128 <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "setmaxnreg redistributes the registers that the CTA was launched with");
  static_assert(Config::kKeys % 32 == 0 && kHeadDim % 64 == 0);
};

}  // namespace xa::hopper
