// How the prefill kernel of sm_90a cuts up its work, by head dimension and score form; and its shared memory.
//
// A tile of 64 packed rows a warpgroup works on blocks of kKeys keys. Shared memory, all tiles in swizzled panels
// (panel.cuh): the query rows, kStages blocks of K, as many of V, finished rows, then words of the warps that copy rows
// out of pages, the plans of two tiles and the barriers.
#pragma once

#include <cstdint>

#include "hopper/swizzle_atom.cuh"
#include "params/hopper_prefill.cuh"
#include "tiles/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Keys are rows [Tk, Hkv, D], or octets of rows in pages.
enum class Storage { contiguous, paged };

/// What a CTA knows of a tile.
struct TilePlan {
  WorkTile plan;
  int32_t seen_begin;  // keys that any row of the sequence sees; what lies outside may be anything
  int32_t seen_end;
  int32_t first_block;  // blocks [first_block, end_block) are those that some row of the tile sees
  int32_t end_block;
  float value_factor;  // AttentionParams::value_factor times the scale of V
};

/// `Choice` is a row of tiles::HopperPrefill.
template <typename Choice, Storage kStorage_>
struct TileShape : Choice {
  static constexpr int kHeadDim = Choice::kDim, kValueDim = Choice::kValueDim;
  static constexpr Storage kStorage = kStorage_;
  static constexpr int kRows = 64 * Choice::kWarpgroups;
  static constexpr int kComputeThreads = 128 * Choice::kWarpgroups;
  static constexpr int kComputeWarps = kComputeThreads / 32;
  static constexpr int kThreads = kComputeThreads + 128;

  /// The widest panels that both dimensions are multiples of.
  using Panel = SwizzleAtom<kHeadDim % 64 == 0 && kValueDim % 64 == 0 ? 64 : 32>;
  static constexpr int kQueryPanels = kHeadDim / Panel::kColumns;
  static constexpr int kQueryPanelBytes = kRows * Panel::kRowBytes;
  static constexpr int kQueryBytes = kQueryPanels * kQueryPanelBytes;

  /// Blocks of K and V: contiguous [panel][key], in pages [octet of keys][panel][key of it], so that a box with all
  /// panels of an octet can be copied from wherever its page is.
  template <int kColumns>
  struct Block {
    static constexpr int kPanels = kColumns / Panel::kColumns;
    static constexpr int kBytes = kPanels * Choice::kKeys * Panel::kRowBytes;
    static constexpr int kPanelDistance = kStorage == Storage::paged ? Panel::kBytes : Choice::kKeys * Panel::kRowBytes;
    static constexpr int kGroupDistance = kStorage == Storage::paged ? kPanels * Panel::kBytes : Panel::kBytes;
  };
  using KeyBlock = Block<kHeadDim>;
  using ValueBlock = Block<kValueDim>;
  using FetchedBlock = ValueBlock;

  /// V is multiplied as it lies.
  static constexpr int kTransposers = 0;
  static constexpr bool kChoosesOutput = false;

  static constexpr int kKeysOffset = kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + Choice::kStages * KeyBlock::kBytes;
  /// Where rows are on their way out, those of each warp by themselves, if there is room for them.
  static constexpr int kOutputOffset = kValuesOffset + Choice::kStages * ValueBlock::kBytes;
  static constexpr int kOutputWarpBytes = 16 * ValueBlock::kPanels * Panel::kRowBytes;
  static constexpr int kOutputBytes = kComputeWarps * kOutputWarpBytes;
  static constexpr bool kStagesOutput = kOutputOffset + kOutputBytes < 226 * 1024;
  /// Pages that boxes cannot fetch are fetched row by row.
  static constexpr bool kFetchesRows = kStorage == Storage::paged;
  /// Words for the rows of a block of K and for those of a block of V, in rounds of 32 (RowLoader in load.cuh).
  static constexpr int kRowWords = kStorage == Storage::paged ? (Choice::kKeys + 31) / 32 * 32 : 0;
  static constexpr int kRowWordsOffset = kOutputOffset + (kStagesOutput ? kOutputBytes : 0);
  static constexpr int kPlansOffset = kRowWordsOffset + 2 * 4 * kRowWords;
  static constexpr int kBarriersOffset = kPlansOffset + 2 * static_cast<int>(sizeof(TilePlan));
  // Tiles begin at multiples of 1024 bytes, wherever dynamic shared memory does.
  static constexpr int kAlignment = 1024;

  static_assert(Choice::kRegisters * kComputeThreads + Choice::kLoaderRegisters * 128 <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "registers are taken out of what the CTA got at its start");
  static_assert(Choice::kKeys % 16 == 0 && kHeadDim % 32 == 0 && kValueDim % 32 == 0);
};

}  // namespace xa::hopper
