// Which tiles a CTA of the backward works on: a counter in memory gives it one tile index after the other. It takes the
// next when it has fetched all of its tile before, so in the sums of dQ a tile waits only for tiles of lower indices,
// which CTAs that run have: nothing depends on the order in which CTAs start, nor on how many run.
//
// Tiles of a sequence are numbered over sections of KV heads, over blocks of keys, over the heads of the section. What
// a section reads and adds to stays in L2.
//
// The sums of dQ are added up in a fixed order of blocks of keys, and a CTA that adds to one waits for the CTA before
// it. Where later queries see more keys, tiles are dealt out from the last block of keys, each of which begins at its
// first queries: then a CTA is by itself some steps behind the one before it, and does not wait. But the longest tiles
// come last, so the last section goes the other way.
//
// So CTAs are spread over all queries of a section, which with a group of heads is more than L2 holds. Groups go down
// from the last queries in all sections: CTAs follow each other through the same blocks, with all heads of a group in a
// block before the next one. What they read and add to at a time then stays in L2, and the first waits are short beside
// a tile, which takes as many times longer as a group has heads.
#pragma once

#include <cstdint>

#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

__device__ __forceinline__ int32_t ceil_div(int32_t x, int32_t y) { return (x + y - 1) / y; }

/// How the KV heads of a sequence are divided into sections.
template <typename Shape>
struct Sections {
  int32_t heads;  // of a section; the last one may have fewer
  int32_t count;

  __device__ __forceinline__ Sections(const AttentionParams& params, int32_t num_queries) {
    // Q, dO and the sums of dQ. Of groups that go down together only a window is read at a time.
    constexpr float kBytes = 16.8e6f, kRowBytes = 8.0f * Shape::kHeadDim;
    const float share = Shape::kAddsSums && params.group > 1 ? 0.5f : static_cast<float>(params.group);
    const float of_head = kRowBytes * static_cast<float>(num_queries) * share;
    // Without a causal mask all blocks of keys have the same queries, and the first CTAs of a head wait for each other
    // one after the other: of two heads they are half as many.
    const float fewest = Shape::kAddsSums && params.window_right < 0 ? 2.0f : 1.0f;
    const int32_t wanted = static_cast<int32_t>(fminf(fmaxf(kBytes / fmaxf(of_head, 1.0f), fewest), 1e6f));
    const int32_t num_heads = params.num_kv_heads;
    count = ceil_div(num_heads, clamp(wanted, 1, num_heads));
    heads = ceil_div(num_heads, count);
    count = ceil_div(num_heads, heads);
  }
};

/// The keys that a block of queries sees, or the queries that see a block of keys, in blocks.
template <typename Shape>
struct Band {
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

/// What is looked for in a list of sequences: where each begins among tiles, or among a head's blocks of queries.
struct OfTiles {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.tiles_before); }
};
struct OfTurns {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_turn); }
};

/// The last sequence that begins at or before a place that is the same for the warp; 0 where there is none. `Of` says
/// where sequences begin, in the list's order. The work of a warp.
template <typename Of>
__device__ __forceinline__ int32_t last_before(const SequencePlan* sequences, int32_t count, int32_t place) {
  int32_t first = 0;
  // Looks at 32 of them at the same distance, as long as there are others between.
  while (count > 1) {
    const int32_t step = ceil_div(count, 32), at = static_cast<int32_t>(threadIdx.x % 32) * step;
    const bool before = at < count && Of::first(sequences[first + at]) <= place;
    const int32_t steps = max(__popc(__ballot_sync(~0u, before)) - 1, 0);
    first += steps * step;
    count = min(step, count - steps * step);
  }
  return first;
}

/// Puts the tile with an index into `to`. The work of a warp.
template <typename Shape>
__device__ __forceinline__ void find_tile(const HopperBackwardParams& params, int32_t tile_index, BackwardTile& to) {
  const AttentionParams& forward = params.base.forward;
  const int32_t num_tiles = __ldg(&params.plan->num_tiles);
  if (tile_index >= num_tiles) {
    to.key_block = -1;
    return;
  }
  const SequencePlan& sequence = params.sequences[last_before<OfTiles>(params.sequences, forward.max_seqs, tile_index)];
  const int32_t num_queries = sequence.num_queries, num_keys = sequence.num_keys, num_heads = forward.num_kv_heads;
  const Sections<Shape> sections(forward, num_queries);
  const int32_t key_blocks = ceil_div(num_keys, Shape::kKeys), in_sequence = tile_index - sequence.tiles_before;
  // The last heads of the last sequence are a section with a tile for most SMs.
  constexpr int32_t kLastTiles = 120;
  const bool is_last = sequence.tiles_before + key_blocks * num_heads == num_tiles;
  const int32_t last_heads = is_last ? min(max(ceil_div(kLastTiles, key_blocks), sections.heads), num_heads) : 0;
  const int32_t section = in_sequence / (key_blocks * sections.heads);
  int32_t first_head = section * sections.heads, end_head = min(first_head + sections.heads, num_heads - last_heads);
  const bool in_last = in_sequence >= key_blocks * (num_heads - last_heads);
  if (in_last) {
    first_head = num_heads - last_heads;
    end_head = num_heads;
  }
  const int32_t in_section = in_sequence - key_blocks * first_head, heads = end_head - first_head;
  int32_t key_block = in_section / heads;
  to.kv_head = first_head + in_section - key_block * heads;
  // Of few sections one that goes the other way is too much.
  constexpr int32_t kFewSections = 8;
  const bool ascends = Shape::kAddsSums && forward.group == 1 && forward.window_right >= 0 && !in_last &&
                       __ldg(&params.plan->num_sections) >= kFewSections;
  if (ascends) key_block = key_blocks - 1 - key_block;
  const int32_t shift = sequence.shift;
  const Band<Shape> band = {num_queries, num_keys, shift, forward.window_left, forward.window_right};
  const int32_t first_block = band.first_query_block(key_block);
  to.key_block = key_block;
  to.ascends = ascends;
  to.first_block = first_block;
  to.num_blocks = band.last_query_block(key_block) - first_block + 1;
  to.first_query = sequence.first_query;
  to.num_queries = num_queries;
  to.first_key = sequence.first_key;
  to.num_keys = num_keys;
  to.shift = shift;
  to.first_group = sequence.first_group;
  to.first_turn = sequence.first_turn;
  to.sequence = sequence.sequence;
}

}  // namespace xa::hopper
