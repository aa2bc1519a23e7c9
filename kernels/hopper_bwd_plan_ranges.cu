// Runs between hopper_bwd_prepare.cu and hopper_bwd.cu if query rows have bounds of their keys: writes what
// include/hopper_bwd/key_ranges.cuh says, from the bounds and the plan of the sequences.
//
// Compiled once for each
//   XA_HEAD_DIM  64, 96, 128: the bucket of D and Dv
// Launch: kThreads threads; a CTA for every kWarps query blocks, and after these one for each block of keys.

#include <climits>
#include <cstdint>

#include "bwd/sequence_at.cuh"
#include "hopper_bwd/key_ranges.cuh"
#include "hopper_bwd/ptx.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "key_ranges.cuh"
#include "params/hopper_bwd.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// Selector for `find_sequence`: a sequence's first block of keys.
template <typename Shape>
struct ByKeyBlock {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return first_key_block<Shape>(plan); }
};

/// A sequence, and its keys as its bounds count them.
struct BoundedSequence {
  SequencePlan plan;
  QoTile tile;

  /// The keys of query `query` of the plan, counted as there.
  __device__ __forceinline__ RowRange row(const HopperKeyRangeBackwardParams& params, const Visibility& visibility,
                                          int32_t query) const {
    const int32_t first_key = plan.first_key - tile.start_k;
    const RowRange range = row_range(params.ranges, visibility, tile, plan.first_query - tile.first_token + query);
    return range.begin < range.end ? RowRange{range.begin - first_key, range.end - first_key} : range;
  }
};

/// Sequence `index` of the list by row. `ascends` is whether all starts ascend. Executed by a warp.
__device__ __forceinline__ BoundedSequence bounded_sequence(const HopperBackwardParams& params, int32_t index,
                                                            bool ascends) {
  StartMaxima maxima = {0, 0};
  return {params.sequences_by_row[index], sequence_at(params.base.forward, index, ascends ? index : 0, maxima)};
}

/// The rows of a query block: each lane has every 32nd.
template <typename Shape>
struct QueryBlock {
  RowRange rows[Shape::kQueries / 32];
  QueryBlockKeys keys;

  /// Query block `block` of the sequence. Executed by a warp.
  __device__ __forceinline__ QueryBlock(const HopperKeyRangeBackwardParams& params, const BoundedSequence& sequence,
                                        const Visibility& visibility, int32_t block) {
    RowRange all = {INT_MAX, 0}, common = {0, INT_MAX};
#pragma unroll
    for (int i = 0; i < Shape::kQueries / 32; ++i) {
      const int32_t query = block * Shape::kQueries + 32 * i + static_cast<int32_t>(threadIdx.x % 32);
      rows[i] = RowRange{0, 0};
      if (query >= sequence.plan.num_queries) continue;
      rows[i] = sequence.row(params, visibility, query);
      if (rows[i].begin < rows[i].end) all = united(all, rows[i]);
      common = {max(common.begin, rows[i].begin), min(common.end, rows[i].end)};
    }
    keys = {warp_min(all.begin), warp_max(all.end), warp_max(common.begin), warp_min(common.end)};
    if (keys.begin >= keys.end) keys = {0, 0, 0, 0};
  }
};

/// Writes the ranges of a query block, counted over all sequences, and of its rows. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ void plan_query_block(const HopperKeyRangeBackwardParams& params, int32_t index,
                                                 bool ascends) {
  const HopperBackwardParams& common = params.common;
  if (index >= common.num_query_blocks) return;
  const int32_t b = find_sequence<ByQueryBlock>(common.sequences_by_row, common.base.forward.max_seqs, index);
  const BoundedSequence sequence = bounded_sequence(common, b, ascends);
  const int32_t block = index - sequence.plan.first_query_block;
  // Between two sequences are blocks that belong to none.
  if (block < 0 || block >= ceil_div(sequence.plan.num_queries, Shape::kQueries)) return;
  const QueryBlock<Shape> queries(params, sequence, Visibility(common.base.forward, sequence.tile), block);
  const int32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Shape::kQueries / 32; ++i) {
    const int32_t query = block * Shape::kQueries + 32 * i + lane;
    if (query >= sequence.plan.num_queries) continue;
    params.row_keys[sequence.plan.first_query + query] = {queries.rows[i].begin, queries.rows[i].end};
  }
  if (lane == 0) params.query_block_keys[index] = queries.keys;
}

/// What the warps of a CTA find about a block of keys.
struct KeyBlockScratch {
  int32_t first_block[kWarps];
  int32_t last_block[kWarps];
  uint32_t attended[kWarps][4];
};

/// Writes which query blocks a block of keys, counted over all sequences, is for. Executed by a CTA.
template <typename Shape>
__device__ __forceinline__ void plan_key_block(const HopperKeyRangeBackwardParams& params, int32_t index, bool ascends,
                                               KeyBlockScratch& scratch) {
  const HopperBackwardParams& common = params.common;
  const AttentionParams& forward = common.base.forward;
  const int32_t b = find_sequence<ByKeyBlock<Shape>>(common.sequences_by_row, forward.max_seqs, index);
  const BoundedSequence sequence = bounded_sequence(common, b, ascends);
  const SequencePlan& plan = sequence.plan;
  const int32_t key_block = index - first_key_block<Shape>(plan), first_key = key_block * Shape::kKeys;
  if (key_block < 0 || first_key >= plan.num_keys) return;
  const Visibility visibility(forward, sequence.tile);
  const VisibleBlocks<Shape> visible = {plan.num_queries, plan.num_keys, plan.shift, forward.window_left,
                                        forward.window_right};
  const int32_t first_visible = visible.first_query_block(key_block), warp = threadIdx.x / 32;
  int32_t first_block = INT_MAX, last_block = -1;
  uint32_t attended[4] = {};
#pragma unroll 1
  for (int32_t block = first_visible + warp; block <= visible.last_query_block(key_block); block += kWarps) {
    const QueryBlock<Shape> queries(params, sequence, visibility, block);
    if (!contributing_blocks<Shape>(queries.keys.begin, queries.keys.end).contains(key_block)) continue;
    first_block = min(first_block, block);
    last_block = max(last_block, block);
#pragma unroll
    for (int i = 0; i < Shape::kQueries / 32; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t keys = queries.rows[i].among_64(first_key + 64 * half);
        attended[2 * half] |= static_cast<uint32_t>(keys);
        attended[2 * half + 1] |= static_cast<uint32_t>(keys >> 32);
      }
    }
  }
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    attended[word] = __reduce_or_sync(~0u, attended[word]);
    if (threadIdx.x % 32 == 0) scratch.attended[warp][word] = attended[word];
  }
  if (threadIdx.x % 32 == 0) {
    scratch.first_block[warp] = first_block;
    scratch.last_block[warp] = last_block;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
    first_block = min(first_block, scratch.first_block[other]);
    last_block = max(last_block, scratch.last_block[other]);
#pragma unroll
    for (int word = 0; word < 4; ++word) attended[word] |= scratch.attended[other][word];
  }
  KeyBlockQueries queries;
  const bool is_attended = last_block >= 0;
  queries.first_block = is_attended ? first_block : first_visible;
  queries.num_blocks = is_attended ? last_block - first_block + 1 : 1;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int32_t count = min(max(plan.num_keys - first_key - 32 * word, 0), 32);
    queries.attended[word] = attended[word] | (count == 32 ? 0 : ~0u << count);
  }
  params.key_block_queries[index] = queries;
}

}  // namespace xa::hopper

namespace {
using Shape = xa::hopper::BackwardShape<XA_HEAD_DIM, xa::tiles::logits_key_ranges>;
}  // namespace

extern "C" __global__ void __launch_bounds__(xa::hopper::kThreads)
    XA_ENTRY(const __grid_constant__ xa::HopperKeyRangeBackwardParams params) {
  using namespace xa::hopper;
  ptx::launch_dependents();
  const xa::AttentionParams& forward = params.common.base.forward;
  if (forward.max_seqs == 0) return;
  bool ascends = true;
  for (int32_t b = threadIdx.x; b < forward.max_seqs; b += kThreads) {
    xa::Metadata<1> metadata;
    metadata.load(forward, b);
    ascends &= metadata.ascends(forward, 0);
  }
  ascends = __syncthreads_and(ascends);
  const int32_t query_ctas = ceil_div(params.common.num_query_blocks, kWarps);
  const auto cta = static_cast<int32_t>(blockIdx.x);
  if (cta < query_ctas) {
    plan_query_block<Shape>(params, cta * kWarps + static_cast<int32_t>(threadIdx.x / 32), ascends);
  } else {
    __shared__ KeyBlockScratch scratch;
    plan_key_block<Shape>(params, cta - query_ctas, ascends, scratch);
  }
}
