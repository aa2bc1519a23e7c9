// How the prefill kernel of sm_90a cuts up its work, by head dimension and score form; and its shared memory.
//
// A tile of 64 packed rows a warpgroup works on blocks of kKeys keys. Shared memory, all tiles in swizzled panels
// (wgmma.cuh): the query rows, kStages blocks of K, as many of V, finished rows, then the plans of two tiles and the
// barriers.
#pragma once

#include <cstdint>

#include "hopper/params.cuh"
#include "score_form.cuh"
#include "tile_plan.cuh"

namespace xa::hopper {

template <int kHeadDim, typename Score>
struct TileChoice;

// One row for each head dimension and score form:
//         D, score, warpgroups that compute, keys a block, stages, registers of theirs, of the loading warpgroup,
//         shared bytes
#define XA_HOPPER_TILE_TABLE(ROW)                \
  ROW(64, plain, 3, 128, 2, 160, 32, 116224)     \
  ROW(64, modified, 2, 128, 2, 232, 40, 99840)   \
  ROW(128, plain, 2, 128, 2, 232, 40, 198144)    \
  ROW(128, modified, 2, 128, 2, 232, 40, 198144) \
  ROW(256, plain, 2, 80, 2, 232, 40, 231424)

#define XA_TILE_CHOICE(head_dim, score, warpgroups, keys, stages, registers, loader_registers, shared_bytes) \
  template <>                                                                                                \
  struct TileChoice<head_dim, score_##score> {                                                               \
    static constexpr int kWarpgroups = warpgroups, kKeys = keys, kStages = stages, kRegisters = registers,   \
                         kLoaderRegisters = loader_registers, kSharedBytes = shared_bytes;                   \
  };
XA_HOPPER_TILE_TABLE(XA_TILE_CHOICE)
#undef XA_TILE_CHOICE

/// Keys are rows [Tk, Hkv, D], or octets of rows in pages.
enum class Storage { contiguous, paged };

/// What a CTA knows of a tile.
struct TilePlan {
  Plan plan;
  int32_t seen_begin;  // keys that any row of the sequence sees; what lies outside may be anything
  int32_t seen_end;
  int32_t first_block;  // blocks [first_block, end_block) are those that some row of the tile sees
  int32_t end_block;
};

template <int kHeadDim_, Storage kStorage_, typename Score>
struct TileShape : TileChoice<kHeadDim_, Score> {
  using Choice = TileChoice<kHeadDim_, Score>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Storage kStorage = kStorage_;
  static constexpr int kRows = 64 * Choice::kWarpgroups;
  static constexpr int kComputeThreads = 128 * Choice::kWarpgroups;
  static constexpr int kComputeWarps = kComputeThreads / 32;
  static constexpr int kThreads = kComputeThreads + 128;
  static constexpr int kPanels = kHeadDim / 64;

  // A row of a panel is 128 bytes, a group of eight rows 1024.
  static constexpr int kRowBytes = 128;
  static constexpr int kGroupBytes = 8 * kRowBytes;
  static constexpr int kQueryPanelBytes = kRows * kRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kBlockBytes = kPanels * Choice::kKeys * kRowBytes;
  /// Blocks of K and V: contiguous [panel][key], in pages [octet of keys][panel][key of it], so that a box with all
  /// panels of an octet can be copied from wherever its page is.
  static constexpr int kPanelDistance = kStorage == Storage::paged ? kGroupBytes : Choice::kKeys * kRowBytes;
  static constexpr int kGroupDistance = kStorage == Storage::paged ? kPanels * kGroupBytes : kGroupBytes;

  static constexpr int kKeysOffset = kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + Choice::kStages * kBlockBytes;
  /// Where rows are on their way out, those of each warp by themselves, if there is room for them.
  static constexpr int kOutputOffset = kValuesOffset + Choice::kStages * kBlockBytes;
  static constexpr bool kStagesOutput = kOutputOffset + kQueryBytes < 226 * 1024;
  static constexpr int kPlansOffset = kOutputOffset + (kStagesOutput ? kQueryBytes : 0);
  static constexpr int kBarriersOffset = kPlansOffset + 2 * static_cast<int>(sizeof(TilePlan));
  // Tiles begin at multiples of 1024 bytes, wherever dynamic shared memory does.
  static constexpr int kAlignment = 1024;

  static_assert(Choice::kRegisters * kComputeThreads + Choice::kLoaderRegisters * 128 <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "registers are taken out of what the CTA got at its start");
  static_assert(Choice::kKeys % 16 == 0 && kHeadDim % 64 == 0);
};

}  // namespace xa::hopper
