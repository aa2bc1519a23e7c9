// Plans the backward kernels of sm_90a from the metadata: two lists of sequences, one in tile order and one in row
// order. One CTA writes them once, so that the other CTAs neither clamp lengths nor handle start offsets that descend.
#pragma once

#include <cstdint>

#include "bwd/sequence_segment.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/attention.cuh"
#include "params/hopper_bwd.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Shared memory of the planning CTA.
template <int kThreads>
struct SequencePlanScratch {
  int32_t tiles[kThreads];  // by rank in tile order; before that, the sequences' lengths
  int32_t warp_tiles[kThreads / 32];
  int32_t num_wave_tiles;  // first tile of the first sequence that does not fill whole waves
};

/// The plan of `tile.sequence`, except `first_tile`, in blocks of `block_queries` queries.
__device__ __forceinline__ SequencePlan plan_sequence(const AttentionParams& params, const QoTile& tile, bool live,
                                                      int32_t block_queries) {
  SequencePlan plan = {};
  plan.first_query = tile.first_token;
  plan.first_key = tile.start_k;
  plan.sequence = tile.sequence;
  const Visibility visibility(params, tile);
  if (live && tile.len_q > 0) {
    // The queries that attend to some key are contiguous, and so are the keys that some query attends to.
    const int32_t first_key = visibility.begin(0), end_key = visibility.end(tile.len_q - 1);
    if (first_key < end_key) {
      const AttendingQueries queries(visibility, first_key, end_key - 1);
      const int32_t first_query = clamp_to(queries.begin, 0, tile.len_q),
                    end_query = clamp_to(queries.end, 0, tile.len_q);
      if (first_query < end_query) {
        plan.first_query += first_query;
        plan.num_queries = end_query - first_query;
        plan.first_key += first_key;
        plan.num_keys = end_key - first_key;
        plan.shift = visibility.shift + first_query - first_key;
      }
    }
  }
  // First blocks are rounded down to whole blocks. Each sequence b gets (block size - 1) * b additional rows in front
  // of it, so the blocks of two sequences never overlap.
  plan.first_row_tile = static_cast<int32_t>((plan.first_query + int64_t{15} * tile.sequence) / 16);
  plan.first_query_block =
      static_cast<int32_t>((plan.first_query + int64_t{block_queries - 1} * tile.sequence) / block_queries);
  return plan;
}

/// Lets the keys of a plan begin at a multiple of 8 keys of the sequence, which begins at row `start`; returns how many
/// that adds.
__device__ __forceinline__ int32_t align_keys(SequencePlan& plan, int32_t start) {
  const int32_t added = (plan.first_key - start) % 8;
  plan.first_key -= added;
  plan.num_keys += added;
  plan.shift += added;
  return added;
}

/// Whether a causal sequence has as many queries as keys and its head groups fill whole waves of tiles; see
/// schedule.cuh.
template <typename Shape>
__device__ __forceinline__ bool fills_whole_waves(const AttentionParams& params, const SequencePlan& plan) {
  const int32_t group_heads = heads_per_head_group<Shape>(params, plan.num_queries);
  return has_large_groups<Shape>(params) && params.window_left < 0 && params.window_right == 0 && plan.shift == 0 &&
         plan.num_queries == plan.num_keys && params.num_kv_heads % group_heads == 0 &&
         ceil_div(plan.num_keys, Shape::kKeys) * group_heads % kWaveTiles == 0;
}

/// Exclusive prefix sum of `tiles` over the threads, and their total in this round.
template <int kThreads>
__device__ __forceinline__ void sum_preceding(SequencePlanScratch<kThreads>& scratch, int32_t tiles,
                                              int32_t& first_tile, int32_t& all_tiles) {
  const int32_t warp = threadIdx.x / 32, tiles_here = sum_up_to_this_lane(tiles);
  __syncthreads();
  if (threadIdx.x % 32 == 31) scratch.warp_tiles[warp] = tiles_here;
  __syncthreads();
  first_tile = tiles_here - tiles;
  all_tiles = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) first_tile += scratch.warp_tiles[w];
    all_tiles += scratch.warp_tiles[w];
  }
}

/// Writes both lists. Executed by one CTA.
template <typename Shape, int kThreads>
__device__ __forceinline__ void plan_sequences(const HopperBackwardParams& params,
                                               SequencePlanScratch<kThreads>& scratch) {
  const AttentionParams& forward = params.base.forward;
  const int32_t num_seqs = forward.max_seqs;
  bool ascends = true;
  for (int32_t b = threadIdx.x; b < num_seqs; b += kThreads) {
    Metadata<1> metadata;
    metadata.load(forward, b);
    ascends &= metadata.ascends(forward, 0);
  }
  ascends = __syncthreads_and(ascends);
  // The longest sequences come first, because their tiles take longest. This needs all sequences in one round.
  const bool sorts_by_length = num_seqs <= kThreads;
  StartScan scan;
  int32_t tiles_so_far = 0;
  // With fewer or many more SMs than a wave has tiles, CTAs would wait for those of a wave that has not ended.
  const bool has_waves = params.num_sms / 16 == kWaveTiles / 16;
  if (threadIdx.x == 0) scratch.num_wave_tiles = has_waves ? INT32_MAX : 0;
  __syncthreads();
  for (int32_t round = 0; round < num_seqs; round += kThreads) {
    const int32_t b = round + static_cast<int32_t>(threadIdx.x);
    Metadata<1> metadata;
    metadata.load(forward, b);
    if (!ascends) scan.ascend(forward, b / 32 * 32, metadata);
    const QoTile tile = metadata.sequence(forward, 0, b);
    SequencePlan plan = plan_sequence(forward, tile, b < num_seqs, params.block_queries);
    if (params.sequence_starts != nullptr && b < num_seqs) {
      params.sequence_starts[b] = {tile.first_token, tile.start_k, align_keys(plan, tile.start_k)};
    }
    int32_t tiles = 0;
    bool fills_waves = false;
    if (plan.num_queries > 0) {
      tiles = ceil_div(plan.num_keys, Shape::kKeys) * forward.num_kv_heads;
      fills_waves = fills_whole_waves<Shape>(forward, plan);
    }
    int32_t rank = b;
    if (sorts_by_length) {
      scratch.tiles[threadIdx.x] = b < num_seqs ? plan.num_queries : -1;
      __syncthreads();
      rank = 0;
      for (int32_t other = 0; other < num_seqs; ++other) {
        const int32_t longer = scratch.tiles[other];
        rank += longer > plan.num_queries || (longer == plan.num_queries && other < b) ? 1 : 0;
      }
      __syncthreads();
      if (b < num_seqs) scratch.tiles[rank] = tiles;
      __syncthreads();
    }
    int32_t preceding, all_tiles;
    sum_preceding<kThreads>(scratch, sorts_by_length ? (b < num_seqs ? scratch.tiles[threadIdx.x] : 0) : tiles,
                            preceding, all_tiles);
    if (sorts_by_length) {
      __syncthreads();
      scratch.tiles[threadIdx.x] = preceding;
      __syncthreads();
      if (b < num_seqs) preceding = scratch.tiles[rank];
    }
    if (b < num_seqs) {
      plan.first_tile = tiles_so_far + preceding;
      params.sequences_by_row[b] = plan;
      params.sequences_by_tile[rank] = plan;
      if (tiles > 0 && !fills_waves) atomicMin(&scratch.num_wave_tiles, plan.first_tile);
    }
    tiles_so_far += all_tiles;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *params.plan = {0, 0, 0, tiles_so_far, scratch.num_wave_tiles};
  }
}

}  // namespace xa::hopper
