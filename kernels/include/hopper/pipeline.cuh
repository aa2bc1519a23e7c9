// The producer-consumer pipeline of a prefill CTA. Every buffer (Q, a stage of K or V, a work tile) has a *full* and an
// *empty* mbarrier: producers wait for empty and arrive at full, consumers wait for full and arrive at empty.
//
//   buffer           producer                        consumers
//   PrefillTile [2]  scheduler warp                  load warps, compute warps
//   Q                TMA, issued by the K warp       compute warps
//   K [kStages]      TMA, issued by the K warp       compute warps
//   V [kValueStages] TMA, issued by the V warp       compute warps
//   rows of K or V   cp.async of both load warps     publish warp, then compute warps (cp_async_load.cuh)
//   V in fp8         TMA, then the transpose warps   compute warps
//   8-bit K or V     TMA, then the converter warps   compute warps (convert_kv.cuh)
//   f32 K or V       cp.async of the load warps      compute warps, which split them (f32_compute.cuh)
//   bias             TMA or cp.async, bias warp      compute warps
//   scales of rows   cp.async, a load warp           compute warps (token_scales.cuh)
//
// In a cluster of two CTAs, TMA of one CTA writes K to both, and of the other one V. Each CTA expects the bytes at its
// own full barriers; the compute warps of both arrive at the empty barrier of the CTA that loads.
#pragma once

#include <cstdint>

#include "cluster_async.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "ptx.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Stage and phase parity of the n-th use of a buffer with kStages stages, as in CUTLASS.
template <int kStages>
struct PipelineState {
  static constexpr bool kIsPowerOfTwo = (kStages & (kStages - 1)) == 0;
  uint32_t stage;
  uint32_t phase;
  __device__ __forceinline__ explicit PipelineState(int32_t n)
      : stage(kIsPowerOfTwo ? n & (kStages - 1) : static_cast<uint32_t>(n) % kStages),
        phase((kIsPowerOfTwo ? n / kStages : static_cast<uint32_t>(n) / kStages) & 1) {}
};

/// An mbarrier and the phase parity to wait for. A wait only tells even phases from odd ones, so a waiter must not fall
/// two phases behind: the next phase must not complete before every waiter has passed this one.
struct Barrier {
  uint32_t address;
  uint32_t phase;

  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(address, phase); }
  /// A producer's wait for an empty buffer, which passes at once when a stage is used for the first time.
  __device__ __forceinline__ void producer_wait() const { ptx::mbarrier_wait(address, phase ^ 1); }
  __device__ __forceinline__ void arrive() const { ptx::mbarrier_arrive(address); }
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) const {
    ptx::mbarrier_arrive_expect_tx(address, bytes);
  }
};

/// Addresses of the buffers and mbarriers in shared memory.
template <typename Shape>
class Pipeline {
  static constexpr int kStages = Shape::kStages, kValueStages = Shape::kValueStages;
  // Whether other buffers than those that the compute warps read are loaded.
  static constexpr bool kLoadsKeysApart = Shape::kConvertsKv;
  static constexpr bool kLoadsValuesApart = Shape::kConvertsKv || Shape::kTransposeWarps > 0;
  // Warps that read V as loaded.
  static constexpr int kValueReaders = Shape::kConvertsKv ? Shape::kConverterWarps / 2 : Shape::kTransposeWarps;
  static constexpr int kSharesTileIndex = Shape::kClusterSize > 1 ? 1 : 0;
  // Index of the first mbarrier of each kind.
  enum : int {
    kQueryFull = 0,
    kQueryEmpty = 1,
    kKeysFull = 2,
    kKeysEmpty = kKeysFull + kStages,
    kValuesFull = kKeysEmpty + kStages,
    kValuesEmpty = kValuesFull + kValueStages,
    kTileFull = kValuesEmpty + kValueStages,
    kTileEmpty = kTileFull + 2,
    kTileWanted = kTileEmpty + 2,
    kPartialValuesFull = kTileWanted + (Shape::kSplitsKeys ? 0 : 1),
    kStartsChecked = kPartialValuesFull + 1,
    kFirstKeysLoaded = kStartsChecked + 1,
    kOutputLeft = kFirstKeysLoaded + (Shape::kSplitsKeys ? 0 : 1),
    kLoadedValuesFull = kOutputLeft + (Shape::kStagesOutputInValues ? kStages : 0),
    kLoadedValuesEmpty = kLoadedValuesFull + (kLoadsValuesApart ? Shape::kLoadedValueStages : 0),
    kLoadedKeysFull = kLoadedValuesEmpty + (kLoadsValuesApart ? Shape::kLoadedValueStages : 0),
    kLoadedKeysEmpty = kLoadedKeysFull + (kLoadsKeysApart ? Shape::kLoadedKeyStages : 0),
    kTileIndexFull = kLoadedKeysEmpty + (kLoadsKeysApart ? Shape::kLoadedKeyStages : 0),
    kTileIndexEmpty = kTileIndexFull + kSharesTileIndex,
    kBiasFull = kTileIndexEmpty + kSharesTileIndex,
    kBiasEmpty = kBiasFull + Shape::kBiasStages,
    kScalesFull = kBiasEmpty + Shape::kBiasStages,
    kScalesEmpty = kScalesFull + Shape::kScaleStages,
    kKeysCopied = kScalesEmpty + Shape::kScaleStages,
    kValuesCopied = kKeysCopied + (Shape::kHasCpAsyncLoader ? kStages : 0),
    kBarriers = kValuesCopied + (Shape::kHasCpAsyncLoader ? kValueStages : 0),
  };
  static_assert(Shape::kBarriersOffset + 8 * (kBarriers + 1 + kSharesTileIndex) + Shape::kAlignment <=
                Shape::kSharedBytes);

 public:
  /// The CTAs of a cluster that load K and V for both.
  static constexpr uint32_t kKeysRank = 0, kValuesRank = Shape::kClusterSize - 1;

  /// `shared` is dynamic shared memory of kSharedBytes bytes. The pipeline starts at its first aligned address.
  __device__ __forceinline__ explicit Pipeline(uint8_t* shared) {
    const uint32_t address = xa::ptx::shared_address(shared);
    const uint32_t unaligned = -address % Shape::kAlignment;
    shared_ = shared + unaligned;
    address_ = address + unaligned;
  }

  /// Called by one thread; __syncthreads must follow. With `loads_by_cp_async` the publish warp takes part.
  __device__ __forceinline__ void init(bool loads_by_cp_async = false) const {
    const auto init = [&](int first, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier(first + i, 0).address, arrivals);
    };
    init(kQueryFull, 1, 1);
    init(kQueryEmpty, 1, Shape::kComputeWarps);
    init(kKeysFull, kStages, Shape::kKeyLoadWarps);
    init(kKeysEmpty, kStages, Shape::kClusterSize * Shape::kComputeWarps);
    init(kValuesFull, kValueStages, kLoadsValuesApart ? kValueReaders : 1);
    init(kValuesEmpty, kValueStages, Shape::kClusterSize * Shape::kComputeWarps);
    init(kTileFull, 2, 1);
    init(kTileEmpty, 2,
         Shape::kComputeWarps + Shape::kLoadWarps + Shape::kConverterWarps + (loads_by_cp_async ? 1 : 0));
    if constexpr (!Shape::kSplitsKeys) init(kTileWanted, 1, 1);
    init(kPartialValuesFull, 1, 1);
    init(kStartsChecked, 1, 1);
    if constexpr (!Shape::kSplitsKeys) init(kFirstKeysLoaded, 1, 1);
    if constexpr (Shape::kStagesOutputInValues) init(kOutputLeft, kStages, 4);
    if constexpr (kLoadsValuesApart) {
      init(kLoadedValuesFull, Shape::kLoadedValueStages, 1);
      init(kLoadedValuesEmpty, Shape::kLoadedValueStages, kValueReaders);
    }
    if constexpr (kLoadsKeysApart) {
      init(kLoadedKeysFull, Shape::kLoadedKeyStages, 1);
      init(kLoadedKeysEmpty, Shape::kLoadedKeyStages, Shape::kConverterWarps / 2);
    }
    if constexpr (kSharesTileIndex != 0) init(kTileIndexFull, 2, 1);
    if constexpr (Shape::kHasCpAsyncLoader) {
      init(kKeysCopied, kStages, 32 * Shape::kLoadWarps);
      init(kValuesCopied, kValueStages, 32 * Shape::kLoadWarps);
    }
    init(kBiasFull, Shape::kBiasStages, Shape::kShiftsBias ? 32 : 1);
    init(kBiasEmpty, Shape::kBiasStages, Shape::kComputeWarps);
    init(kScalesFull, Shape::kScaleStages, 32);
    init(kScalesEmpty, Shape::kScaleStages, Shape::kComputeWarps);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }

  __device__ __forceinline__ Barrier query_full(int32_t tile_count) const {
    return barrier(kQueryFull, tile_count & 1);
  }
  __device__ __forceinline__ Barrier query_empty(int32_t tile_count) const {
    return barrier(kQueryEmpty, tile_count & 1);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier keys_full(PipelineState<kCount> state) const {
    return barrier(kKeysFull, state);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier keys_empty(PipelineState<kCount> state) const {
    return barrier(kKeysEmpty, state);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier values_full(PipelineState<kCount> state) const {
    return barrier(kValuesFull, state);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier values_empty(PipelineState<kCount> state) const {
    return barrier(kValuesEmpty, state);
  }
  /// A consumer's arrival at `keys_empty` of the CTA that loads K.
  template <int kCount>
  __device__ __forceinline__ void release_keys(PipelineState<kCount> state) const {
    if constexpr (Shape::kClusterSize > 1) {
      ptx::mbarrier_arrive_at_rank(keys_empty(state).address, kKeysRank);
    } else {
      keys_empty(state).arrive();
    }
  }
  /// The same of V.
  template <int kCount>
  __device__ __forceinline__ void release_values(PipelineState<kCount> state) const {
    if constexpr (Shape::kClusterSize > 1) {
      ptx::mbarrier_arrive_at_rank(values_empty(state).address, kValuesRank);
    } else {
      values_empty(state).arrive();
    }
  }
  /// K as loaded: what is converted, or else the compute warps' K.
  template <int kCount>
  __device__ __forceinline__ Barrier loaded_keys_full(PipelineState<kCount> state) const {
    return kLoadsKeysApart ? barrier(kLoadedKeysFull, state) : keys_full(state);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier loaded_keys_empty(PipelineState<kCount> state) const {
    return kLoadsKeysApart ? barrier(kLoadedKeysEmpty, state) : keys_empty(state);
  }
  /// V as loaded: what is transposed or converted, or else the compute warps' V.
  template <int kCount>
  __device__ __forceinline__ Barrier loaded_values_full(PipelineState<kCount> state) const {
    return kLoadsValuesApart ? barrier(kLoadedValuesFull, state) : values_full(state);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier loaded_values_empty(PipelineState<kCount> state) const {
    return kLoadsValuesApart ? barrier(kLoadedValuesEmpty, state) : values_empty(state);
  }
  /// The CTA's block of V number `count`, of those of which the V warp clears rows, is loaded.
  __device__ __forceinline__ Barrier partial_values_full(int32_t count) const {
    return barrier(kPartialValuesFull, count & 1);
  }
  /// The rows of a block of K that the load warps copy by cp.async have arrived.
  template <int kCount>
  __device__ __forceinline__ Barrier keys_copied(PipelineState<kCount> state) const {
    return barrier(kKeysCopied, state);
  }
  /// The same of V.
  template <int kCount>
  __device__ __forceinline__ Barrier values_copied(PipelineState<kCount> state) const {
    return barrier(kValuesCopied, state);
  }
  __device__ __forceinline__ Barrier tile_full(PipelineState<2> state) const { return barrier(kTileFull, state); }
  __device__ __forceinline__ Barrier tile_empty(PipelineState<2> state) const { return barrier(kTileEmpty, state); }
  /// Most blocks of K of the CTA's tile number `count` are loaded, so the next tile is due.
  __device__ __forceinline__ Barrier tile_wanted(int32_t count) const { return barrier(kTileWanted, count & 1); }
  /// Arrives there. The scheduler of a work range (split_kv_prefill.cuh) does not wait for it.
  __device__ __forceinline__ void want_tile(int32_t count) const {
    if constexpr (!Shape::kSplitsKeys) tile_wanted(count).arrive();
  }
  /// `starts_ascend` is written.
  __device__ __forceinline__ Barrier starts_checked() const { return barrier(kStartsChecked, 0); }
  /// The CTA's first block of K is loaded. hopper_split_kv does not wait for it.
  __device__ __forceinline__ Barrier first_keys_loaded() const { return barrier(kFirstKeysLoaded, 0); }
  /// The rows of O that a warpgroup staged in V after the CTA's tile number `tile_count` have left it.
  __device__ __forceinline__ Barrier output_left(int32_t warpgroup, int32_t tile_count) const {
    return barrier(kOutputLeft + warpgroup, tile_count & 1);
  }

  /// The bias of a block, and its place.
  template <int kCount>
  __device__ __forceinline__ Barrier bias_full(PipelineState<kCount> state) const {
    return barrier(kBiasFull, state);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier bias_empty(PipelineState<kCount> state) const {
    return barrier(kBiasEmpty, state);
  }

  /// The scales of the rows of a block, and their place.
  template <int kCount>
  __device__ __forceinline__ Barrier scales_full(PipelineState<kCount> state) const {
    return barrier(kScalesFull, state);
  }
  template <int kCount>
  __device__ __forceinline__ Barrier scales_empty(PipelineState<kCount> state) const {
    return barrier(kScalesEmpty, state);
  }

  /// Sends the cluster's tile index number `count`, a value of the tile counter, to its second CTA. Run by a warp of
  /// the first one.
  __device__ __forceinline__ void send_tile_index(uint32_t index, int32_t count) const {
    barrier(kTileIndexEmpty, count & 1).producer_wait();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      xa::ptx::store_async_4(tile_index_address(), 1, index, barrier(kTileIndexFull, 0).address);
  }
  /// Receives it.
  __device__ __forceinline__ uint32_t receive_tile_index(int32_t count) const {
    const Barrier full = barrier(kTileIndexFull, count & 1);
    if (threadIdx.x % 32 == 0) full.arrive_expect_tx(4);
    __syncwarp();
    xa::ptx::wait_for_cluster_stores(full.address, full.phase);
    const uint32_t index = *reinterpret_cast<volatile uint32_t*>(shared_ + (tile_index_address() - address_));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_at_rank(barrier(kTileIndexEmpty, 0).address, 0);
    return index;
  }

  __device__ __forceinline__ uint32_t query() const { return address_; }
  __device__ __forceinline__ uint32_t keys(uint32_t stage) const {
    return address_ + Shape::kKeysOffset + stage * Shape::KeyBlock::kBytes;
  }
  __device__ __forceinline__ uint32_t values(uint32_t stage) const {
    return address_ + Shape::kValuesOffset + stage * Shape::ValueBlock::kBytes;
  }
  __device__ __forceinline__ uint32_t loaded_keys(uint32_t stage) const {
    if constexpr (kLoadsKeysApart) {
      return address_ + Shape::kLoadedKeysOffset + stage * Shape::LoadedKeyBlock::kBytes;
    } else {
      return keys(stage);
    }
  }
  __device__ __forceinline__ uint32_t loaded_values(uint32_t stage) const {
    if constexpr (kLoadsValuesApart) {
      return address_ + Shape::kLoadedValuesOffset + stage * Shape::LoadedValueBlock::kBytes;
    } else {
      return values(stage);
    }
  }
  __device__ __forceinline__ uint32_t key_scales(uint32_t stage) const {
    return address_ + Shape::kScalesOffset + stage * Shape::kScaleBytes;
  }
  __device__ __forceinline__ uint32_t value_scales(uint32_t stage) const {
    return key_scales(stage) + Shape::kScaleBytes / 2;
  }
  __device__ __forceinline__ uint32_t bias(uint32_t stage) const {
    return address_ + Shape::kBiasOffset + stage * Shape::kBiasBytes;
  }
  __device__ __forceinline__ uint8_t* bias_pointer(uint32_t stage) const {
    return shared_ + Shape::kBiasOffset + stage * Shape::kBiasBytes;
  }
  /// The parts of Q, K and V of f32 (f32_shape.cuh).
  __device__ __forceinline__ uint32_t query_parts() const { return address_ + Shape::kQueryOffset; }
  __device__ __forceinline__ uint32_t key_parts() const { return address_ + Shape::kKeyPartsOffset; }
  __device__ __forceinline__ uint32_t value_parts() const { return address_ + Shape::kValuePartsOffset; }
  /// Staging of a warp's 16 rows of O, in atom columns, after the CTA's block number `block_count - 1`. In V the stages
  /// of the next blocks are the first ones to be free: each warpgroup waits for one.
  __device__ __forceinline__ uint32_t output_staging(int32_t warp, int32_t block_count) const {
    if constexpr (Shape::kStagesOutputInValues) {
      const PipelineState<kStages> state(block_count + warp / 4);
      values_empty(state).producer_wait();
      return values(state.stage) + warp % 4 * Shape::kOutputWarpBytes;
    } else {
      return address_ + Shape::kOutputOffset + warp * Shape::kOutputWarpBytes;
    }
  }
  __device__ __forceinline__ uint8_t* values_pointer(uint32_t stage) const {
    return shared_ + Shape::kValuesOffset + stage * Shape::ValueBlock::kBytes;
  }
  /// The lists of rows that load warp `warp` copies by cp.async: that of K, then that of V.
  __device__ __forceinline__ uint32_t* row_entries(int32_t warp) const {
    return reinterpret_cast<uint32_t*>(shared_ + Shape::kRowEntriesOffset) + warp * 2 * Shape::kRowEntries;
  }
  /// By which the scores of the tile's rows have to be multiplied, if Q is converted.
  __device__ __forceinline__ float* row_factors() const {
    return reinterpret_cast<float*>(shared_ + Shape::kRowFactorsOffset);
  }
  __device__ __forceinline__ typename Shape::Tile& tile(PipelineState<2> state) const {
    return reinterpret_cast<typename Shape::Tile*>(shared_ + Shape::kTilesOffset)[state.stage];
  }
  /// The current work tile of the CTA's work range, in hopper_split_kv.
  __device__ __forceinline__ WorkTile& work_tile() const {
    return *reinterpret_cast<WorkTile*>(shared_ + Shape::kWorkTileOffset);
  }
  __device__ __forceinline__ WorkRange& work_range() const {
    return *reinterpret_cast<WorkRange*>(shared_ + Shape::kWorkRangeOffset);
  }
  /// Whether cu_seqlens_q is non-decreasing.
  __device__ __forceinline__ int32_t& starts_ascend() const {
    return *reinterpret_cast<int32_t*>(shared_ + Shape::kBarriersOffset + 8 * kBarriers);
  }

 private:
  __device__ __forceinline__ uint32_t tile_index_address() const {
    return address_ + Shape::kBarriersOffset + 8 * (kBarriers + 1);
  }
  __device__ __forceinline__ Barrier barrier(int index, uint32_t phase) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * index, phase};
  }
  template <int kCount>
  __device__ __forceinline__ Barrier barrier(int first, PipelineState<kCount> state) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * first + 8 * state.stage, state.phase};
  }

  uint8_t* shared_;
  uint32_t address_;
};

}  // namespace xa::hopper
