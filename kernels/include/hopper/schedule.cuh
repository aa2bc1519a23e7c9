// The tile scheduler of the prefill kernel: which work tiles a CTA computes, and in what order. One warp of each CTA
// runs it on the device, because only the device knows the lengths, one tile ahead of the compute warps, but not before
// the K warp has loaded most of the tile before.
//
// Tile indices ascend over groups of 32 sequences (one per lane), in a group over head groups, and in a head group over
// tiles in LPT order: under a causal mask, those that end at the largest number of keys first, otherwise those with the
// last query rows; heads vary fastest. Head groups are FlashAttention's L2 head swizzle. A CTA's first tile has the
// CTA's index, each further one the next value of the counter `next_tile`, so that all CTAs finish at about the same
// time.
#pragma once

#include <cstdint>

#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "params/attention.cuh"
#include "params/hopper_prefill.cuh"
#include "scales.cuh"
#include "split_kv.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

/// Maps tile indices, which must ascend, to work tiles. Run by one warp; lane i holds sequence `first_ + i`.
template <typename Shape>
class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const HopperPrefillParams& params)
      : params_(params.attention), is_causal_(params.is_causal != 0) {}

  /// Reads the metadata of the first sequences.
  __device__ __forceinline__ void begin() {
    num_seqs_ = live_sequences(params_);
    maxima_ = kStartsAscend;
    before_ = 0;
    load_sequences(0);
  }

  /// Writes tile `index` to `to`; past the last tile, one with num_rows = 0.
  __device__ __forceinline__ void locate(uint32_t index, int32_t packs_per_kv_head, PrefillTile& to) {
    while (index - before_ >= num_tiles() && first_ + 32 < num_seqs_) {
      before_ += num_tiles();
      load_sequences(first_ + 32);
    }
    index -= before_;
    if (index >= num_tiles()) {
      if (threadIdx.x % 32 == 0) to.work.tile.num_rows = 0;
      return;
    }
    const uint32_t heads = heads_per_group_, missing = heads - first_group_heads_;
    const uint32_t group = (index + missing * tiles_per_head_) / (heads * tiles_per_head_);
    const uint32_t first_head = group == 0 ? 0 : group * heads - missing;
    const uint32_t in_group = index - first_head * tiles_per_head_;
    const uint32_t in_head = in_group / (group == 0 ? first_group_heads_ : heads);
    const uint32_t head = first_head + in_group - in_head * (group == 0 ? first_group_heads_ : heads);
    locate_in_head(in_head, head, packs_per_kv_head, to);
  }

 private:
  /// Tiles of these sequences. 32 bits hold their numbers: every tile has rows of q of its own, so that 2^31 tiles
  /// would take 256 GB.
  __device__ __forceinline__ uint32_t num_tiles() const { return tiles_per_head_ * params_.num_kv_heads; }
  /// Loads the metadata of sequences [first, first + 32), one per lane.
  __device__ __forceinline__ void load_sequences(int32_t first) {
    const int32_t b = first + static_cast<int32_t>(threadIdx.x % 32);
    first_ = first;
    Metadata<1> metadata;
    metadata.load(params_, b);
    // Starts that ascend so far are at least as large as all starts before them, so their running maximum is not
    // needed.
    const bool ascend = __all_sync(~0u, b >= num_seqs_ || metadata.ascends(params_, 0)) != 0;
    if (__builtin_expect(!ascend || !starts_ascend(maxima_), false)) metadata.ascend(params_, maxima_);
    sequence_ = metadata.sequence(params_, 0, b);
    const bool is_selected =
        b < num_seqs_ && sequence_.len_q >= params_.min_queries && sequence_.len_q <= params_.max_queries;
    if (!is_selected) sequence_.len_q = 0;
    first_level_ = 0;
    if (is_causal_ && is_selected) {
      const int32_t shift = Visibility::shift_of(params_, sequence_);
      first_level_ = clamp(shift, 0, sequence_.len_k) / (Shape::kRows / params_.group);
    }
    tiles_per_head_ = __reduce_add_sync(~0u, tiles_of_sequence());
    choose_head_groups(is_selected);
  }
  /// Chooses the head groups of these sequences. A group is large enough that its longest tiles fill kWaves waves of
  /// CTAs, which keeps the tail short, but no larger than leaves kSharing CTAs at work on the same keys at the same
  /// time, which keeps those in L2: tiles of the same level, one per sequence and head, run together. Both constants
  /// are measured (docs/dev/lab_notebook.md).
  __device__ __forceinline__ void choose_head_groups(bool is_selected) {
    heads_per_group_ = first_group_heads_ = 1;
    if (!is_causal_) return;
    constexpr float kWaves = 1.9f, kSharing = Shape::kHeadDim > 128 ? 4.0f : 8.0f;
    // Twice the keys of a head's tiles; those of a sequence have len_k - len_q to len_k keys.
    const float keys = 2.0f * sequence_.len_k - sequence_.len_q,
                work = sum_of_lanes(is_selected ? tiles_of_sequence() * keys : 0);
    const float longest = __reduce_max_sync(~0u, is_selected ? sequence_.len_q : 0), ctas = gridDim.x;
    const float min_heads = ceilf(__fdividef(2 * kWaves * ctas * longest, fmaxf(work, 1.0f)));
    const float levels =
        min(static_cast<int32_t>(tiles_per_head_), __reduce_max_sync(~0u, end_level()) - lowest_level());
    const float max_heads = floorf(__fdividef(ctas * levels, kSharing * fmaxf(tiles_per_head_, 1.0f)));
    const float heads = fmaxf(fminf(min_heads, max_heads), 1.0f);
    const uint32_t all = params_.num_kv_heads;
    const uint32_t groups = max(static_cast<uint32_t>(__fdividef(all, heads)), 1u);
    heads_per_group_ = (all + groups - 1) / groups;
    first_group_heads_ = all - (all - 1) / heads_per_group_ * heads_per_group_;
  }

  /// Tiles of this lane's sequence in each head. Not held in a register: the warp has few.
  __device__ __forceinline__ int32_t tiles_of_sequence() const {
    return (sequence_.len_q * params_.group + Shape::kRows - 1) / Shape::kRows;
  }
  /// They have the levels first_level_ + 1 to end_level(), in the order of their rows.
  __device__ __forceinline__ int32_t end_level() const { return first_level_ + tiles_of_sequence(); }
  /// The smallest `first_level_` of the sequences that have tiles.
  __device__ __forceinline__ int32_t lowest_level() const {
    return INT32_MAX - __reduce_max_sync(~0u, sequence_.len_q > 0 ? INT32_MAX - first_level_ : 0);
  }

  /// Locates tile `index` of a head. A level holds at most one tile of each sequence; under a causal mask those end at
  /// about the same number of keys. Levels descend, and sequences ascend within a level.
  __device__ __forceinline__ void locate_in_head(uint32_t index, int32_t head, int32_t packs_per_kv_head,
                                                 PrefillTile& to) const {
    int32_t level = __reduce_max_sync(~0u, end_level());
    uint32_t has_level = 0;
#pragma unroll 1
    for (;;) {
      // The same sequences have a tile at every level in (lower, level].
      has_level = __ballot_sync(~0u, first_level_ < level && level <= end_level());
      const int32_t below = end_level() < level ? end_level() : first_level_ < level ? first_level_ : 0;
      const int32_t lower = __reduce_max_sync(~0u, below);
      const uint32_t tiles = (level - lower) * __popc(has_level);
      if (index < tiles || lower == 0) break;
      index -= tiles;
      level = lower;
    }
    const uint32_t count = __popc(has_level), steps = index / count;
    level -= steps;
    // The lane whose sequence has this rank among those with the level writes the tile.
    const uint32_t lane = threadIdx.x % 32;
    const int32_t rank = __popc(has_level & ((1u << lane) - 1));
    if ((has_level >> lane & 1) != 0 && rank == static_cast<int32_t>(index - steps * count)) {
      write(level - 1 - first_level_, head, packs_per_kv_head, to);
    }
  }

  /// Writes tile `index` of this lane's sequence.
  __device__ __forceinline__ void write(int32_t index, int32_t head, int32_t packs_per_kv_head, PrefillTile& to) const {
    QoTile tile = sequence_;
    tile.first_row = index * Shape::kRows;
    tile.num_rows = min(Shape::kRows, tile.len_q * params_.group - tile.first_row);
    const KeyRange keys = visible_keys(params_, tile);
    to.work.tile = tile;
    to.work.keys = keys;
    to.work.kv_head = head;
    const Visibility visibility(params_, tile);
    to.shift = visibility.shift;
    to.visible_begin = visibility.begin(0);
    to.visible_end = visibility.end(tile.len_q - 1);
    to.first_block = keys.begin / Shape::kKeys;
    to.end_block = (keys.end + Shape::kKeys - 1) / Shape::kKeys;
  }

  const AttentionParams& params_;
  const bool is_causal_;
  int32_t num_seqs_;
  StartMaxima maxima_;  // of these sequences and those before
  int32_t first_;
  uint32_t before_;          // tiles of the sequences before first_
  uint32_t tiles_per_head_;  // of these sequences
  // Head groups have heads_per_group_ heads; only the first may have fewer, for the last one is to be long.
  uint32_t heads_per_group_;
  uint32_t first_group_heads_;
  QoTile sequence_;      // this lane's sequence, without queries if it is not selected; the fields of rows are unused
  int32_t first_level_;  // the sequence's levels start past this one
};

/// How CTAs begin: with a static tile each, or with the next tile of the counter.
struct InitialTiles {
  int32_t first;       // index of this CTA's static tile; negative: none
  int32_t num_static;  // the counter's value 0 is this tile index

  /// Each CTA begins with the tile of its own index.
  static __device__ __forceinline__ InitialTiles one_per_cta() {
    return InitialTiles{static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x)};
  }
  /// All tiles come from the counter.
  static __device__ __forceinline__ InitialTiles none() { return InitialTiles{-1, 0}; }
};

/// The scheduler warp: writes one work tile after another, then one without rows. The scheduler has begun.
template <typename Shape, typename LogitsTransform>
__device__ __forceinline__ void schedule_tiles(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                               const InitialTiles& initial, TileScheduler<Shape>& scheduler) {
  uint32_t index = initial.first;
  int32_t rows = 1;
#pragma unroll 1
  for (int32_t count = 0; rows > 0; ++count) {
    const PipelineState<2> state(count);
    pipeline.tile_empty(state).producer_wait();
    if (count > 0) pipeline.tile_wanted(count - 1).wait();
    if (count > 0 || initial.first < 0) {
      if (params.next_tile == nullptr) {
        index += initial.num_static;
      } else {
        uint32_t next = 0;
        if (threadIdx.x % 32 == 0) next = atomicAdd(reinterpret_cast<unsigned long long*>(params.next_tile), 1ull);
        index = initial.num_static + __shfl_sync(~0u, next, 0);
      }
    }
    PrefillTile& tile = pipeline.tile(state);
    scheduler.locate(index, params.packs_per_kv_head, tile);
    __syncwarp();
    rows = tile.work.tile.num_rows;
    if (threadIdx.x % 32 == 0) {
      const int32_t kv_head = tile.work.kv_head / params.packs_per_kv_head;
      tile.work.score_factor = rows > 0 ? LogitsTransform::factor(params.attention, kv_head) : 0.0f;
      tile.value_factor = rows > 0 ? params.attention.value_factor * scale_of(params.attention.v_scale, kv_head) : 0.0f;
      pipeline.tile_full(state).arrive();
    }
    __syncwarp();
    // clear_tile_counter may still run. Every CTA waits, so that this kernel is complete after that one.
    if (count == 0) ptx::wait_for_previous_kernel();
  }
}

/// The same with a scheduler that begins here.
template <typename Shape, typename LogitsTransform>
__device__ __forceinline__ void schedule_tiles(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                               const InitialTiles& initial) {
  TileScheduler<Shape> scheduler(params);
  scheduler.begin();
  schedule_tiles<Shape, LogitsTransform>(params, pipeline, initial, scheduler);
}

/// Whether cu_seqlens_q is non-decreasing. Run by one warp.
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
