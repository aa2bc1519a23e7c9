// How the fp8 prefill kernel of sm_90a cuts up its work; and its shared memory. As shape.cuh, but elements of Q, K and
// V are bytes, those of the output are not, and V is there twice: as it has been fetched, and transposed, because wgmma
// takes 8-bit operands along their rows only.
#pragma once

#include <cstdint>

#include "hopper/shape.cuh"
#include "hopper/swizzle_atom.cuh"
#include "tiles/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// `Choice` is a row of tiles::HopperPrefill.
template <typename Choice, Storage kStorage_>
struct Fp8TileShape : Choice {
  static constexpr int kHeadDim = Choice::kDim, kValueDim = Choice::kValueDim;
  static constexpr Storage kStorage = kStorage_;
  static constexpr int kRows = 64 * Choice::kWarpgroups;
  static constexpr int kComputeThreads = 128 * Choice::kWarpgroups;
  static constexpr int kComputeWarps = kComputeThreads / 32;
  static constexpr int kThreads = kComputeThreads + 128;
  /// Warps that transpose V: the one that fetches it, and one more.
  static constexpr int kTransposers = 2;
  /// Rows of the output are bf16 or f16.
  static constexpr bool kChoosesOutput = true;
  /// Weights are multiplied by a power of two, so that small ones are not lost; the largest e4m3fn is 448.
  static constexpr int kWeightLog2 = 8;

  /// Of the output.
  static constexpr bool kFetchesRows = false;
  using Panel = SwizzleAtom<64>;
  /// Of Q, K and V: 128 elements.
  using FetchedPanel = SwizzleAtom<64>;
  static constexpr int kQueryPanels = kHeadDim / FetchedPanel::kRowBytes;
  static constexpr int kQueryPanelBytes = kRows * FetchedPanel::kRowBytes;
  static constexpr int kQueryBytes = kQueryPanels * kQueryPanelBytes;

  struct FetchedBlock {
    static constexpr int kPanels = kQueryPanels;
    static constexpr int kBytes = kPanels * Choice::kKeys * FetchedPanel::kRowBytes;
    static constexpr int kPanelDistance =
        kStorage == Storage::paged ? FetchedPanel::kBytes : Choice::kKeys * FetchedPanel::kRowBytes;
    static constexpr int kGroupDistance =
        kStorage == Storage::paged ? kPanels * FetchedPanel::kBytes : FetchedPanel::kBytes;
  };
  using KeyBlock = FetchedBlock;
  /// V transposed: panels of 128 keys, [panel][column][key].
  struct ValueBlock {
    static constexpr int kPanels = kValueDim / Panel::kColumns;  // of the output
    static constexpr int kPanelDistance = kValueDim * FetchedPanel::kRowBytes;
    static constexpr int kBytes = (Choice::kKeys + 127) / 128 * kPanelDistance;
  };

  static constexpr int kKeysOffset = kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + Choice::kStages * KeyBlock::kBytes;
  static constexpr int kFetchedOffset = kValuesOffset + Choice::kStages * ValueBlock::kBytes;
  static constexpr int kOutputOffset = kFetchedOffset + Choice::kStages * FetchedBlock::kBytes;
  static constexpr int kOutputWarpBytes = 16 * 2 * kValueDim;
  static constexpr int kOutputBytes = kComputeWarps * kOutputWarpBytes;
  static constexpr bool kStagesOutput = kOutputOffset + kOutputBytes < 226 * 1024;
  static constexpr int kPlansOffset = kOutputOffset + (kStagesOutput ? kOutputBytes : 0);
  static constexpr int kBarriersOffset = kPlansOffset + 2 * static_cast<int>(sizeof(TilePlan));
  static constexpr int kAlignment = 1024;

  static_assert(Choice::kRegisters * kComputeThreads + Choice::kLoaderRegisters * 128 <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "registers are taken out of what the CTA got at its start");
  static_assert(Choice::kKeys % 32 == 0 && kHeadDim % 128 == 0);
};

}  // namespace xa::hopper
