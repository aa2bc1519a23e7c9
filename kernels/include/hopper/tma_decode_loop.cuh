// Decode's loop over keys on Hopper: as ../decode_loop.cuh, but the copy engine fetches blocks of K and V as boxes of a
// page. One lane asks for them, where copies by all lanes take as many instructions as everything else.
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

/// K and V as boxes of kTokensPerLoad tokens of a page and one KV head, and panels from one head to the next.
struct KvTensorMaps {
  const TensorMap& k;
  const TensorMap& v;
  int32_t k_head_atom_columns;
  int32_t v_head_atom_columns;
};

/// The offsets and barriers of the blocks of a warp.
template <typename Shape>
struct TmaRing {
  uint32_t blocks;
  uint32_t barriers;

  __device__ __forceinline__ explicit TmaRing(const uint8_t* shared) {
    const uint32_t warp = uniform(xa::ptx::opaque(threadIdx.x) / 32), address = xa::ptx::shared_address(shared);
    blocks = address + Shape::kRingsOffset + warp * Shape::kRingBytes;
    barriers = address + Shape::kBarriersOffset + warp * 8 * Shape::kStages;
  }
  /// Before the first use; a barrier of the CTA must follow.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x % 32 != 0) return;
    for (int stage = 0; stage < Shape::kStages; ++stage) ptx::mbarrier_init(barriers + 8 * stage, 1);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }
  /// After the last use.
  __device__ __forceinline__ void end() const {
    if (threadIdx.x % 32 != 0) return;
    for (int stage = 0; stage < Shape::kStages; ++stage) ptx::mbarrier_inval(barriers + 8 * stage);
  }
  __device__ __forceinline__ Barrier full(PipelineState<Shape::kStages> turn) const {
    return Barrier{barriers + 8 * turn.stage, turn.phase};
  }
  /// Shared address of a block of K, which that of V follows.
  __device__ __forceinline__ uint32_t keys(PipelineState<Shape::kStages> turn) const {
    return blocks + turn.stage * 2 * Shape::kBlockBytes;
  }
};

/// Streams the warp's keys of a piece through its ring.
template <typename Shape, typename T>
class TmaDecodeLoop {
  using Math = TileMath<T, T, typename Shape::Rows, 1, Shape::kKeys, Shape::kHeadDim>;
  static constexpr int kStages = Shape::kStages, kStep = Shape::kKeys * Shape::kKeyWarps;
  static_assert(Shape::kKeys == kTokensPerLoad);

 public:
  /// Page numbers are on their way after this. `count` blocks have been through the warp's ring so far, in all pieces.
  __device__ __forceinline__ TmaDecodeLoop(const AttentionParams& params, const WorkTile& work,
                                           const KvTensorMaps& boxes, const uint8_t* shared, int32_t& count)
      : params_(params),
        work_(work),
        boxes_(boxes),
        ring_(shared),
        count_(count),
        first_key_(first_block_key<Shape>(work.keys)),
        slots_(params, work, first_key_) {}

  /// Takes the keys up into `state`. The tile's query rows are on their way to `query_rows`, in the last group of
  /// copies.
  template <typename LogitsTransform, typename State>
  __device__ __forceinline__ void attend(State& state, uint32_t query_rows, const LogitsTransform& transform) {
    int32_t fetched = count_;
#pragma unroll 1
    for (int32_t stage = 0; stage < kStages; ++stage) fetch(fetched++, first_key_ + stage * kStep);
    xa::ptx::cp_async_wait<0>();
    __syncthreads();
    QueryFragments<1, Shape::kHeadDim, sizeof(T), true> query(query_rows);
    query.fill();

    int32_t count = count_;
#pragma unroll 1
    for (int32_t key = first_key_; key < work_.keys.end; key += kStep) {
      const PipelineState<kStages> turn(count);
      const uint32_t keys = ring_.keys(turn);
      ring_.full(turn).wait();
      float scores[1][Shape::kKeys / 8][4];
      Math::scores(scores, query, keys, params_);
      transform.template apply<T>(scores[0], work_, 0, key);
      if (key < work_.keys.common_begin || key + Shape::kKeys > work_.keys.common_end) {
        apply_mask(scores[0], params_, work_.tile, 0, key);
        clear_invisible_values(keys + Shape::kBlockBytes, key);
      }
      state.update(0, scores[0], transform.log2_unit(), work_.tile.num_rows > 8);
      Math::accumulate(state.output, scores, keys + Shape::kBlockBytes, params_);
      // The blocks are free again once all lanes have read them.
      __syncwarp();
      fetch(count + kStages, key + kStages * kStep);
      ++count;
    }
    count_ = count;
    state.finish();
  }

 private:
  /// Starts to fetch the warp's next blocks, its turn-th, which begin at `key`; none past the end.
  __device__ __forceinline__ void fetch(int32_t turn_number, int32_t key) {
    const TokenSlot slot = slots_.next();
    if (key >= work_.keys.end) return;
    const PipelineState<kStages> turn(turn_number);
    const Barrier full = ring_.full(turn);
    const uint32_t to = ring_.keys(turn);
    if (threadIdx.x % 32 != 0) return;
    const int32_t page = clamp(slot.page, 0, params_.num_pages - 1), octet = slot.offset / 8;
    const uint64_t policy = xa::ptx::evict_first_policy();
    full.arrive_expect_tx(2 * Shape::kBlockBytes);
    ptx::tma_load(to, boxes_.k, full.address, 0, 0, work_.kv_head * boxes_.k_head_atom_columns, octet, page, policy);
    ptx::tma_load(to + Shape::kBlockBytes, boxes_.v, full.address, 0, 0, work_.kv_head * boxes_.v_head_atom_columns,
                  octet, page, policy);
  }

  /// Rows of V outside of the piece's keys become zeros: boxes bring along what is there, NaN and Inf included.
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
  const KvTensorMaps& boxes_;
  const TmaRing<Shape> ring_;
  int32_t& count_;
  const int32_t first_key_;
  PageTableReader<Shape::kKeys, kStep, true> slots_;
};

}  // namespace xa::hopper
