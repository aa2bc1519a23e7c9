// The main loop of prefill for rows with bounds of their keys. It is that of prefill_loop.cuh, but steps over blocks of
// keys that no row of the tile attends to.
#pragma once

#include <cstdint>

#include "column_warps.cuh"
#include "element.cuh"
#include "key_ranges.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_tile.cuh"

namespace xa {

/// Sets scores of keys outside of the rows' ranges to -inf: of the 16 rows from row `first_row` on, and of the block of
/// keys that starts at `first_key`.
template <int kKeyTiles, int kRows>
__device__ __forceinline__ void mask_keys(float (&scores)[kKeyTiles][4], const RowRanges<kRows>& ranges,
                                          int32_t first_row, int32_t first_key) {
  const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowRange range = ranges[first_row + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4)];
    const uint32_t length = range.end - range.begin;
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t from_begin = first_column + 8 * block + i - range.begin;
        if (from_begin >= length) scores[block][2 * half + i] = -INFINITY;
      }
    }
  }
}

/// Stores zeros to the rows of a block of V whose bits are set in `keys`.
template <typename Shape>
__device__ __forceinline__ void clear_values(uint8_t* block, uint64_t keys) {
  for (int32_t key = threadIdx.x / 32; key < Shape::kKeys; key += Shape::kWarps) {
    if ((keys >> key & 1) == 0) continue;
    for (int32_t chunk = threadIdx.x % 32; chunk < Shape::kRowBytes / 16; chunk += 32) {
      *reinterpret_cast<uint4*>(block + Shape::Rows::offset(key, chunk)) = make_uint4(0, 0, 0, 0);
    }
  }
}

/// Streams the keys of the work tile through the CTA's ring at `ring_memory` and updates `state`, as `attend_with_rows`
/// does. `ranges` are those of the tile's rows, RowRanges or RowMasks, and `work.keys` has been computed from them. A
/// warp without rows of the tile computes nothing with `kLeavesOutIdleWarps`, but loads its part of the blocks.
template <typename Shape, typename T, typename Stored, bool kLeavesOutIdleWarps, typename Ranges,
          typename LogitsTransform, typename State>
__device__ __forceinline__ void attend_with_ranges(State& state, const AttentionParams& params, const WorkTile& work,
                                                   const Ranges& ranges, uint8_t* ring_memory, int32_t warp_row,
                                                   uint32_t query_rows, const LogitsTransform& transform) {
  using Math = TileMath<T, Stored, typename Shape::Rows, Shape::kRowTiles, Shape::kKeys, Shape::kWarpColumns>;
  constexpr int kStages = Shape::kStages;
  constexpr bool kHoldsQuery = Shape::kRowTiles == 1 && Shape::kQueryRowBytes <= 256;
  constexpr int kPending = 2 * kStages - 2;
  static_assert(Shape::kKeys <= 64, "attended_64");
  constexpr uint64_t kBlockKeys = ~uint64_t{0} >> (64 - Shape::kKeys);
  const RowLoader<Stored, Shape::kHeadDim, Shape::kKeysPerLoad> loader(params, work);
  const int32_t first_own_key = threadIdx.x / 32 * Shape::kKeysPerLoad;
  const int32_t first_column = first_warp_column<Shape>();
  const uint32_t ring = ptx::shared_address(ring_memory);
  const auto keys = [&](int stage) { return ring + stage * Shape::kBlockBytes; };
  const auto values = [&](int stage) { return keys(kStages + stage); };
  const uint32_t own_offset = first_own_key * Shape::Rows::kPitch;
  const auto block_from = [&](int32_t key) { return ranges.template next_block<Shape::kKeys>(key, work.keys.end); };
  const auto block_after = [&](int32_t block) {
    return block < work.keys.end ? block_from(block + Shape::kKeys) : block;
  };

  // The first keys of the block at hand and of those that are being loaded; `next` follows them.
  int32_t blocks[kStages];
  blocks[0] = block_from(work.keys.begin);
#pragma unroll
  for (int i = 1; i < kStages; ++i) blocks[i] = block_after(blocks[i - 1]);
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    const TokenSlot slot = loader.find(blocks[i] + first_own_key);
    if (blocks[i] < work.keys.end) loader.load_keys(keys(i) + own_offset, blocks[i] + first_own_key, slot);
    ptx::cp_async_commit();
    if (blocks[i] < work.keys.end) loader.load_values(values(i) + own_offset, blocks[i] + first_own_key, slot);
    ptx::cp_async_commit();
  }
  int32_t next = block_after(blocks[kStages - 1]);
  TokenSlot next_slot = loader.find(next + first_own_key);

  ptx::cp_async_wait<2 * kStages - 1>();
  __syncthreads();
  QueryFragments<Shape::kRowTiles, Shape::kHeadDim, sizeof(T), kHoldsQuery, Shape::kWarpColumns> query(
      query_rows + warp_row * Shape::kQueryPitch + first_column * static_cast<int32_t>(sizeof(T)));
  query.fill();

  const bool is_idle = kLeavesOutIdleWarps && warp_row >= work.tile.num_rows;
  int stage = 0;
#pragma unroll 1
  while (blocks[0] < work.keys.end) {
    const int32_t first_key = blocks[0];
    float scores[Shape::kRowTiles][Shape::kKeys / 8][4];
    if (!is_idle) {
      Math::scores(scores, query, keys(stage) + first_column * static_cast<int32_t>(sizeof(Stored)), params);
    }
    ptx::cp_async_wait<kPending>();
    __syncthreads();
    if (!is_idle) add_up_block<Shape>(scores, keys(stage));

    const bool masked = first_key < work.keys.common_begin || first_key + Shape::kKeys > work.keys.common_end;
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
      if (is_idle) break;
      transform.template apply<T>(scores[tile], transform.rows(work, warp_row + 16 * tile), first_key);
      if (masked) mask_keys(scores[tile], ranges, warp_row + 16 * tile, first_key);
      state.update(tile, scores[tile], transform.log2_unit());
    }
    if (next < work.keys.end) loader.load_keys(keys(stage) + own_offset, next + first_own_key, next_slot);
    ptx::cp_async_commit();
    if (masked) {
      // Weights of 0 times a NaN would be NaN, so keys that no row attends to become zeros too. All warps find the same
      // keys. Those before the tile's first and past its last have been zeros from the start.
      const RowRange tile_keys = {work.keys.begin, work.keys.end};
      const uint64_t gaps = tile_keys.among_64(first_key) & ~ranges.attended_64(first_key) & kBlockKeys;
      if (gaps != 0) {
        clear_values<Shape>(ring_memory + (kStages + stage) * Shape::kBlockBytes, gaps);
        __syncthreads();
      }
    }
    if (!is_idle) {
      Math::accumulate(state.output, scores, values(stage) + first_column * static_cast<int32_t>(sizeof(Stored)),
                       params);
    }

    // After this barrier V's stage is free and the next block of K has arrived.
    ptx::cp_async_wait<kPending>();
    __syncthreads();
    if (next < work.keys.end) loader.load_values(values(stage) + own_offset, next + first_own_key, next_slot);
    ptx::cp_async_commit();
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) blocks[i] = blocks[i + 1];
    blocks[kStages - 1] = next;
    next = block_after(next);
    next_slot = loader.find(next + first_own_key);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  state.finish();
}

}  // namespace xa
