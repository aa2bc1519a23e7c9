// Tile shape and shared memory of the prefill kernel of sm_90a, by head dimension and logits transform.
//
// A work tile has 64 packed query rows per compute warpgroup and iterates over blocks of kKeys keys. Past D 256 the
// accumulators of a row do not fit one warpgroup: two have the same 64 rows, and each has half of the columns of V and
// O. Both compute all scores, which keeps them independent of each other. Shared memory,
// with Q, K, V and O in swizzle atoms (swizzle_atom.cuh):
//
//   Q | K [kStages] | V [kValueStages] | K and V as loaded [kLoadedStages] | bias [kBiasStages] | O staging |
//   row entries of the cp.async loaders | factors of converted rows of Q | scales of rows [kScaleStages] |
//   PrefillTile [2] | WorkTile and WorkRange of hopper_split_kv | mbarriers
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/swizzle_atom.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"
#include "params/key_ranges.cuh"
#include "tiles/hopper_prefill.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// K and V are packed rows [Tk, Hkv, D], or pages of tokens.
enum class Storage { contiguous, paged };

/// A work tile, which the scheduler warp leaves in shared memory for the other warps. Its queries are numbered from its
/// own first one on: `first_token` is the row of q of that one, and `first_row` is 0. What is read from here is not
/// kept in a register during the loop over blocks.
struct PrefillTile {
  WorkTile work;
  int32_t shift;          // query i of the tile is at the position of key i + shift
  int32_t visible_begin;  // [visible_begin, visible_end): keys that some query of the sequence attends to. Memory
  int32_t visible_end;    // outside may hold NaN.
  int32_t first_block;    // [first_block, end_block): blocks that some row of the tile attends to
  int32_t end_block;
  float value_factor;  // AttentionParams::value_factor times the scale of V
};

/// A work tile of which each warpgroup has its own blocks: those that some of its 64 rows attends to.
struct WarpgroupTile : PrefillTile {
  int32_t warpgroup_first_block[3];
  int32_t warpgroup_end_block[3];  // first_block for a warpgroup without keys, as its first block
};

/// A work tile of hopper_split_kv: possibly some of a tile's keys only.
struct SplitKvTile : PrefillTile {
  int32_t partial_row;  // in the workspace, for the tile's first row; -1: the rows go to out and lse
};

/// The same of a call whose rows have masks of their own: bounds of their keys (../key_ranges.cuh) or trees
/// (../tree_mask.cuh). Their sequences' last queries are those of the last keys.
struct RowMaskTile : SplitKvTile {
  /// The query of the sequence that is the tile's first one.
  __device__ __forceinline__ int32_t first_query() const { return shift - (work.tile.len_k - work.tile.len_q); }
};

/// A work tile whose query rows have bounds of their keys besides the masks. [visible_begin, visible_end) are the keys
/// from the first to the last that some row of the tile attends to.
struct KeyRangeTile : PrefillTile {
  KeyRangeSource ranges;  // of all query rows; set once, before the first tile
  int32_t num_queries;
  int32_t has_gaps;  // whether there may be keys among them that no row of the tile attends to
  static constexpr int32_t kMarkedBlocks = 1024;
  uint32_t attended[kMarkedBlocks / 32];  // with gaps: a bit per block from first_block on, set if a row attends to it
};

/// A work tile whose scores have a bias.
struct BiasTile : PrefillTile {
  int32_t first_query;  // of the tile, in its sequence
};

/// Whether a row of tiles::HopperPrefill is for a logits transform.
template <typename Config>
constexpr bool kTransformsLogits = true;
template <int kBytes, typename HeadDim>
constexpr bool kTransformsLogits<tiles::HopperPrefill<kBytes, HeadDim, tiles::logits_none>> = false;
/// Whether it is for calls with a bias.
template <typename Config>
constexpr bool kAddsBias = false;
template <int kBytes, typename HeadDim>
constexpr bool kAddsBias<tiles::HopperPrefill<kBytes, HeadDim, tiles::logits_bias>> = true;

/// `Config` is a row of tiles::HopperPrefill (kernels/variants.toml).
template <typename Config, Storage kStorage_>
struct PrefillShape : Config {
  /// The CTAs of a cluster work on adjacent tiles of a KV head at the same time and load K and V for each other.
  static constexpr int kClusterSize = Config::kCtasPerCluster;
  /// QoTile::num_rows of what follows the last tile. In a cluster, a CTA's tile may have no rows, but takes part in the
  /// loads of the other one's keys.
  static constexpr int kNoRows = kClusterSize > 1 ? -1 : 0;
  static constexpr int kHeadDim = Config::kDim, kValueDim = Config::kValueDim;
  static constexpr Storage kStorage = kStorage_;
  /// Bounds of rows' keys, with trees if keys are divided.
  static constexpr bool kTakesRowMasks = Config::kTakesKeyRanges && Config::kSplitsKeys,
                        kTakesKeyRanges = Config::kTakesKeyRanges && !Config::kSplitsKeys;
  static constexpr bool kHasBias = kAddsBias<Config>, kShiftsBias = Config::kShiftedBiasBytes != 0;
  /// Whether a warpgroup passes over the blocks of a tile that no row of its own attends to. It is then up to a block
  /// ahead of the others, which delays the loads of all unless there is a third stage.
  static constexpr bool kHasWarpgroupBlocks = !Config::kSplitsKeys && Config::kWarpgroups > 1 && Config::kStages > 2;
  using Tile =
      std::conditional_t<Config::kSplitsKeys, std::conditional_t<Config::kTakesKeyRanges, RowMaskTile, SplitKvTile>,
                         std::conditional_t<Config::kTakesKeyRanges, KeyRangeTile,
                                            std::conditional_t<kHasWarpgroupBlocks, WarpgroupTile,
                                                               std::conditional_t<kHasBias, BiasTile, PrefillTile>>>>;
  /// Warpgroups with the same rows, and the columns of O of each.
  static constexpr int kColumnWarpgroups = kValueDim > 256 ? 2 : 1, kOutputColumns = kValueDim / kColumnWarpgroups;
  static constexpr int kRows = 64 * Config::kWarpgroups / kColumnWarpgroups;
  /// Stages of V. Longer blocks gain more than a second one past D 256: their scores take fewer loads of Q.
  static constexpr int kValueStages = kColumnWarpgroups > 1 ? 1 : Config::kStages;
  static constexpr int kComputeThreads = 128 * Config::kWarpgroups;
  static constexpr int kComputeWarps = kComputeThreads / 32;
  /// Warps that convert K and V.
  static constexpr int kConverterWarps = Config::kLoadedStages > 0 ? 4 : 0;
  static constexpr int kThreads = kComputeThreads + 128 + 32 * kConverterWarps;
  /// Registers of a thread that converts: what the others leave.
  static constexpr int kConverterRegisters =
      kConverterWarps > 0
          ? (65536 - Config::kRegisters * kComputeThreads - Config::kLoaderRegisters * 128) / (32 * kConverterWarps)
          : 0;

  /// The widest atom that both head dimensions are multiples of.
  using Atom = SwizzleAtom<kHeadDim % 64 == 0 && kValueDim % 64 == 0 ? 64 : 32>;
  static constexpr int kQueryAtomColumns = kHeadDim / Atom::kColumns;
  static constexpr int kQueryAtomColumnBytes = kRows * Atom::kRowBytes;
  static constexpr int kQueryBytes = kQueryAtomColumns * kQueryAtomColumnBytes;

  /// A block of K or V. Contiguous keys: [atom column][key], one TMA box. Paged keys: [row group of 8 keys][atom
  /// column][key], so that the row groups of a page are one TMA box, wherever that page is. Boxes that clip columns
  /// have one atom column each, so kernels for contiguous keys load such pages (kTakesClippedPages).
  template <int kColumns>
  struct Block {
    static constexpr int kAtomColumns = kColumns / Atom::kColumns;
    static constexpr int kBytes = kAtomColumns * Config::kKeys * Atom::kRowBytes;
    static constexpr int kLeadingByteOffset =
        kStorage == Storage::paged ? Atom::kBytes : Config::kKeys * Atom::kRowBytes;
    static constexpr int kStrideByteOffset = kStorage == Storage::paged ? kAtomColumns * Atom::kBytes : Atom::kBytes;
  };
  using KeyBlock = Block<kHeadDim>;
  using ValueBlock = Block<kValueDim>;
  /// Whether K and V are loaded in 8 bits and converted to f16 (convert_kv.cuh).
  static constexpr bool kConvertsKv = Config::kLoadedStages > 0;
  /// A block of 8-bit K or V as TMA loads it from pages: [row group of 8 keys][atom column][key].
  template <int kColumns>
  struct CodeBlock {
    using Atom = SwizzleAtom<kHeadDim % 128 == 0 && kValueDim % 128 == 0 ? 64 : 32>;
    static constexpr int kAtomColumns = kColumns / Atom::kRowBytes;
    static constexpr int kBytes = kColumns * Config::kKeys;
    static constexpr int kLeadingByteOffset = Atom::kBytes;
    static constexpr int kStrideByteOffset = kAtomColumns * Atom::kBytes;
  };
  using LoadedKeyBlock = std::conditional_t<kConvertsKv, CodeBlock<kHeadDim>, KeyBlock>;
  using LoadedValueBlock = std::conditional_t<kConvertsKv, CodeBlock<kValueDim>, ValueBlock>;

  /// Whether packs may have padding heads.
  static constexpr bool kHasPaddingHeads = !kTransformsLogits<Config>;

  /// The K warp and the V warp, and that of the bias or of the scales of rows.
  static constexpr int kLoadWarps = kHasBias || Config::kHasTokenScales ? 3 : 2,
                       kKeyLoadWarps = kConvertsKv ? kConverterWarps / 2 : 1;
  /// The scheduler looks for the next tile once so many blocks of K are to be loaded besides the next one. Earlier,
  /// long tiles would be assigned before it is known which CTA is free first; later, their loads would be late.
  static constexpr int kBlocksToGo = 2;
  /// wgmma takes 16-bit V as it is loaded.
  static constexpr int kTransposeWarps = 0;
  /// Whether work that is rarely necessary is kept out of the compute warps' loop: the V warp clears rows, and the sums
  /// of large logits are corrected after the last block. At D 64 with three warpgroups ptxas lays out the loop worse
  /// then, and hopper_split_kv and logits transforms spill at D 256.
  static constexpr bool kHasLeanLoop = kConvertsKv || (!Config::kSplitsKeys && !kTransformsLogits<Config> &&
                                                       (kHeadDim != 64 || Config::kWarpgroups != 3));
  /// Whether O is bf16 or f16, which the parameters say, instead of the kernel's type; and whether it may be f32.
  static constexpr bool kOutputTypeAtRunTime = kConvertsKv, kMayWidenOutput = true;
  /// TMA boxes of O per warp: one.
  static constexpr int kOutputPasses = 1;

  static constexpr int kKeysOffset = kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + Config::kStages * KeyBlock::kBytes;
  /// The bias of a tile's rows and of a block of keys, [kKeys / 64][row][64 keys], or with kShiftsBias rows of one
  /// chunk more than the block has.
  static constexpr int kBiasElementBytes = kShiftsBias ? Config::kShiftedBiasBytes : 2;
  static constexpr int kBiasPitch = kBiasElementBytes * Config::kKeys + (kShiftsBias ? 16 : 0);
  static constexpr int kBiasBytes = kRows * kBiasPitch;
  static constexpr int kBiasStages = kHasBias ? 2 : 0;
  static constexpr int kLoadedKeyStages = kConvertsKv ? Config::kLoadedStages : Config::kStages;
  static constexpr int kLoadedValueStages = kConvertsKv ? Config::kLoadedStages : kValueStages;
  static constexpr int kLoadedKeysOffset = kValuesOffset + kValueStages * ValueBlock::kBytes;
  static constexpr int kLoadedValuesOffset = kLoadedKeysOffset + Config::kLoadedStages * LoadedKeyBlock::kBytes;
  static constexpr int kBiasOffset = kLoadedValuesOffset + Config::kLoadedStages * LoadedValueBlock::kBytes;
  static_assert(!kHasBias || ((kShiftsBias || Config::kKeys % 64 == 0) && kStorage == Storage::contiguous &&
                              !kHasWarpgroupBlocks && kColumnWarpgroups == 1 && kClusterSize == 1));
  /// Staging of O for TMA stores, 16 rows per warp, where shared memory has room for it.
  static constexpr int kOutputOffset = kBiasOffset + kBiasStages * kBiasBytes;
  static constexpr int kOutputWarpBytes = 16 * ValueBlock::kAtomColumns * Atom::kRowBytes;
  static constexpr int kOutputBytes = kComputeWarps * kOutputWarpBytes;
  static constexpr bool kHasOutputStaging = !Config::kSplitsKeys && kOutputOffset + kOutputBytes < 226 * 1024;
  /// Elsewhere each warpgroup stages its rows in a stage of V, which is loaded again once they have left. Kernels with
  /// a transform do so only up to D 128 and over 8 bits: past it there are no registers for it, and the others were not
  /// measured.
  static constexpr bool kStagesOutputInValues = !Config::kSplitsKeys &&
                                                ((kConvertsKv && kHeadDim <= 128) || !kTransformsLogits<Config>) &&
                                                !kHasOutputStaging && kClusterSize == 1 && kColumnWarpgroups == 1;
  static_assert(!kStagesOutputInValues || Config::kWarpgroups == Config::kStages);
  /// Tiles of one atom column have the same block for both. Tiny tiles and clusters do not take clipped pages.
  static constexpr bool kTakesClippedPages = kStorage == Storage::contiguous && kQueryAtomColumns > 1 &&
                                             Config::kCtasPerSm == 1 && kClusterSize == 1 && !kConvertsKv;
  /// Pages that TMA boxes cannot describe are loaded row by row (cp_async_load.cuh).
  static constexpr bool kHasCpAsyncLoader = kStorage == Storage::paged;
  /// 4-byte entries for half of a block's rows in rounds of 32: two lists per load warp.
  static constexpr int kRowEntries = kHasCpAsyncLoader ? (Config::kKeys / 2 + 31) / 32 * 32 : 0;
  static constexpr int kRowEntriesOffset = kOutputOffset + (kHasOutputStaging ? kOutputBytes : 0);
  static constexpr int kRowFactorsOffset = kRowEntriesOffset + 4 * 4 * kRowEntries;
  /// Scales of the rows of K and of those of V of a block (token_scales.cuh).
  static constexpr int kScaleStages = Config::kHasTokenScales ? 2 : 0, kScaleBytes = 2 * 4 * Config::kKeys;
  static constexpr int kScalesOffset = kRowFactorsOffset + (kConvertsKv ? 4 * kRows : 0);
  static constexpr int kTilesOffset = kScalesOffset + kScaleStages * kScaleBytes;
  /// With kSplitsKeys, a WorkTile and a WorkRange.
  static constexpr int kWorkTileOffset = kTilesOffset + 2 * static_cast<int>(sizeof(Tile));
  static constexpr int kWorkRangeOffset = kWorkTileOffset + static_cast<int>(sizeof(WorkTile));
  static constexpr int kBarriersOffset =
      Config::kSplitsKeys ? kWorkRangeOffset + static_cast<int>(sizeof(WorkRange)) : kWorkTileOffset;
  // Swizzled tiles start at multiples of 1024 bytes; dynamic shared memory need not.
  static constexpr int kAlignment = 1024;

  static_assert(Config::kRegisters * kComputeThreads + Config::kLoaderRegisters * 128 +
                        kConverterRegisters * 32 * kConverterWarps <=
                    65536 / Config::kCtasPerSm / kThreads / 8 * 8 * kThreads,
                "setmaxnreg redistributes the registers that the CTA was launched with");
  static_assert(Config::kKeys % 16 == 0 && kHeadDim % 32 == 0 && kValueDim % 32 == 0);
  static_assert(!kTakesKeyRanges || (kHasLeanLoop && kStorage == Storage::contiguous && !kHasWarpgroupBlocks));
  static_assert(!kTakesRowMasks || !kTransformsLogits<Config>);
  static_assert(kColumnWarpgroups == 1 || Config::kWarpgroups == kColumnWarpgroups);
};

/// Whether K and V of the call are loaded row by row.
template <typename Shape>
__device__ __forceinline__ bool loads_by_cp_async(const HopperPrefillParams& params) {
  return Shape::kHasCpAsyncLoader && params.box_row_groups == 0;
}

/// The first row of a compute warp in its tile.
template <typename Shape>
__device__ __forceinline__ int32_t first_row_of_warp(int32_t warp) {
  return 16 * (Shape::kColumnWarpgroups > 1 ? warp % (Shape::kRows / 16) : warp);
}

/// The first column of O of this thread's warpgroup.
template <typename Shape>
__device__ __forceinline__ int32_t first_output_column() {
  if constexpr (Shape::kColumnWarpgroups == 1) return 0;
  return xa::ptx::opaque(threadIdx.x) / (2 * Shape::kRows) * Shape::kOutputColumns;
}

/// The query of row `row` of a tile, numbered from the tile's first query on.
__device__ __forceinline__ int32_t query_of_row(const HopperPrefillParams& params, uint32_t row) {
  return row * params.group_reciprocal >> 16;
}

/// Finds the query head and the position of a row of a tile.
struct FindRow {
  const HopperPrefillParams& params;
  const PrefillTile& tile;

  __device__ __forceinline__ RowPosition operator()(int32_t row) const {
    const int32_t query = query_of_row(params, row);
    return {tile.work.kv_head * params.group_heads + row - query * params.attention.group, query + tile.shift};
  }
};

/// Whether O of the call is staged in V. Without a causal mask that was slower than stores row by row, by 3 % (D 192,
/// 1k).
template <typename Shape>
__device__ __forceinline__ bool stages_output_in_values(const HopperPrefillParams& params) {
  return Shape::kStagesOutputInValues && params.stores_by_tma != 0 && params.is_causal != 0;
}

}  // namespace xa::hopper
