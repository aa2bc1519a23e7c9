// Decode's loop over keys on Hopper: as ../decode_loop.cuh, but TMA loads blocks of K and V, which one lane issues.
// With cp.async by all lanes, half of the loop's instructions are copies.
#pragma once

#include <cstdint>

#include "decode_loop.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "row_pairs.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Tensor maps of K and V, whose boxes are kTokensPerLoad tokens of a page and one KV head, and the stride of KV
/// heads.
struct KvTensorMaps {
  const TensorMap& k;
  const TensorMap& v;
  int32_t k_head_atom_columns;
  int32_t v_head_atom_columns;
};

/// A warp's ring of stages, each of a block of K, a block of V and a full mbarrier. It needs no empty mbarriers,
/// because producer and consumer are the same warp.
template <typename Shape>
struct TmaRing {
  uint32_t blocks;
  uint32_t barriers;

  __device__ __forceinline__ explicit TmaRing(const uint8_t* shared) {
    const uint32_t warp = uniform(xa::ptx::opaque(threadIdx.x) / 32), address = xa::ptx::shared_address(shared);
    blocks = address + Shape::kRingsOffset + warp * Shape::kRingBytes;
    barriers = address + Shape::kBarriersOffset + warp * 8 * Shape::kStages;
  }
  /// Called before the first use; __syncthreads must follow.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x % 32 != 0) return;
    for (int stage = 0; stage < Shape::kStages; ++stage) ptx::mbarrier_init(barriers + 8 * stage, 1);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }
  /// Called after the last use, so that the memory of the mbarriers may be reused.
  __device__ __forceinline__ void invalidate() const {
    if (threadIdx.x % 32 != 0) return;
    for (int stage = 0; stage < Shape::kStages; ++stage) ptx::mbarrier_inval(barriers + 8 * stage);
  }
  __device__ __forceinline__ Barrier full(PipelineState<Shape::kStages> state) const {
    return Barrier{barriers + 8 * state.stage, state.phase};
  }
  /// Shared address of a block of K; the block of V follows it.
  __device__ __forceinline__ uint32_t keys(PipelineState<Shape::kStages> state) const {
    return blocks + state.stage * 2 * Shape::kBlockBytes;
  }
};

/// Streams the warp's keys of a work tile through its ring.
template <typename Shape, typename T>
class TmaDecodeLoop {
  using Math = TileMath<T, T, typename Shape::Rows, 1, Shape::kKeys, Shape::kHeadDim>;
  static constexpr int kStages = Shape::kStages, kStep = Shape::kKeys * Shape::kKeyWarps;
  static_assert(Shape::kKeys == kTokensPerLoad);

 public:
  using State = SoftmaxState<1, Shape::kHeadDim / 8>;
  using Query = QueryFragments<1, Shape::kHeadDim, sizeof(T), true>;

  /// Starts to load page table entries. `count` is the number of blocks that the warp has consumed so far, in all work
  /// tiles.
  __device__ __forceinline__ TmaDecodeLoop(const AttentionParams& params, const WorkTile& work,
                                           const KvTensorMaps& maps, const uint8_t* shared, int32_t& count)
      : params_(params),
        work_(work),
        maps_(maps),
        ring_(shared),
        count_(count),
        first_key_(first_block_key<Shape>(work.keys)),
        slots_(params, work, first_key_) {}

  /// Issues the loads of the first blocks and waits for the query rows, whose copies to `query_rows` the caller has
  /// issued.
  __device__ __forceinline__ Query begin(uint32_t query_rows) {
    int32_t issued = count_;
#pragma unroll 1
    for (int32_t stage = 0; stage < kStages; ++stage) load(issued++, first_key_ + stage * kStep);
    xa::ptx::cp_async_wait<0>();
    __syncthreads();
    Query query(query_rows);
    query.fill();
    return query;
  }

  /// Attends to the warp's keys and leaves the result in `state`.
  template <typename LogitsTransform>
  __device__ __forceinline__ void attend(State& state, const Query& query, const LogitsTransform& transform) {
    int32_t count = count_;
#pragma unroll 1
    for (int32_t key = first_key_; key < work_.keys.end; key += kStep) {
      const PipelineState<kStages> at(count);
      const uint32_t keys = ring_.keys(at);
      ring_.full(at).wait();
      float scores[1][Shape::kKeys / 8][4];
      Math::scores(scores, query, keys, params_);
      transform.template apply<T>(scores[0], transform.rows(work_, 0), key);
      if (key < work_.keys.common_begin || key + Shape::kKeys > work_.keys.common_end) {
        apply_mask(scores[0], params_, work_.tile, 0, key);
        clear_invisible_values(keys + Shape::kBlockBytes, key);
      }
      state.update(0, scores[0], transform.log2_unit(), work_.tile.num_rows > 8);
      Math::accumulate(state.output, scores, keys + Shape::kBlockBytes, params_);
      // All lanes must have read the blocks before TMA overwrites them.
      __syncwarp();
      load(count + kStages, key + kStages * kStep);
      ++count;
    }
    count_ = count;
    state.finish();
  }

 private:
  /// Issues the loads of the warp's blocks number `count`, which begin at `key`; none past the end.
  __device__ __forceinline__ void load(int32_t count, int32_t key) {
    const TokenSlot slot = slots_.next();
    if (key >= work_.keys.end) return;
    const PipelineState<kStages> state(count);
    const Barrier full = ring_.full(state);
    const uint32_t to = ring_.keys(state);
    if (threadIdx.x % 32 != 0) return;
    const int32_t page = clamp(slot.page, 0, params_.num_pages - 1), row_group = slot.offset / 8;
    const uint64_t policy = xa::ptx::evict_first_policy();
    full.arrive_expect_tx(2 * Shape::kBlockBytes);
    ptx::tma_load(to, maps_.k, full.address, 0, 0, work_.kv_head * maps_.k_head_atom_columns, row_group, page, policy);
    ptx::tma_load(to + Shape::kBlockBytes, maps_.v, full.address, 0, 0, work_.kv_head * maps_.v_head_atom_columns,
                  row_group, page, policy);
  }

  /// Clears the rows of V outside the work tile's keys. Boxes contain them, and they may be NaN or Inf.
  __device__ __forceinline__ void clear_invisible_values(uint32_t values, int32_t key) const {
    const int32_t begin = work_.keys.begin - key, end = work_.keys.end - key, lane = threadIdx.x % 32;
    if (begin > 0 || end < Shape::kKeys) {
      constexpr int kChunks = Shape::kRowBytes / 16;
      for (int32_t item = lane; item < Shape::kKeys * kChunks; item += 32) {
        const int32_t row = item / kChunks;
        if (row < begin || row >= end) {
          xa::ptx::clear_shared_16(values + Shape::Rows::offset(row, item % kChunks));
        }
      }
      ptx::fence_proxy_async_shared();
      __syncwarp();
    }
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  const KvTensorMaps& maps_;
  const TmaRing<Shape> ring_;
  int32_t& count_;
  const int32_t first_key_;
  PageTableReader<Shape::kKeys, kStep, true> slots_;
};

}  // namespace xa::hopper
