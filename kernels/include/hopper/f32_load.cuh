// The load warps of an f32 prefill CTA copy rows of K and V to shared memory with cp.async, which takes every layout
// and page size. Columns that are not there, and keys that no query of the sequence attends to, become zeros.
#pragma once

#include <cstdint>

#include "hopper/f32_shape.cuh"
#include "hopper/pipeline.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

template <typename Shape>
class F32Loader {
  static constexpr int kThreads = 32 * Shape::kLoadWarps;
  // A thread copies four columns of every kRowsAtOnce-th row.
  static constexpr int kThreadsPerRow = Shape::kHeadDim / 4, kRowsAtOnce = kThreads / kThreadsPerRow;

 public:
  /// `warp` is this warp's index among the load warps.
  __device__ __forceinline__ F32Loader(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline, int32_t warp)
      : params_(params), pipeline_(pipeline), thread_(32 * warp + static_cast<int32_t>(threadIdx.x % 32)) {}

  /// Loads the blocks of all tiles of the CTA: K and V of a tile's last block, of the one before it, and so on.
  __device__ __forceinline__ void run() const {
    if (has_contiguous_keys(params_.attention)) {
      load_tiles<Storage::contiguous>();
    } else {
      load_tiles<Storage::paged>();
    }
  }

 private:
  static_assert(Shape::kHeadDim == Shape::kValueDim, "K and V share the code that loads them");

  /// Rows of K or V of a tile's KV head. It has what a copy needs by value: each read of a tile in shared memory, or of
  /// a parameter by its address, would be waited for.
  struct Rows {
    const float* base;  // this lane's first column; contiguous: of key 0
    int64_t page_stride;
    int64_t token_stride;
    int32_t visible_begin;  // [visible_begin, visible_end): the keys to copy; empty for columns that are not there
    int32_t visible_end;
    const int32_t* table;  // paged: the sequence's pages
  };
  __device__ __forceinline__ Rows rows_of(const PrefillTile& tile, const KvSource& source, int32_t columns) const {
    const AttentionParams& params = params_.attention;
    const int64_t head = divide(tile.work.kv_head, params_.packs_per_kv_head);
    const int64_t start = has_contiguous_keys(params) ? tile.work.tile.start_k : 0;
    const int32_t column = thread_ % kThreadsPerRow * 4;
    return Rows{static_cast<const float*>(source.base) + head * source.head_stride + start * source.token_stride +
                    (column < columns ? column : 0),
                source.page_stride,
                source.token_stride,
                tile.visible_begin,
                column < columns ? tile.visible_end : 0,
                params.block_table + tile.work.tile.sequence * params.block_table_stride};
  }

  template <Storage kStorage>
  __device__ __forceinline__ void load_tiles() const {
    int32_t block_count = 0;  // of K and of V
    bool has_tile = true;
#pragma unroll 1
    for (int32_t count = 0; has_tile; ++count) {
      const PipelineState<2> tile_state(count);
      pipeline_.tile_full(tile_state).wait();
      const PrefillTile& tile = pipeline_.tile(tile_state);
      has_tile = tile.work.tile.num_rows > 0;
      if (has_tile) {
        const Rows k = rows_of(tile, params_.attention.k, params_.attention.head_dim);
        const Rows v = rows_of(tile, params_.attention.v, params_.attention.value_dim);
        const int32_t first_block = tile.first_block;
#pragma unroll 1
        for (int32_t block = tile.end_block - 1; block >= first_block; --block) {
          load<kStorage>(k, block * Shape::kKeys, block_count++);
          load<kStorage>(v, block * Shape::kKeys, block_count++);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        if (thread_ == 0) pipeline_.want_tile(count);
        pipeline_.tile_empty(tile_state).arrive();
      }
    }
  }

  /// Loads the block of keys from `first_key` on, the CTA's block number `count`.
  template <Storage kStorage>
  __device__ __forceinline__ void load(const Rows& rows, int32_t first_key, int32_t count) const {
    const PipelineState<Shape::kStages> state(count);
    const uint32_t to = pipeline_.keys(state.stage) + thread_ * 16;
    pipeline_.keys_empty(state).producer_wait();
#pragma unroll 8
    for (int i = 0; i < Shape::kKeys / kRowsAtOnce; ++i) {
      const int32_t key = first_key + i * kRowsAtOnce + thread_ / kThreadsPerRow;
      const bool is_visible = key >= rows.visible_begin && key < rows.visible_end;
      const float* from = rows.base;
      if constexpr (kStorage == Storage::contiguous) {
        from += (is_visible ? key : 0) * rows.token_stride;
      } else if (is_visible) {  // Pages of other keys may not exist.
        const int32_t index = divide(key, params_.page_divisor);
        const int64_t page = clamp(__ldg(rows.table + index), 0, params_.attention.num_pages - 1);
        from += page * rows.page_stride + (key - index * params_.attention.page_size) * rows.token_stride;
      }
      xa::ptx::cp_async_16(to + i * kThreads * 16, from, is_visible);
    }
    xa::ptx::cp_async_commit();
    xa::ptx::cp_async_wait<0>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline_.keys_full(state).arrive();
  }

  const HopperPrefillParams& params_;
  const Pipeline<Shape>& pipeline_;
  const int32_t thread_;
};

}  // namespace xa::hopper
