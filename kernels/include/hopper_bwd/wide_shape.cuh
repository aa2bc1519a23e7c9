// Sizes of what the kernels of wide rows, past 128 columns, work on and have in shared memory.
//
// All tiles are panels of 64 columns. What stays while others stream past is a tile of panels at a constant distance;
// what streams past goes through a ring of panels of kStepRows rows, each with a place and barriers of its own: so a
// panel is fetched as soon as the one before it in its place is done with, and a ring need not hold whole blocks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/swizzle_atom.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "tiles/hopper_bwd_wide.cuh"

namespace xa::hopper {

/// A row of tiles::HopperBwdWide. In `dkdv` a CTA holds 64 keys of a KV head while blocks of kStepRows queries stream
/// past; in `dq` it holds 128 queries of a head while blocks of kStepRows keys stream past.
template <typename Gradient, typename HeadDim, typename LogitsTransform>
struct WideShape : tiles::HopperBwdWide<Gradient, HeadDim, LogitsTransform> {
  using Choice = tiles::HopperBwdWide<Gradient, HeadDim, LogitsTransform>;
  static constexpr bool kOfKeys = std::is_same_v<Gradient, tiles::gradient_dkdv>;
  static constexpr bool kCapped = std::is_same_v<LogitsTransform, tiles::logits_softcap>;
  static constexpr bool kBiased = std::is_same_v<LogitsTransform, tiles::logits_alibi>;
  static constexpr int kHeadDim = Choice::kDim;
  static constexpr int kQueries = kOfKeys ? Choice::kStepRows : 128, kKeys = kOfKeys ? 64 : Choice::kStepRows;
  /// Steps of 16 columns of K and V of which a warpgroup of dK and dV has its operand in registers.
  static constexpr int kHeldSteps = !kOfKeys ? 0 : kHeadDim == 256 ? 6 : Choice::kValueDim == 128 ? 8 : 4;
  /// Whether dQ of a block of keys is still being computed while P of the next block is; and whether a block of dout or
  /// q is released as soon as half of the next block's P or dS is there, rather than all of it. Both are measured
  /// (docs/performance.md).
  static constexpr bool kOverlapsDq = Choice::kValueDim <= 128;
  static constexpr bool kReleasesEarly = Choice::kValueDim <= 128;
  /// Nothing is added up across CTAs.
  static constexpr bool kAddsSums = false;
  /// Two of arithmetic, one of loads.
  static constexpr int kThreads = 384, kComputeWarps = 8;

  using Panel = SwizzleAtom<64>;
  /// Of q and K, and of dout and V.
  static constexpr int kPanels = Choice::kDim / 64, kValuePanels = Choice::kValueDim / 64;
  static constexpr int kHeldRows = kOfKeys ? kKeys : kQueries;
  static constexpr int kHeldPanelBytes = kHeldRows * Panel::kRowBytes,
                       kPanelBytes = Choice::kStepRows * Panel::kRowBytes;
  static constexpr int kHeldBytes = kPanels * kHeldPanelBytes, kHeldValueBytes = kValuePanels * kHeldPanelBytes;
  /// P of a block in f16, in the order of the accumulators' registers, from one warpgroup for the other.
  static constexpr int kWeightBytes = kOfKeys ? kKeys * kQueries * 2 : 0;
  /// lse or delta of a block of queries, which a warp copies 32 at a time, and the slope of their head.
  static constexpr int kSlopeOffset = (kQueries + 31) / 32 * 32 * 4;
  static constexpr int kRowStatBytes = kOfKeys ? kSlopeOffset + (kBiased ? 16 : 0) : 0;

  static constexpr int kHeldOffset = 0;
  static constexpr int kHeldValuesOffset = kHeldOffset + kHeldBytes;
  static constexpr int kWeightsOffset = kHeldValuesOffset + kHeldValueBytes;
  static constexpr int kRingOffset = kWeightsOffset + kWeightBytes;
  static constexpr int kValueRingOffset = kRingOffset + Choice::kRing * kPanelBytes;
  static constexpr int kLsesOffset = kValueRingOffset + Choice::kValueRing * kPanelBytes;
  static constexpr int kDeltasOffset = kLsesOffset + 2 * kRowStatBytes;
  static constexpr int kTilesOffset = kDeltasOffset + 2 * kRowStatBytes;
  static constexpr int kBarriersOffset = kTilesOffset + 2 * 64;
  static constexpr int kBarriers = 18 + 2 * (Choice::kRing + Choice::kValueRing);
  static_assert(Choice::kSharedBytes == kBarriersOffset + 8 * kBarriers);
};

/// Blocks of 64 keys, and of 128 queries, that hopper_bwd_prepare counts for the kernels of wide rows.
template <int kHeadDim_>
struct WidePlanShape {
  static constexpr int kHeadDim = kHeadDim_, kQueries = 128, kKeys = 64;
  static constexpr bool kAddsSums = false;
};

/// A block of queries of one head, and the blocks of keys that it sees.
struct QueryTile {
  int32_t block;  // of the sequence; negative where there is no tile
  int32_t head;
  int32_t first_block;
  int32_t num_blocks;
  int32_t first_query;
  int32_t num_queries;
  int32_t first_key;
  int32_t num_keys;
  int32_t shift;
  int32_t sequence;
};
static_assert(sizeof(QueryTile) <= 64);

/// What the warps of a CTA hand to each other.
template <typename Shape>
class WidePipeline {
  enum : int {
    kTileFull = 0,
    kTileEmpty = 2,
    kHeldFull = 4,
    kHeldEmpty,
    kHeldValuesFull,
    kHeldValuesEmpty,
    kLsesFull = 8,
    kLsesEmpty = 10,
    kDeltasFull = 12,
    kDeltasEmpty = 14,
    kWeightsFull = 16,
    kWeightsEmpty,
    kRingFull = 18,
    kRingEmpty = kRingFull + Shape::kRing,
    kValueRingFull = kRingEmpty + Shape::kRing,
    kValueRingEmpty = kValueRingFull + Shape::kValueRing,
  };

 public:
  using Tile = std::conditional_t<Shape::kOfKeys, BackwardTile, QueryTile>;
  using At = RingPosition<Shape::kRing>;
  using ValueAt = RingPosition<Shape::kValueRing>;

  __device__ __forceinline__ explicit WidePipeline(uint8_t* shared)
      : shared_(shared), address_(xa::ptx::shared_address(shared)) {}

  /// The work of one thread; a barrier of the CTA must follow.
  __device__ __forceinline__ void init() const {
    const auto init = [&](int first, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier(first + i, 0).address, arrivals);
    };
    constexpr int kWarps = Shape::kComputeWarps;
    init(kTileFull, 2, 1);
    init(kTileEmpty, 2, kWarps + 1);
    init(kHeldFull, 1, 1);
    init(kHeldEmpty, 1, Shape::kOfKeys ? kWarps / 2 : kWarps);
    init(kHeldValuesFull, 1, 1);
    init(kHeldValuesEmpty, 1, Shape::kOfKeys ? kWarps / 2 : kWarps);
    init(kLsesFull, 2, 32);
    init(kLsesEmpty, 2, kWarps / 2);
    init(kDeltasFull, 2, 32);
    init(kDeltasEmpty, 2, kWarps / 2);
    init(kWeightsFull, 2, kWarps / 2);
    init(kRingFull, Shape::kRing, 1);
    init(kRingEmpty, Shape::kRing, kWarps);
    init(kValueRingFull, Shape::kValueRing, 1);
    init(kValueRingEmpty, Shape::kValueRing, kWarps);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }

  __device__ __forceinline__ Barrier tile_full(PipelineState<2> turn) const {
    return barrier(kTileFull + turn.stage, turn.phase);
  }
  __device__ __forceinline__ Barrier tile_empty(PipelineState<2> turn) const {
    return barrier(kTileEmpty + turn.stage, turn.phase);
  }
  /// K or q of a tile.
  __device__ __forceinline__ Barrier held_full(int32_t tile) const { return barrier(kHeldFull, tile & 1); }
  __device__ __forceinline__ Barrier held_empty(int32_t tile) const { return barrier(kHeldEmpty, tile & 1); }
  /// V or dout of a tile.
  __device__ __forceinline__ Barrier held_values_full(int32_t tile) const { return barrier(kHeldValuesFull, tile & 1); }
  __device__ __forceinline__ Barrier held_values_empty(int32_t tile) const {
    return barrier(kHeldValuesEmpty, tile & 1);
  }
  __device__ __forceinline__ Barrier lses_full(PipelineState<2> step) const {
    return barrier(kLsesFull + step.stage, step.phase);
  }
  __device__ __forceinline__ Barrier lses_empty(PipelineState<2> step) const {
    return barrier(kLsesEmpty + step.stage, step.phase);
  }
  __device__ __forceinline__ Barrier deltas_full(PipelineState<2> step) const {
    return barrier(kDeltasFull + step.stage, step.phase);
  }
  __device__ __forceinline__ Barrier deltas_empty(PipelineState<2> step) const {
    return barrier(kDeltasEmpty + step.stage, step.phase);
  }
  __device__ __forceinline__ Barrier weights_full(int32_t step) const { return barrier(kWeightsFull, step & 1); }
  __device__ __forceinline__ Barrier weights_empty(int32_t step) const { return barrier(kWeightsEmpty, step & 1); }
  /// A panel of what streams past: of q or K,
  __device__ __forceinline__ Barrier full(At at) const { return barrier(kRingFull + at.stage, at.phase); }
  __device__ __forceinline__ Barrier empty(At at) const { return barrier(kRingEmpty + at.stage, at.phase); }
  __device__ __forceinline__ uint32_t panel(At at) const {
    return address_ + Shape::kRingOffset + at.stage * Shape::kPanelBytes;
  }
  /// and of dout or V.
  __device__ __forceinline__ Barrier full_values(ValueAt at) const {
    return barrier(kValueRingFull + at.stage, at.phase);
  }
  __device__ __forceinline__ Barrier empty_values(ValueAt at) const {
    return barrier(kValueRingEmpty + at.stage, at.phase);
  }
  __device__ __forceinline__ uint32_t value_panel(ValueAt at) const {
    return address_ + Shape::kValueRingOffset + at.stage * Shape::kPanelBytes;
  }

  __device__ __forceinline__ uint32_t held() const { return address_ + Shape::kHeldOffset; }
  __device__ __forceinline__ uint32_t held_values() const { return address_ + Shape::kHeldValuesOffset; }
  __device__ __forceinline__ uint32_t weights() const { return address_ + Shape::kWeightsOffset; }
  __device__ __forceinline__ uint32_t lses(int32_t slot) const {
    return address_ + Shape::kLsesOffset + slot * Shape::kRowStatBytes;
  }
  __device__ __forceinline__ uint32_t deltas(int32_t slot) const {
    return address_ + Shape::kDeltasOffset + slot * Shape::kRowStatBytes;
  }
  __device__ __forceinline__ Tile& tile(PipelineState<2> turn) const {
    return *reinterpret_cast<Tile*>(shared_ + Shape::kTilesOffset + 64 * turn.stage);
  }

 private:
  __device__ __forceinline__ Barrier barrier(int number, uint32_t parity) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * number, parity};
  }

  uint8_t* shared_;
  uint32_t address_;
};

}  // namespace xa::hopper
