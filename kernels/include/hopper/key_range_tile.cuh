// Tiles whose query rows have bounds of their keys: which blocks a tile has, and which rows of V are cleared.
#pragma once

#include <climits>
#include <cstdint>

#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "hopper/swizzle_atom.cuh"
#include "key_ranges.cuh"
#include "params/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// The keys of query `query` of a tile. What it is computed from is read again for each query, because the load warps
/// have few registers.
__device__ __forceinline__ RowRange range_of_query(const HopperPrefillParams& params, const KeyRangeTile& tile,
                                                   int32_t query) {
  const KeyRangeTile& from = (&tile)[xa::ptx::opaque(0)];
  return row_range(from.ranges, Visibility(params.attention, from.work.tile, from.shift), from.work.tile, query);
}

/// Calls `visit(range)` for the queries of a tile that this lane has, adjacent ones, if they attend to a key.
template <typename Visit>
__device__ __forceinline__ void for_ranges_of_lane(const HopperPrefillParams& params, const KeyRangeTile& tile,
                                                   const Visit& visit) {
  const int32_t per_lane = (tile.num_queries + 31) / 32, first = threadIdx.x % 32 * per_lane;
#pragma unroll 1
  for (int32_t query = first; query < min(first + per_lane, tile.num_queries); ++query) {
    const RowRange range = range_of_query(params, tile, query);
    if (range.begin < range.end) visit(range);
  }
}

/// The block that is computed after `block`: the nearest one before it that some row of the tile may attend to.
__device__ __forceinline__ int32_t block_before(const PrefillTile&, int32_t block) { return block - 1; }
__device__ __forceinline__ int32_t block_before(const KeyRangeTile& tile, int32_t block) {
  --block;
  if (tile.has_gaps == 0) return block;
  // Blocks past the marked ones are all computed. The first block of a tile is marked.
  for (int32_t index = block - tile.first_block; index >= 0 && index < KeyRangeTile::kMarkedBlocks;) {
    const uint32_t up_to_it = tile.attended[index / 32] & ~0u >> (31 - index % 32);
    if (up_to_it != 0) return tile.first_block + index / 32 * 32 + 31 - __clz(up_to_it);
    index = index / 32 * 32 - 1;
    block = tile.first_block + index;
  }
  return block;
}

/// Marks the blocks that some row of a tile attends to.
template <typename Shape>
__device__ __forceinline__ void mark_blocks(const HopperPrefillParams& params, KeyRangeTile& tile) {
  tile.attended[threadIdx.x % 32] = 0;
  __syncwarp();
  for_ranges_of_lane(params, tile, [&](const RowRange& range) {
    const int32_t end = min((range.end - 1) / Shape::kKeys - tile.first_block, KeyRangeTile::kMarkedBlocks - 1);
#pragma unroll 1
    for (int32_t first = range.begin / Shape::kKeys - tile.first_block; first <= end; first = first / 32 * 32 + 32) {
      const int32_t last = min(end, first / 32 * 32 + 31);
      atomicOr(&tile.attended[first / 32], ~0u >> (31 - last % 32) & ~0u << first % 32);
    }
  });
}

/// Whether there may be keys among those of a tile that no row attends to. There are none if every range touches the
/// union of those before it, which is then one range: so in documents that follow each other.
__device__ __forceinline__ bool may_have_gaps(const HopperPrefillParams& params, const KeyRangeTile& tile) {
  RowRange before = {INT_MAX, 0};  // the union for the lanes up to this one, then for the lanes before it
  for_ranges_of_lane(params, tile, [&](const RowRange& range) { before = united(before, range); });
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const RowRange other = {__shfl_up_sync(~0u, before.begin, distance), __shfl_up_sync(~0u, before.end, distance)};
    if (threadIdx.x % 32 >= distance) before = united(before, other);
  }
  before = {__shfl_up_sync(~0u, before.begin, 1), __shfl_up_sync(~0u, before.end, 1)};
  if (threadIdx.x % 32 == 0) before = {INT_MAX, 0};
  bool has_gaps = false;
  for_ranges_of_lane(params, tile, [&](const RowRange& range) {
    has_gaps |= before.begin < before.end && (range.begin > before.end || range.end < before.begin);
    before = united(before, range);
  });
  return __any_sync(~0u, has_gaps) != 0;
}

/// Narrows the keys and the blocks of a tile to those of its rows. Run by the scheduler warp, in several passes,
/// because it has few registers.
template <typename Shape>
__device__ __forceinline__ void narrow_to_key_ranges(const HopperPrefillParams& params, KeyRangeTile& tile) {
  if (threadIdx.x % 32 == 0) tile.num_queries = tile.work.tile.num_rows / params.attention.group;
  __syncwarp();
  {
    int32_t begin = 0, end = INT_MAX;
#pragma unroll 1
    for (int32_t query = threadIdx.x % 32; query < tile.num_queries; query += 32) {
      const RowRange range = range_of_query(params, tile, query);
      begin = max(begin, range.begin);
      end = min(end, range.end);
    }
    begin = warp_max(begin);
    end = warp_min(end);
    if (threadIdx.x % 32 == 0) {
      tile.work.keys.common_begin = begin;
      tile.work.keys.common_end = end;
      // Ranges with a key in common have no gaps.
      tile.has_gaps = begin >= end;
    }
  }
  RowRange keys = {INT_MAX, 0};
  for_ranges_of_lane(params, tile, [&](const RowRange& range) { keys = united(keys, range); });
  keys = {warp_min(keys.begin), warp_max(keys.end)};
  if (threadIdx.x % 32 == 0) {
    if (keys.begin >= keys.end) keys = {0, 0};
    tile.work.keys.begin = tile.visible_begin = keys.begin;
    tile.work.keys.end = tile.visible_end = keys.end;
    tile.first_block = keys.begin / Shape::kKeys;
    tile.end_block = (keys.end + Shape::kKeys - 1) / Shape::kKeys;
  }
  __syncwarp();
  if (tile.has_gaps != 0) {
    const bool has_gaps = may_have_gaps(params, tile);
    if (threadIdx.x % 32 == 0) tile.has_gaps = has_gaps;
    if (has_gaps) mark_blocks<Shape>(params, tile);
    __syncwarp();
  }
}

/// Clears the rows of a block of V at shared address `to` that no row of the tile attends to: memory there may hold
/// NaN, and 0 * NaN is NaN. Run by the V warp, which clears what is before and after the tile's keys itself.
template <typename Shape, typename Block>
__device__ __forceinline__ void clear_gaps(const HopperPrefillParams& params, const KeyRangeTile& tile, uint32_t to,
                                           int32_t first_key) {
  if (tile.has_gaps == 0) return;
  uint32_t attended[Shape::kKeys / 32] = {};
#pragma unroll 1
  for (int32_t query = threadIdx.x % 32; query < tile.num_queries; query += 32) {
    const RowRange range = range_of_query(params, tile, query);
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 32; ++i) {
      const int32_t first = first_key + 32 * i;
      const int32_t begin = clamp(range.begin - first, 0, 32), end = clamp(range.end - first, 0, 32);
      if (begin < end) attended[i] |= ~0u >> (32 - end + begin) << begin;
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kKeys / 32; ++i) {
    const int32_t first = 32 * i;
    // Runs of rows that are not attended to.
    uint32_t left = ~__reduce_or_sync(~0u, attended[i]);
#pragma unroll 1
    while (left != 0) {
      const int32_t begin = __ffs(left) - 1, length = __ffs(~(left >> begin)) - 1;
      const int32_t end = begin + (length < 0 ? 32 : length);
      clear_whole_tile_rows<typename Shape::Atom, Block, Shape::kKeys>(to, first + begin, first + end);
      left = end < 32 ? left >> end << end : 0;
    }
  }
}

}  // namespace xa::hopper
