// Decode: the warps of a CTA share 16 rows and have keys of their own, every kKeyWarps-th block.
#pragma once

#include <cstdint>

#include "new_tokens.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "row_pairs.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_tile.cuh"

namespace xa {

/// Blocks start at multiples of kKeys of the sequence, whatever the tile sees of them; block b is that of warp
/// b % kKeyWarps.
template <typename Shape>
__device__ __forceinline__ int32_t first_block_key(const KeyRange& keys) {
  const int32_t block = keys.begin / Shape::kKeys, warp = threadIdx.x / 32;
  return (block + (warp - block % Shape::kKeyWarps + Shape::kKeyWarps) % Shape::kKeyWarps) * Shape::kKeys;
}

/// Streams the warp's keys of a piece through the ring of its own at shared address `ring`: blocks of K and V as pairs,
/// each a group of copies.
template <typename Shape, typename T, typename Stored>
class DecodeLoop {
  using Math = TileMath<T, Stored, typename Shape::Rows, 1, Shape::kKeys, Shape::kHeadDim>;
  static constexpr int kStages = Shape::kStages, kStep = Shape::kKeys * Shape::kKeyWarps;
  static constexpr bool kHoldsQuery = Shape::kQueryRowBytes <= 256;

 public:
  /// Page numbers are on their way after this.
  __device__ __forceinline__ DecodeLoop(const AttentionParams& params, const WorkTile& work, uint32_t rings)
      : params_(params),
        work_(work),
        ring_(rings + threadIdx.x / 32 * Shape::kRingBytes),
        first_key_(first_block_key<Shape>(work.keys)),
        slots_(params, work, first_key_),
        loader_(params, work) {}

  /// Takes the keys up into `state`. The tile's query rows are on their way to `query_rows`, in the last group of
  /// copies.
  template <typename LogitsTransform, typename State>
  __device__ __forceinline__ void attend(State& state, uint32_t query_rows, const LogitsTransform& transform) {
#pragma unroll 1
    for (int32_t stage = 0; stage < kStages; ++stage) fetch(stage, first_key_ + stage * kStep);
    ptx::cp_async_wait<kStages>();
    __syncthreads();
    QueryFragments<1, Shape::kHeadDim, sizeof(T), kHoldsQuery> query(query_rows);
    query.fill();

    int32_t stage = 0;
#pragma unroll 1
    for (int32_t key = first_key_; key < work_.keys.end; key += kStep) {
      const int32_t next = ptx::opaque(key) + kStages * kStep;
      wait_for_blocks(stage, key);
      float scores[1][Shape::kKeys / 8][4];
      Math::scores(scores, query, keys(stage), params_);
      transform.template apply<T>(scores[0], work_, 0, key);
      const bool masked = key < work_.keys.common_begin || key + Shape::kKeys > work_.keys.common_end;
      if (masked) apply_mask(scores[0], params_, work_.tile, 0, key);
      state.update(0, scores[0], transform.log2_unit(), work_.tile.num_rows > 8);
      Math::accumulate(state.output, scores, keys(stage) + Shape::kBlockBytes, params_);
      // The blocks are free again once all lanes have read them.
      __syncwarp();
      fetch(stage, next);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    state.finish();
  }

 private:
  static __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
  }
  /// Until the blocks of a stage are there, which begin at `key`, with new tokens in their places.
  __device__ __forceinline__ void wait_for_blocks(int32_t stage, int32_t key) const {
    if constexpr (Shape::kAppendsKv) {
      const bool has_some = has_new_tokens(params_) && key + Shape::kKeys > first_new_key(work_.tile);
      if (has_some) put_new_keys<Shape, Stored>(params_, work_, key, keys(stage), wait);
    }
    wait();
  }

  /// Shared address of a stage's block of K, which that of V follows.
  __device__ __forceinline__ uint32_t keys(int32_t stage) const { return ring_ + stage * 2 * Shape::kBlockBytes; }

  /// The next blocks, which start at `key`; none past the end.
  __device__ __forceinline__ void fetch(int32_t stage, int32_t key) {
#pragma unroll
    for (int first = 0; first < Shape::kKeys; first += kTokensPerLoad) {
      const TokenSlot slot = slots_.next();
      // Of a block that has begun, what is past the end becomes zeros.
      if (key >= work_.keys.end) continue;
      loader_.load(keys(stage) + first * Shape::Rows::kPitch, key + first, slot, slots_.fits_pages());
    }
    ptx::cp_async_commit();
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  uint32_t ring_;
  int32_t first_key_;
  PageTableReader<Shape::kKeys, kStep, (Shape::kRowBytes < 1024)> slots_;
  PairLoader<Stored, Shape::kHeadDim, Shape::kBlockBytes> loader_;
};

}  // namespace xa
