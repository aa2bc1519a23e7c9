// Tile shape, shared memory and pipeline of the backward kernels of sm_90a past 128 columns.
//
// Operands are atom columns of 64 columns (hopper/swizzle_atom.cuh). A tile's *held* rows stay in shared memory, or in
// registers if all of them fit there; *streamed* rows go through a ring whose stages are atom columns of kStepRows
// rows, each with its pair of mbarriers. A stage is refilled as soon as its last reader has released it, and a ring
// need not hold whole blocks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/swizzle_atom.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "tiles/hopper_bwd_wide.cuh"

namespace xa::hopper {

/// A row of tiles::HopperBwdWide (kernels/variants.toml). In `dkdv` a CTA holds 64 keys of a KV head while blocks of
/// kStepRows queries stream past; in `dq` it holds 128 queries of a head while blocks of kStepRows keys stream past.
template <typename Gradient, typename HeadDim, typename LogitsTransform>
struct WideShape : tiles::HopperBwdWide<Gradient, HeadDim, LogitsTransform> {
  using Config = tiles::HopperBwdWide<Gradient, HeadDim, LogitsTransform>;
  static constexpr bool kComputesDkDv = std::is_same_v<Gradient, tiles::gradient_dkdv>;
  static constexpr bool kHasSoftcap = std::is_same_v<LogitsTransform, tiles::logits_softcap>;
  static constexpr bool kHasAlibi = std::is_same_v<LogitsTransform, tiles::logits_alibi>;
  /// As in shape.cuh.
  static constexpr bool kMasksQueriesPastEnd = kHasAlibi;
  static constexpr int kHeadDim = Config::kDim;
  static constexpr int kQueries = kComputesDkDv ? Config::kStepRows : 128,
                       kKeys = kComputesDkDv ? 64 : Config::kStepRows;
  /// Steps of 16 columns of K and V that the compute warpgroups of dK and dV keep in registers as operand A.
  static constexpr int kHeldSteps = !kComputesDkDv ? 0 : kHeadDim == 256 ? 6 : Config::kValueDim == 192 ? 12 : 8;
  /// All of K and V is in registers, and comes there through the rings, which are longer for it.
  static constexpr bool kStreamsHeld = 16 * kHeldSteps == Config::kDim && Config::kValueDim == Config::kDim;
  /// kOverlapsDq: dQ of a key block runs while P of the next block is computed. kReleasesEarly: a block of dO or Q is
  /// released when half of the next block's P or dS is computed, rather than all of it. Both are measured
  /// (docs/dev/lab_notebook.md).
  static constexpr bool kOverlapsDq = Config::kValueDim <= 128;
  static constexpr bool kReleasesEarly = Config::kValueDim <= 192;
  /// No CTA adds to the results of another one.
  static constexpr bool kAccumulatesDq = false, kHasKeyRanges = false, kHasBias = false;
  /// Two compute warpgroups and one of producer warps.
  static constexpr int kThreads = 384, kComputeWarps = 8;

  using Atom = SwizzleAtom<64>;
  /// Atom columns of Q and K, and of dO and V.
  static constexpr int kAtomColumns = Config::kDim / 64, kValueAtomColumns = Config::kValueDim / 64;
  static constexpr int kHeldRows = kComputesDkDv ? kKeys : kQueries;
  static constexpr int kHeldAtomColumnBytes = kHeldRows * Atom::kRowBytes,
                       kAtomColumnBytes = Config::kStepRows * Atom::kRowBytes;
  static constexpr int kHeldBytes = kStreamsHeld ? 0 : kAtomColumns * kHeldAtomColumnBytes,
                       kHeldValueBytes = kStreamsHeld ? 0 : kValueAtomColumns * kHeldAtomColumnBytes;
  /// The atom columns of K or V are adjacent in their ring.
  static_assert(!kStreamsHeld || (kHeldAtomColumnBytes <= kAtomColumnBytes && Config::kRing % kAtomColumns == 0 &&
                                  Config::kValueRing % kValueAtomColumns == 0));
  /// P of a block in f16, in the register layout of the accumulators, from the first warpgroup for the second one.
  static constexpr int kPBytes = kComputesDkDv ? kKeys * kQueries * 2 : 0;
  /// lse or delta of a query block, which a warp copies in rounds of 32, and the ALiBi slope of their head.
  static constexpr int kSlopeOffset = (kQueries + 31) / 32 * 32 * 4;
  static constexpr int kRowStatBytes = kComputesDkDv ? kSlopeOffset + (kHasAlibi ? 16 : 0) : 0;

  static constexpr int kHeldOffset = 0;
  static constexpr int kHeldValuesOffset = kHeldOffset + kHeldBytes;
  static constexpr int kPOffset = kHeldValuesOffset + kHeldValueBytes;
  static constexpr int kRingOffset = kPOffset + kPBytes;
  static constexpr int kValueRingOffset = kRingOffset + Config::kRing * kAtomColumnBytes;
  static constexpr int kLsesOffset = kValueRingOffset + Config::kValueRing * kAtomColumnBytes;
  static constexpr int kDeltasOffset = kLsesOffset + 2 * kRowStatBytes;
  static constexpr int kTilesOffset = kDeltasOffset + 2 * kRowStatBytes;
  static constexpr int kBarriersOffset = kTilesOffset + 2 * 64;
  static constexpr int kBarriers = 18 + 2 * (Config::kRing + Config::kValueRing);
  static_assert(Config::kSharedBytes == kBarriersOffset + 8 * kBarriers);
};

/// The block sizes with which hopper_bwd_prepare plans for the kernels past 128 columns.
template <int kHeadDim_>
struct WidePlanShape {
  static constexpr int kHeadDim = kHeadDim_, kKeys = 64;
  static constexpr bool kAccumulatesDq = false, kHasKeyRanges = false, kHasBias = false;
};

/// A work tile of dQ: a query block of one head, and the key blocks that it attends to.
struct QueryTile {
  int32_t block;  // of the sequence; negative past the last tile
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

/// The producer-consumer pipeline of a CTA, with full and empty mbarriers as in pipeline.cuh.
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
    kPFull = 16,
    kPEmpty,
    kRingFull = 18,
    kRingEmpty = kRingFull + Shape::kRing,
    kValueRingFull = kRingEmpty + Shape::kRing,
    kValueRingEmpty = kValueRingFull + Shape::kValueRing,
  };

 public:
  using Tile = std::conditional_t<Shape::kComputesDkDv, BackwardTile, QueryTile>;
  using StreamedState = RingPipelineState<Shape::kRing>;
  using StreamedValuesState = RingPipelineState<Shape::kValueRing>;

  __device__ __forceinline__ explicit WidePipeline(uint8_t* shared)
      : shared_(shared), address_(xa::ptx::shared_address(shared)) {}

  /// Called by one thread; __syncthreads must follow.
  __device__ __forceinline__ void init() const {
    const auto init = [&](int first, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier(first + i, 0).address, arrivals);
    };
    constexpr int kWarps = Shape::kComputeWarps;
    init(kTileFull, 2, 1);
    init(kTileEmpty, 2, kWarps + 1);
    init(kHeldFull, 1, 1);
    init(kHeldEmpty, 1, Shape::kComputesDkDv ? kWarps / 2 : kWarps);
    init(kHeldValuesFull, 1, 1);
    init(kHeldValuesEmpty, 1, Shape::kComputesDkDv ? kWarps / 2 : kWarps);
    init(kLsesFull, 2, 32);
    init(kLsesEmpty, 2, kWarps / 2);
    init(kDeltasFull, 2, 32);
    init(kDeltasEmpty, 2, kWarps / 2);
    init(kPFull, 2, kWarps / 2);
    init(kRingFull, Shape::kRing, 1);
    init(kRingEmpty, Shape::kRing, kWarps);
    init(kValueRingFull, Shape::kValueRing, 1);
    init(kValueRingEmpty, Shape::kValueRing, kWarps);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }
  /// Called by one thread when no thread uses the pipeline any more; its shared memory may then be used for others.
  __device__ __forceinline__ void invalidate() const {
    for (int i = 0; i < Shape::kBarriers; ++i) ptx::mbarrier_inval(barrier(i, 0).address);
  }

  __device__ __forceinline__ Barrier tile_full(PipelineState<2> state) const {
    return barrier(kTileFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier tile_empty(PipelineState<2> state) const {
    return barrier(kTileEmpty + state.stage, state.phase);
  }
  /// Held rows: K or Q of a tile.
  __device__ __forceinline__ Barrier held_full(int32_t tile_count) const { return barrier(kHeldFull, tile_count & 1); }
  __device__ __forceinline__ Barrier held_empty(int32_t tile_count) const {
    return barrier(kHeldEmpty, tile_count & 1);
  }
  /// Held rows: V or dO of a tile.
  __device__ __forceinline__ Barrier held_values_full(int32_t tile_count) const {
    return barrier(kHeldValuesFull, tile_count & 1);
  }
  __device__ __forceinline__ Barrier held_values_empty(int32_t tile_count) const {
    return barrier(kHeldValuesEmpty, tile_count & 1);
  }
  __device__ __forceinline__ Barrier lses_full(PipelineState<2> state) const {
    return barrier(kLsesFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier lses_empty(PipelineState<2> state) const {
    return barrier(kLsesEmpty + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier deltas_full(PipelineState<2> state) const {
    return barrier(kDeltasFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier deltas_empty(PipelineState<2> state) const {
    return barrier(kDeltasEmpty + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier p_full(int32_t step) const { return barrier(kPFull, step & 1); }
  __device__ __forceinline__ Barrier p_empty(int32_t step) const { return barrier(kPEmpty, step & 1); }
  /// A stage of streamed rows: an atom column of Q or K.
  __device__ __forceinline__ Barrier streamed_full(StreamedState state) const {
    return barrier(kRingFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier streamed_empty(StreamedState state) const {
    return barrier(kRingEmpty + state.stage, state.phase);
  }
  __device__ __forceinline__ uint32_t streamed(StreamedState state) const {
    return address_ + Shape::kRingOffset + state.stage * Shape::kAtomColumnBytes;
  }
  /// The same of dO or V.
  __device__ __forceinline__ Barrier streamed_values_full(StreamedValuesState state) const {
    return barrier(kValueRingFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier streamed_values_empty(StreamedValuesState state) const {
    return barrier(kValueRingEmpty + state.stage, state.phase);
  }
  __device__ __forceinline__ uint32_t streamed_values(StreamedValuesState state) const {
    return address_ + Shape::kValueRingOffset + state.stage * Shape::kAtomColumnBytes;
  }

  __device__ __forceinline__ uint32_t held() const { return address_ + Shape::kHeldOffset; }
  __device__ __forceinline__ uint32_t held_values() const { return address_ + Shape::kHeldValuesOffset; }
  __device__ __forceinline__ uint32_t p() const { return address_ + Shape::kPOffset; }
  __device__ __forceinline__ uint32_t lses(int32_t stage) const {
    return address_ + Shape::kLsesOffset + stage * Shape::kRowStatBytes;
  }
  __device__ __forceinline__ uint32_t deltas(int32_t stage) const {
    return address_ + Shape::kDeltasOffset + stage * Shape::kRowStatBytes;
  }
  __device__ __forceinline__ Tile& tile(PipelineState<2> state) const {
    return *reinterpret_cast<Tile*>(shared_ + Shape::kTilesOffset + 64 * state.stage);
  }

 private:
  __device__ __forceinline__ Barrier barrier(int index, uint32_t phase) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * index, phase};
  }

  uint8_t* shared_;
  uint32_t address_;
};

}  // namespace xa::hopper
