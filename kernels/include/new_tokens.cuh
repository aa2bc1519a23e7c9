// Appending new tokens in decode: the kernel stores them in the cache and attends to them in the same launch.
//
// The two are independent, so no CTA waits for another one's stores. Every row whose slot is in the cache is stored,
// whether it belongs to a sequence or not. Attention reads the last len_q keys of a sequence from `key` and `value`,
// never from the cache, where another CTA may be storing them at the same time.
#pragma once

#include <cstdint>

#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "slots.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

__device__ __forceinline__ bool has_new_tokens(const AttentionParams& params) {
  return params.new_tokens.key.base != nullptr;
}

/// How the lanes of a warp copy new tokens of one KV head: in each of kSteps instructions a lane has 16 bytes of a
/// token's key or value. An instruction covers kTokens tokens.
template <typename T, int kHeadDim>
class NewTokenLanes {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kRowBytes / 16, kElements = 16 / sizeof(T);
  using Grid = LaneGrid<2 * kRowBytes>;

 public:
  static constexpr int kSteps = Grid::kStepsPerRow, kTokens = Grid::kRowsPerStep;
  using Chunks = uint4[kSteps];

  __device__ __forceinline__ NewTokenLanes(const AttentionParams& params, int32_t kv_head)
      : params_(params), kv_head_(kv_head) {}

  /// The lane's token among the kTokens.
  __device__ __forceinline__ int32_t token() const { return grid_.row; }

  /// Loads the lane's chunks of row `row` of the new tokens.
  __device__ __forceinline__ void load(Chunks& chunks, int64_t row) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const NewRowSource& source = is_value(step) ? params_.new_tokens.value : params_.new_tokens.key;
      const T* const from = static_cast<const T*>(source.base) + row * source.token_stride +
                            kv_head_ * source.head_stride + element(step);
      if (is_inside(step)) chunks[step] = __ldg(reinterpret_cast<const uint4*>(from));
    }
  }
  /// Stores them in the cache.
  __device__ __forceinline__ void store(const Chunks& chunks, int64_t page, int64_t offset) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const KvSource& cache = is_value(step) ? params_.v : params_.k;
      T* const to = static_cast<T*>(const_cast<void*>(cache.base)) + page * cache.page_stride +
                    offset * cache.token_stride + kv_head_ * cache.head_stride + element(step);
      if (is_inside(step)) *reinterpret_cast<uint4*>(to) = chunks[step];
    }
  }
  /// Stores them in row `row` of a block of K in shared memory, or of the block of V kValuesOffset bytes after it.
  template <typename Rows, int kValuesOffset>
  __device__ __forceinline__ void put(const Chunks& chunks, uint32_t block, int32_t row) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t rows = block + (is_value(step) ? kValuesOffset : 0);
      if (is_inside(step)) ptx::store_shared_16(rows + Rows::offset(row, chunk(step)), chunks[step]);
    }
  }

 private:
  __device__ __forceinline__ bool is_value(int step) const { return grid_.chunk + 32 * step >= kChunks; }
  __device__ __forceinline__ int32_t chunk(int step) const {
    return grid_.chunk + 32 * step - (is_value(step) ? kChunks : 0);
  }
  __device__ __forceinline__ int32_t element(int step) const { return chunk(step) * kElements; }
  __device__ __forceinline__ bool is_inside(int step) const {
    return grid_.has_chunk(step) && element(step) < (is_value(step) ? params_.value_dim : params_.head_dim);
  }

  const AttentionParams& params_;
  const int32_t kv_head_;
  const Grid grid_;
};

/// Stores this CTA's new rows of its KV head in the cache. A warp stores kTokens rows at a time, and adjacent groups of
/// rows go to different CTAs (index.index of index.count), so that few rows are spread over all CTAs.
template <typename Shape, typename Stored>
__device__ __forceinline__ void store_new_tokens(const AttentionParams& params, int32_t kv_head,
                                                 const WorkRangeIndex& index) {
  using Lanes = NewTokenLanes<Stored, Shape::kHeadDim>;
  const SlotMapping& mapping = params.new_tokens.slots;
  const Lanes lanes(params, kv_head);
  const uint32_t warp = ptx::opaque(threadIdx.x) / 32, step = index.count * (Shape::kWarps * Lanes::kTokens);
#pragma unroll 1
  for (uint32_t row = (warp * index.count + index.index) * Lanes::kTokens + lanes.token();
       row < static_cast<uint32_t>(params.num_tokens); row += step) {
    const int64_t slot = load_slot(mapping, row);
    // Issued before the slot is needed, so that these loads do not wait for it.
    typename Lanes::Chunks chunks;
    lanes.load(chunks, row);
    if (!is_in_cache(mapping, slot)) continue;
    const int64_t page = page_of(mapping, slot);
    lanes.store(chunks, page, slot - page * mapping.page_size);
  }
}

/// Overwrites the new tokens' rows in the block of keys that begins at key `first`, at shared address `block`. The
/// block has been requested from the cache; `wait` waits until it has arrived. A barrier of the warp must follow.
template <typename Shape, typename Stored, typename Wait>
__device__ __forceinline__ void put_new_keys(const AttentionParams& params, const WorkTile& work, int32_t first,
                                             uint32_t block, const Wait& wait) {
  using Lanes = NewTokenLanes<Stored, Shape::kHeadDim>;
  const int32_t first_new = first_new_key(work.tile), end = min(first + Shape::kKeys, work.keys.end);
  const Lanes lanes(params, work.kv_head);
#pragma unroll 1
  for (int32_t key = max(max(first, first_new), work.keys.begin); key < end; key += Lanes::kTokens) {
    const int32_t own = key + lanes.token();
    typename Lanes::Chunks chunks;
    if (own < end) lanes.load(chunks, work.tile.first_token + (own - first_new));
    // The loads of the new rows are in flight meanwhile.
    wait();
    if (own < end) lanes.template put<typename Shape::Rows, Shape::kBlockBytes>(chunks, block, own - first);
  }
}

}  // namespace xa
