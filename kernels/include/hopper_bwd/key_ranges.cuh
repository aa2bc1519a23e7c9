// Query rows with bounds of their keys (../key_ranges.cuh) in the backward up to 128 columns. hopper_bwd_plan_ranges.cu
// computes the range of each row, what the rows of each query block have in common, and which query blocks each block
// of keys is for. A tile then goes through these query blocks, as it goes through those that a mask leaves otherwise.
//
// All agree on which blocks contribute to dQ: a block of keys contributes to a query block if the range of that block
// (QueryBlockKeys) reaches into it, whether or not some row attends to its keys. A tile may go through query blocks to
// which it does not contribute, between those to which it does, or because there is none: their P and dS are zeros.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/ptx.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

__device__ __forceinline__ int32_t ceil_div(int32_t x, int32_t y) { return (x + y - 1) / y; }

/// The parameter that begins with `params`.
__device__ __forceinline__ const HopperKeyRangeBackwardParams& with_key_ranges(const HopperBackwardParams& params) {
  return reinterpret_cast<const HopperKeyRangeBackwardParams&>(params);
}

/// The index of a sequence's first block of keys, counted over all sequences. As with query blocks, each sequence b has
/// (kKeys - 1) * b additional rows in front of it, so the blocks of two sequences never overlap.
template <typename Shape>
__device__ __forceinline__ int32_t first_key_block(const SequencePlan& plan) {
  return static_cast<int32_t>((plan.first_key + int64_t{Shape::kKeys - 1} * plan.sequence) / Shape::kKeys);
}

/// The blocks of keys [begin, end) that contribute to dQ of a query block.
struct ContributingBlocks {
  int32_t begin;
  int32_t end;

  __device__ __forceinline__ bool contains(int32_t block) const { return block >= begin && block < end; }
};
template <typename Shape>
__device__ __forceinline__ ContributingBlocks contributing_blocks(int32_t begin, int32_t end) {
  return {begin / Shape::kKeys, ceil_div(end, Shape::kKeys)};
}
/// Those of query block `block`, counted over all sequences.
template <typename Shape>
__device__ __forceinline__ ContributingBlocks contributing_blocks(const HopperBackwardParams& params, int32_t block) {
  const QueryBlockKeys& keys = with_key_ranges(params).query_block_keys[block];
  return contributing_blocks<Shape>(__ldg(&keys.begin), __ldg(&keys.end));
}

/// The QueryBlockKeys of a step, in shared memory.
struct StepKeys {
  QueryBlockKeys keys;

  __device__ __forceinline__ explicit StepKeys(uint32_t from) {
    const float4 x = ptx::load_shared_f32x4(from);
    keys = {__float_as_int(x.x), __float_as_int(x.y), __float_as_int(x.z), __float_as_int(x.w)};
  }
  /// Whether all queries attend to all of a warpgroup's 64 keys, which begin at `first`, so that these need no mask.
  __device__ __forceinline__ bool all_attend(int32_t first) const {
    return uniform(keys.common_begin <= first && keys.common_end >= first + 64) != 0;
  }
  /// Whether the queries' range reaches into these keys.
  __device__ __forceinline__ bool some_attend(int32_t first) const {
    return uniform(keys.begin < first + 64 && keys.end > first) != 0;
  }
};

/// Starts to copy the RowKeys of a query block and its QueryBlockKeys to shared memory. Rows past `count` attend to no
/// key. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ void copy_row_keys(uint32_t to, const RowKeys* rows, const QueryBlockKeys* block,
                                              int32_t count) {
  const int32_t lane = threadIdx.x % 32;
  // Rolled up, because the load warps have few registers.
#pragma unroll 1
  for (int32_t row = lane; row < Shape::kQueries; row += 32) {
    xa::ptx::cp_async_8(to + Shape::kRowKeysOffset + 8 * row, row < count ? rows + row : rows, row < count);
  }
  if (lane == 0) xa::ptx::cp_async_16(to + Shape::kBlockKeysOffset, block, true);
}

/// Calls `mask(column, element)` for each masked score of [64 keys, kQueries]. `row_keys` is the shared address of the
/// RowKeys of the step.
template <typename Shape, typename Mask>
__device__ __forceinline__ void for_masked_by_ranges(uint32_t row_keys, int32_t key_block, const Mask& mask) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, lane = thread % 32;
  const int32_t first_key = key_block * Shape::kKeys + thread / 32 * 16 + lane / 4;
  const uint32_t own = row_keys + lane % 4 * 16;
#pragma unroll
  for (int column = 0; column < Shape::kQueries / 8; ++column) {
    const float4 x = ptx::load_shared_f32x4(own + 64 * column);
    const int32_t begins[2] = {__float_as_int(x.x), __float_as_int(x.z)};
    const int32_t ends[2] = {__float_as_int(x.y), __float_as_int(x.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t from_begin = first_key + i / 2 * 8 - begins[i % 2], length = ends[i % 2] - begins[i % 2];
      if (from_begin >= length) mask(column, i);
    }
  }
}

/// The bits of KeyBlockQueries::attended of the 16 keys of a compute warp, counted in the tile's warps.
__device__ __forceinline__ uint32_t attended_by_some_row(const HopperBackwardParams& params, int32_t key_block_index,
                                                         int32_t warp) {
  const KeyBlockQueries& queries = with_key_ranges(params).key_block_queries[key_block_index];
  return __ldg(&queries.attended[warp / 2]) >> warp % 2 * 16 & 0xffff;
}

/// Clears the rows of K and V of those of a warp's 16 keys that no row attends to: they may hold NaN, and 0 * NaN is
/// NaN. Executed by the warp.
template <typename Shape>
__device__ __forceinline__ void clear_unattended_keys(uint32_t keys, uint32_t values, int32_t warp, uint32_t attended) {
  using Atom = typename Shape::Atom;
  constexpr int kRowChunks = Shape::kHeadDim / 8;
#pragma unroll 1
  for (uint32_t left = ~attended & 0xffff; left != 0; left &= left - 1) {
    const int32_t row = 16 * warp + __ffs(left) - 1;
#pragma unroll 1
    for (int32_t chunk = xa::ptx::opaque(threadIdx.x) % 32; chunk < kRowChunks; chunk += 32) {
      // The swizzle permutes the chunks of a row, so it does not matter here.
      const uint32_t offset =
          chunk / Atom::kChunks * Shape::kKeyAtomColumnBytes + row * Atom::kRowBytes + chunk % Atom::kChunks * 16;
      xa::ptx::clear_shared_16(keys + offset);
      xa::ptx::clear_shared_16(values + offset);
    }
  }
}

}  // namespace xa::hopper
