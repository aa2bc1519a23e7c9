// The tile scheduler of the backward: a global counter gives each CTA one tile index after another. A CTA takes the
// next index when it has loaded its previous tile. A dQ accumulation therefore waits only for tiles of lower indices,
// which running CTAs hold: nothing depends on the order in which CTAs start, nor on how many run.
//
// Within a sequence, tile indices ascend over head groups, in a head group over blocks of keys, and in a block over the
// heads of the group. Head groups are FlashAttention's L2 head swizzle: what the tiles of a head group read and
// accumulate stays in L2.
//
// Contributions to dQ are added in a fixed order of key blocks, and a CTA waits for the one before it. Under a causal
// mask, tiles go from the last key block to the first, and each begins at its first queries: a CTA is then some steps
// behind the one before it and does not wait. The longest tiles come last that way, so the last head group goes from
// the first key block to the last. If all heads fit into one head group, half of them form the last one.
//
// Ascending tiles spread the CTAs over all queries of a head group, which with grouped-query attention is more than L2
// holds. There, all tiles go through the queries from the last block: CTAs follow each other through the same query
// blocks, and all query heads of a KV head are processed for one block before the next. What they read and accumulate
// at a time stays in L2. The first waits are short compared with a tile, which takes longer by the number of query
// heads per KV head.
//
// Under a causal mask the CTAs of a first wave start together and end one after another, one key block apart. If the
// tiles of the second wave also began at the last query block, each CTA would be one key block behind the one before
// it, and with large groups the query heads of that many blocks are more than L2 holds. So where head groups fill whole
// waves, the tiles of every other wave go through the queries from the first one they attend to: all CTAs are then at
// the same query block again, and end together.
#pragma once

#include <cstdint>

#include "hopper_bwd/key_ranges.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Tiles of a wave, a power of two: about one per SM of an H100 or H200, which have 132.
constexpr int32_t kWaveTiles = 128;

/// Whether the query heads of a KV head are so many that tiles which go through different query blocks do not find them
/// in L2. Measured at D 64, 96 and 128 (docs/dev/lab_notebook.md).
template <typename Shape>
__device__ __forceinline__ bool has_large_groups(const AttentionParams& params) {
  return Shape::kAccumulatesDq && Shape::kHeadDim * params.group >= 768;
}

/// KV heads per head group of a sequence; the last group may have fewer.
template <typename Shape>
__device__ __forceinline__ int32_t heads_per_head_group(const AttentionParams& params, int32_t num_queries) {
  // A head group's Q, dO and dq_accum should fit into L2. With several query heads per KV head, CTAs read only a
  // window of them at a time, which is shorter where they go through the same query blocks in every wave.
  constexpr float kL2Bytes = 16.8e6f, kRowBytes = 8.0f * Shape::kHeadDim;
  float cached_heads = static_cast<float>(params.group);
  if (Shape::kAccumulatesDq && params.group > 1) cached_heads = has_large_groups<Shape>(params) ? 0.25f : 0.5f;
  const float head_bytes = kRowBytes * static_cast<float>(num_queries) * cached_heads;
  // Without a causal mask all key blocks have the same queries, and the first CTAs of a head wait for each other in
  // turn. With more heads per group fewer do. With grouped-query attention a tile takes longer, and waits are short.
  const float min_heads = !Shape::kAccumulatesDq || params.window_right >= 0 ? 1.0f : params.group > 1 ? 2.0f : 8.0f;
  const auto wanted = static_cast<uint32_t>(fminf(fmaxf(kL2Bytes / fmaxf(head_bytes, 1.0f), min_heads), 1e6f));
  const auto num_heads = static_cast<uint32_t>(params.num_kv_heads);
  const uint32_t at_most = num_heads / min(max(wanted, 1u), num_heads);
  return static_cast<int32_t>((num_heads + at_most - 1) / at_most);
}

/// Ranges of visible blocks: the key blocks that a query block attends to, and the query blocks that attend to a key
/// block (FlashAttention's get_n_block_min_max and get_m_block_min_max).
template <typename Shape>
struct VisibleBlocks {
  int32_t num_queries;
  int32_t num_keys;
  int32_t shift;
  int32_t window_left;
  int32_t window_right;

  __device__ __forceinline__ int32_t first_query_block(int32_t key_block) const {
    if (window_right < 0) return 0;
    return max(key_block * Shape::kKeys - shift - window_right, 0) / Shape::kQueries;
  }
  __device__ __forceinline__ int32_t last_query_block(int32_t key_block) const {
    int32_t last = num_queries - 1;
    if (window_left >= 0) {
      const int32_t last_key = min(key_block * Shape::kKeys + Shape::kKeys, num_keys) - 1;
      last = min(last_key - shift + window_left, last);
    }
    return last / Shape::kQueries;
  }
  __device__ __forceinline__ int32_t first_key_block(int32_t query_block) const {
    if (window_left < 0) return 0;
    return max(query_block * Shape::kQueries + shift - window_left, 0) / Shape::kKeys;
  }
  __device__ __forceinline__ int32_t last_key_block(int32_t query_block) const {
    int32_t last = num_keys - 1;
    if (window_right >= 0) {
      const int32_t last_query = min(query_block * Shape::kQueries + Shape::kQueries, num_queries) - 1;
      last = min(last_query + shift + window_right, last);
    }
    return last / Shape::kKeys;
  }
};

/// Selectors for `find_sequence`: the index of a sequence's first tile, or of its first query block of a head.
struct ByTile {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_tile); }
};
struct ByQueryBlock {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_query_block); }
};

/// Index of the last sequence whose first index (`By::first`) is at most `position`, or 0 if there is none. `sequences`
/// ascends in `By::first`; `position` is the same in all lanes. Executed by a warp.
template <typename By>
__device__ __forceinline__ int32_t find_sequence(const SequencePlan* sequences, int32_t count, int32_t position) {
  int32_t first = 0;
  // Each round probes 32 sequences at equal distances, one per lane.
  while (count > 1) {
    const int32_t step = ceil_div(count, 32), at = static_cast<int32_t>(threadIdx.x % 32) * step;
    const bool before = at < count && By::first(sequences[first + at]) <= position;
    const int32_t steps = max(__popc(__ballot_sync(~0u, before)) - 1, 0);
    first += steps * step;
    count = min(step, count - steps * step);
  }
  return first;
}

/// Writes tile `tile_index` to `to`; past the last tile, one with key_block = -1. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ void locate_tile(const HopperBackwardParams& params, int32_t tile_index, BackwardTile& to) {
  const AttentionParams& forward = params.base.forward;
  const int32_t num_tiles = __ldg(&params.plan->num_tiles);
  if (tile_index >= num_tiles) {
    to.key_block = -1;
    return;
  }
  // Stored before the other fields, because there are few registers.
  to.queries_ascend =
      Shape::kAccumulatesDq && tile_index < __ldg(&params.plan->num_wave_tiles) && (tile_index & kWaveTiles) != 0;
  const SequencePlan& sequence =
      params.sequences_by_tile[find_sequence<ByTile>(params.sequences_by_tile, forward.max_seqs, tile_index)];
  const auto store_sequence = [&] {
    to.first_query = sequence.first_query;
    to.num_queries = sequence.num_queries;
    to.first_key = sequence.first_key;
    to.num_keys = sequence.num_keys;
    to.shift = sequence.shift;
    to.first_row_tile = sequence.first_row_tile;
    to.first_query_block = sequence.first_query_block;
    to.sequence = sequence.sequence;
  };
  // One of the two orders takes fewer registers: the kernels past 128 columns would spill with the other one.
  if constexpr (Shape::kAccumulatesDq) store_sequence();
  if constexpr (Shape::kHasBias) to.hidden_keys = params.sequence_starts[sequence.sequence].hidden_keys;
  if constexpr (Shape::kHasKeyRanges) to.key_block_index = first_key_block<Shape>(sequence);
  const int32_t num_heads = forward.num_kv_heads,
                group_heads = heads_per_head_group<Shape>(forward, sequence.num_queries);
  const int32_t key_blocks = ceil_div(sequence.num_keys, Shape::kKeys), first_tile = sequence.first_tile;
  const int32_t in_sequence = tile_index - first_tile;
  // The last heads of the last sequence form a head group with at least a tile for most SMs. If every other head group
  // goes from the last key block and the call would have one head group, this is half of its heads.
  constexpr int32_t kLastTiles = 120;
  const bool alternates = Shape::kAccumulatesDq && forward.group == 1 && forward.window_right >= 0;
  int32_t last_heads = 0;
  if (first_tile + key_blocks * num_heads == num_tiles) {
    const bool is_only_group = first_tile == 0 && group_heads == num_heads;
    const int32_t least_heads = alternates && is_only_group ? ceil_div(num_heads, 2) : group_heads;
    last_heads = min(max(ceil_div(kLastTiles, key_blocks), least_heads), num_heads);
  }
  const int32_t head_group = in_sequence / (key_blocks * group_heads);
  int32_t first_head = head_group * group_heads, end_head = min(first_head + group_heads, num_heads - last_heads);
  const bool in_last = in_sequence >= key_blocks * (num_heads - last_heads);
  if (in_last) {
    first_head = num_heads - last_heads;
    end_head = num_heads;
  }
  const int32_t in_head_group = in_sequence - key_blocks * first_head, heads = end_head - first_head;
  int32_t key_block = in_head_group / heads;
  const int32_t part = first_head + in_head_group - key_block * heads, kv_head = part / params.head_splits;
  const int32_t heads_before = (part - kv_head * params.head_splits) * forward.group;
  to.kv_head = part;
  to.first_head = kv_head * params.kv_group + heads_before;
  to.num_heads = min(forward.group, params.kv_group - heads_before);
  const bool keys_descend = alternates && !in_last;
  if (keys_descend) {
    key_block = key_blocks - 1 - key_block;
    to.queries_ascend = 1;
  }
  to.key_block = key_block;
  to.keys_descend = keys_descend;
  if constexpr (!Shape::kAccumulatesDq) store_sequence();
  // Where no CTA adds to dQ, a tile's query blocks need not be those of other tiles: they begin at the first query that
  // attends to the tile's keys, and the tile takes that query for the sequence's first one.
  if (!Shape::kAccumulatesDq && forward.window_right >= 0) {
    const int32_t skipped_queries = max(key_block * Shape::kKeys - to.shift - forward.window_right, 0);
    to.first_query += skipped_queries;
    to.num_queries -= skipped_queries;
    to.shift += skipped_queries;
  }
  if constexpr (Shape::kHasKeyRanges) {
    to.key_block_index += key_block;
    const KeyBlockQueries& queries = with_key_ranges(params).key_block_queries[to.key_block_index];
    to.first_block = __ldg(&queries.first_block);
    to.num_blocks = __ldg(&queries.num_blocks);
  } else {
    const VisibleBlocks<Shape> visible_blocks = {to.num_queries, to.num_keys, to.shift, forward.window_left,
                                                 forward.window_right};
    const int32_t first_block = visible_blocks.first_query_block(key_block);
    to.first_block = first_block;
    to.num_blocks = visible_blocks.last_query_block(key_block) - first_block + 1;
  }
}

}  // namespace xa::hopper
