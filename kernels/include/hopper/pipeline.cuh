// What the warps of a prefill CTA hand to each other: blocks of K and V, query rows, plans, each between a barrier that
// says that it is there and one that says that it is no longer needed.
#pragma once

#include <cstdint>

#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// The n-th use of one of kStages places: which place, and the parity of the barrier's phase.
template <int kStages>
struct PipelineState {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t stage;
  uint32_t phase;
  __device__ __forceinline__ explicit PipelineState(int32_t n) : stage(n & (kStages - 1)), phase(n / kStages & 1) {}
};

/// The barrier of a turn. Who waits for a phase must not be able to miss the next one, whose end looks the same as the
/// phase not being over: without the waiter, the next phase must not end.
struct Barrier {
  uint32_t address;
  uint32_t phase;

  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(address, phase); }
  /// Of what is used again: the first turn of each place does not wait.
  __device__ __forceinline__ void producer_wait() const { ptx::mbarrier_wait(address, phase ^ 1); }
  __device__ __forceinline__ void arrive() const { ptx::mbarrier_arrive(address); }
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) const {
    ptx::mbarrier_arrive_expect_tx(address, bytes);
  }
};

template <typename Shape>
class Pipeline {
  static constexpr int kStages = Shape::kStages;
  static constexpr bool kTransposes = Shape::kTransposers > 0;
  // Numbers of barriers: first of a kind, one a place.
  enum : int {
    kQueryFull = 0,
    kQueryEmpty = 1,
    kKeysFull = 2,
    kKeysEmpty = kKeysFull + kStages,
    kValuesFull = kKeysEmpty + kStages,
    kValuesEmpty = kValuesFull + kStages,
    kPlanFull = kValuesEmpty + kStages,
    kPlanEmpty = kPlanFull + 2,
    kOrderKnown = kPlanEmpty + 2,
    kFirstKeys = kOrderKnown + 1,
    kFetchedFull = kFirstKeys + 1,
    kFetchedEmpty = kFetchedFull + (kTransposes ? kStages : 0),
    kBarriers = kFetchedEmpty + (kTransposes ? kStages : 0),
  };
  static_assert(Shape::kBarriersOffset + 8 * (kBarriers + 1) + Shape::kAlignment <= Shape::kSharedBytes);

 public:
  /// The first block of `kSharedBytes` bytes that is aligned.
  __device__ __forceinline__ explicit Pipeline(uint8_t* shared) {
    const uint32_t address = xa::ptx::shared_address(shared);
    const uint32_t unaligned = -address % Shape::kAlignment;
    shared_ = shared + unaligned;
    address_ = address + unaligned;
  }

  /// The work of one thread; a barrier of the CTA must follow.
  __device__ __forceinline__ void init() const {
    const auto init = [&](int first, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier(first + i, 0).address, arrivals);
    };
    init(kQueryFull, 1, 1);
    init(kQueryEmpty, 1, Shape::kComputeWarps);
    init(kKeysFull, kStages, 1);
    init(kKeysEmpty, kStages, Shape::kComputeWarps);
    init(kValuesFull, kStages, kTransposes ? Shape::kTransposers : 1);
    init(kValuesEmpty, kStages, Shape::kComputeWarps);
    init(kPlanFull, 2, 1);
    // And the two warps that load, of which one transposes.
    init(kPlanEmpty, 2, Shape::kComputeWarps + 2 + (kTransposes ? Shape::kTransposers - 1 : 0));
    init(kOrderKnown, 1, 1);
    init(kFirstKeys, 1, 1);
    if constexpr (kTransposes) {
      init(kFetchedFull, kStages, 1);
      init(kFetchedEmpty, kStages, Shape::kTransposers);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }

  __device__ __forceinline__ Barrier query_full(int32_t tile) const { return barrier(kQueryFull, tile & 1); }
  __device__ __forceinline__ Barrier query_empty(int32_t tile) const { return barrier(kQueryEmpty, tile & 1); }
  __device__ __forceinline__ Barrier keys_full(PipelineState<kStages> turn) const { return barrier(kKeysFull, turn); }
  __device__ __forceinline__ Barrier keys_empty(PipelineState<kStages> turn) const { return barrier(kKeysEmpty, turn); }
  __device__ __forceinline__ Barrier values_full(PipelineState<kStages> turn) const {
    return barrier(kValuesFull, turn);
  }
  __device__ __forceinline__ Barrier values_empty(PipelineState<kStages> turn) const {
    return barrier(kValuesEmpty, turn);
  }
  /// V as it has been fetched: to be transposed, or what the warpgroups get.
  __device__ __forceinline__ Barrier fetched_full(PipelineState<kStages> turn) const {
    return kTransposes ? barrier(kFetchedFull, turn) : values_full(turn);
  }
  __device__ __forceinline__ Barrier fetched_empty(PipelineState<kStages> turn) const {
    return kTransposes ? barrier(kFetchedEmpty, turn) : values_empty(turn);
  }
  __device__ __forceinline__ Barrier plan_full(PipelineState<2> turn) const { return barrier(kPlanFull, turn); }
  __device__ __forceinline__ Barrier plan_empty(PipelineState<2> turn) const { return barrier(kPlanEmpty, turn); }
  /// `starts_ascend` is there.
  __device__ __forceinline__ Barrier order_known() const { return barrier(kOrderKnown, 0); }
  /// The first block of K is there.
  __device__ __forceinline__ Barrier first_keys() const { return barrier(kFirstKeys, 0); }

  __device__ __forceinline__ uint32_t query() const { return address_; }
  __device__ __forceinline__ uint32_t keys(uint32_t slot) const {
    return address_ + Shape::kKeysOffset + slot * Shape::KeyBlock::kBytes;
  }
  __device__ __forceinline__ uint32_t values(uint32_t slot) const {
    return address_ + Shape::kValuesOffset + slot * Shape::ValueBlock::kBytes;
  }
  __device__ __forceinline__ uint32_t fetched_values(uint32_t slot) const {
    if constexpr (kTransposes) {
      return address_ + Shape::kFetchedOffset + slot * Shape::FetchedBlock::kBytes;
    } else {
      return values(slot);
    }
  }
  /// Of a warp's 16 rows, in panels.
  __device__ __forceinline__ uint32_t output(int32_t warp) const {
    return address_ + Shape::kOutputOffset + warp * Shape::kOutputWarpBytes;
  }
  __device__ __forceinline__ uint8_t* value_bytes(uint32_t slot) const {
    return shared_ + Shape::kValuesOffset + slot * Shape::ValueBlock::kBytes;
  }
  /// Words of a loading warp, one for each row of a block: K's are the first ones.
  __device__ __forceinline__ uint32_t* row_words(int operand) const {
    return reinterpret_cast<uint32_t*>(shared_ + Shape::kRowWordsOffset) + operand * Shape::kRowWords;
  }
  __device__ __forceinline__ TilePlan& plan(PipelineState<2> turn) const {
    return reinterpret_cast<TilePlan*>(shared_ + Shape::kPlansOffset)[turn.stage];
  }
  /// Of the queries.
  __device__ __forceinline__ int32_t& starts_ascend() const {
    return *reinterpret_cast<int32_t*>(shared_ + Shape::kBarriersOffset + 8 * kBarriers);
  }

 private:
  __device__ __forceinline__ Barrier barrier(int number, uint32_t phase) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * number, phase};
  }
  template <int kCount>
  __device__ __forceinline__ Barrier barrier(int first, PipelineState<kCount> turn) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * first + 8 * turn.stage, turn.phase};
  }

  uint8_t* shared_;
  uint32_t address_;
};

}  // namespace xa::hopper
