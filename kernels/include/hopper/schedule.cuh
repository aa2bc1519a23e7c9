// Which tiles a CTA of the prefill kernel works on, and in what order; found on the device by one warp of the CTA,
// while the others work on the tile before.
//
// Tiles are numbered over runs of 32 sequences, the heads of a run in *sections*; in a section those with the last rows
// come first, because under a causal mask they are the longest, and the heads of the same rows are neighbours. A CTA's
// first tile is that of its own number, each further one that of the next number in `next_tile`: the longest come
// first, so that the CTAs finish together.
#pragma once

#include <cstdint>

#include "hopper/pipeline.cuh"
#include "hopper/shape.cuh"
#include "params/attention.cuh"
#include "params/hopper_prefill.cuh"
#include "scales.cuh"
#include "split_kv.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

__device__ __forceinline__ int64_t sum_of_lanes(int64_t mine) {
  return __shfl_sync(~0u, sum_up_to_this_lane(mine), 31);
}

/// Finds tiles by their numbers, which must ascend. The work of one warp; lane i knows sequence `first_ + i`.
template <typename Shape>
class TileFinder {
 public:
  __device__ __forceinline__ explicit TileFinder(const PrefillParams& params)
      : params_(params.attention), grows_(params.grows != 0), num_seqs_(live_sequences(params_)) {
    load_run(0);
  }

  /// Puts tile `number` into `to`; one without rows where there is none.
  __device__ __forceinline__ void find(int64_t number, int32_t packs_per_kv_head, TilePlan& to) {
    while (number - before_ >= tiles_of_head_ * params_.num_kv_heads && first_ + 32 < num_seqs_) {
      before_ += tiles_of_head_ * params_.num_kv_heads;
      load_run(first_ + 32);
    }
    number -= before_;
    if (number >= tiles_of_head_ * params_.num_kv_heads) {
      if (threadIdx.x % 32 == 0) to.plan.tile.num_rows = 0;
      return;
    }
    // Section s has heads [s H / S, (s + 1) H / S).
    const int64_t heads = params_.num_kv_heads, of_all = divide(number, tiles_of_head_);
    const int64_t section = divide((of_all + 1) * sections_ - 1, heads);
    const int64_t first = divide(section * heads, int64_t{sections_}),
                  end = divide((section + 1) * heads, int64_t{sections_});
    const int64_t in_section = number - first * tiles_of_head_, of_head = divide(in_section, end - first);
    const auto head = static_cast<int32_t>(first + in_section - of_head * (end - first));
    describe(of_head, head, packs_per_kv_head, to);
  }

 private:
  /// The next 32 sequences, one a lane.
  __device__ __forceinline__ void load_run(int32_t first) {
    const int32_t b = first + static_cast<int32_t>(threadIdx.x % 32);
    first_ = first;
    Metadata<1> metadata;
    metadata.load(params_, b);
    // As long as starts ascend, those of this run are larger than all before.
    const bool ascend = __all_sync(~0u, b >= num_seqs_ || metadata.ascends(params_, 0)) != 0;
    if (__builtin_expect(!ascend || !starts_ascend(maxima_), false)) metadata.ascend(params_, maxima_);
    tile_ = metadata.sequence(params_, 0, b);
    const bool ours = b < num_seqs_ && tile_.len_q >= params_.min_queries && tile_.len_q <= params_.max_queries;
    num_tiles_ = ours ? (tile_.len_q * params_.group + Shape::kRows - 1) / Shape::kRows : 0;
    tiles_of_head_ = sum_of_lanes(num_tiles_);
    sections_ = grows_ ? find_sections(ours) : params_.num_kv_heads;
  }
  /// How many sections the heads of this run are divided into: as many as fill two waves each with the longest tiles,
  /// so that what is left for the end is short. Fewer where CTAs would not share what they read at the same time: of
  /// as many CTAs as have tiles of the same rows, those of one sequence and head read the same keys. Both limits have
  /// been measured.
  __device__ __forceinline__ int32_t find_sections(bool ours) const {
    constexpr float kWaves = 1.9f, kSharing = 4.0f;
    // Twice the keys of all tiles of a head; a sequence's tiles have len_k - len_q to len_k.
    const float work = sum_of_lanes(ours ? num_tiles_ * (int64_t{2} * tile_.len_k - tile_.len_q) : 0);
    const float spread = __reduce_max_sync(~0u, ours ? tile_.len_q : 0), ctas = gridDim.x;
    const float least = ceilf(__fdividef(2 * kWaves * ctas * spread, fmaxf(work, 1.0f)));
    const float levels = __reduce_max_sync(~0u, num_tiles_);
    const float most = floorf(__fdividef(ctas * levels, kSharing * fmaxf(tiles_of_head_, 1.0f)));
    const float heads = fmaxf(fminf(least, most), 1.0f);
    return max(static_cast<int32_t>(__fdividef(params_.num_kv_heads, heads)), 1);
  }

  /// Tile `number` of those of a head, of which all sequences' last ones come first, then those before the last, as
  /// counted from their sequence's first row. Where k sequences have more than n tiles, they stand at level n in turn.
  __device__ __forceinline__ void describe(int64_t number, int32_t head, int32_t packs_per_kv_head,
                                           TilePlan& to) const {
    int32_t level = __reduce_max_sync(~0u, num_tiles_);
    uint32_t has_level = 0;
    int32_t lower = 0;
#pragma unroll 1
    for (;;) {
      // Down to `lower` it is the same sequences that have a tile.
      has_level = __ballot_sync(~0u, num_tiles_ >= level);
      lower = __reduce_max_sync(~0u, num_tiles_ < level ? num_tiles_ : 0);
      const int64_t tiles = static_cast<int64_t>(level - lower) * __popc(has_level);
      if (number < tiles || lower == 0) break;
      number -= tiles;
      level = lower;
    }
    const int32_t count = __popc(has_level), steps = static_cast<int32_t>(number) / count;
    const int32_t index = level - 1 - steps;
    // The sequence is the one that as many of those with this level stand before.
    const uint32_t lane = threadIdx.x % 32;
    const int32_t before = __popc(has_level & ((1u << lane) - 1));
    if ((has_level >> lane & 1) != 0 && before == static_cast<int32_t>(number) - steps * count) {
      write(index, head, packs_per_kv_head, to);
    }
  }

  __device__ __forceinline__ void write(int32_t index, int32_t head, int32_t packs_per_kv_head, TilePlan& to) const {
    QoTile tile = tile_;
    tile.first_row = index * Shape::kRows;
    tile.num_rows = min(Shape::kRows, tile.len_q * params_.group - tile.first_row);
    const KeyRange keys = visible_keys(params_, tile);
    to.plan.tile = tile;
    to.plan.keys = keys;
    to.plan.kv_head = head;
    const Visibility visibility(params_, tile);
    to.seen_begin = visibility.begin(0);
    to.seen_end = visibility.end(tile.len_q - 1);
    to.first_block = keys.begin / Shape::kKeys;
    to.end_block = (keys.end + Shape::kKeys - 1) / Shape::kKeys;
  }

  const AttentionParams& params_;
  const bool grows_;
  const int32_t num_seqs_;
  StartMaxima maxima_ = kStartsAscend;  // of this run and those before
  int32_t first_;
  int64_t before_ = 0;     // tiles of the runs before this one
  int64_t tiles_of_head_;  // of this run
  int32_t sections_;
  QoTile tile_;  // but for the rows
  int32_t num_tiles_;
};

/// The tiles that CTAs begin with: those below `dealt`, of which `first` is this CTA's.
struct TileNumbers {
  int32_t first;  // negative: it begins with the next one that is left
  int32_t dealt;

  /// Every CTA begins with that of its own number.
  static __device__ __forceinline__ TileNumbers of_grid() {
    return TileNumbers{static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x)};
  }
  /// Every CTA begins with the next one that is left.
  static __device__ __forceinline__ TileNumbers all_left() { return TileNumbers{-1, 0}; }
};

/// Plans one tile after another, until there are no more. The work of one warp.
template <typename Shape, typename LogitsTransform>
__device__ __forceinline__ void plan_tiles(const PrefillParams& params, const Pipeline<Shape>& pipeline,
                                           const TileNumbers& numbers) {
  TileFinder<Shape> finder(params);
  int64_t number = numbers.first;
  int32_t rows = 1;
#pragma unroll 1
  for (int32_t count = 0; rows > 0; ++count) {
    const PipelineState<2> turn(count);
    pipeline.plan_empty(turn).producer_wait();
    if (count > 0 || numbers.first < 0) {
      if (params.next_tile == nullptr) {
        number += numbers.dealt;
      } else {
        uint64_t next = 0;
        if (threadIdx.x % 32 == 0) next = atomicAdd(reinterpret_cast<unsigned long long*>(params.next_tile), 1ull);
        number = numbers.dealt + static_cast<int64_t>(__shfl_sync(~0u, next, 0));
      }
    }
    TilePlan& plan = pipeline.plan(turn);
    finder.find(number, params.packs_per_kv_head, plan);
    __syncwarp();
    rows = plan.plan.tile.num_rows;
    if (threadIdx.x % 32 == 0) {
      const int32_t kv_head = plan.plan.kv_head / params.packs_per_kv_head;
      plan.plan.score_factor = rows > 0 ? LogitsTransform::factor(params.attention, kv_head) : 0.0f;
      plan.value_factor = rows > 0 ? params.attention.value_factor * scale_of(params.attention.v_scale, kv_head) : 0.0f;
      pipeline.plan_full(turn).arrive();
    }
    __syncwarp();
  }
}

/// Whether no query start is less than the one before. The work of one warp.
__device__ __forceinline__ bool query_starts_ascend(const AttentionParams& params) {
  const int32_t num_seqs = live_sequences(params);
  bool ascends = true;
  for (int32_t first = 0; first < num_seqs; first += 32) {
    const int32_t b = min(first + static_cast<int32_t>(threadIdx.x % 32), num_seqs - 1);
    ascends &= start_of(params, b) <= start_of(params, b + 1);
  }
  return __all_sync(~0u, ascends) != 0;
}

}  // namespace xa::hopper
