// The tile scheduler of the prefill kernel: which work tiles a CTA computes, and in what order. One warp of each CTA
// runs it on the device, because only the device knows the lengths, one tile ahead of the compute warps, but not before
// the K warp has loaded most of the tile before.
//
// Tile indices ascend over batches of 32 sequences (one per lane). Under a causal mask they ascend, in such a batch,
// over groups of heads or of sequences, and in a group over tiles in LPT order: those that end at the largest number of
// keys first; heads vary fastest. Groups are FlashAttention's L2 head swizzle. Without a causal mask tiles of a head
// follow each other, those with the last query rows first. A CTA's first tile has the CTA's index, each further one the
// next value of the counter `next_tile`, so that all CTAs finish at about the same time.
#pragma once

#include <cstdint>

#include "division.cuh"
#include "hopper/key_range_tile.cuh"
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
  /// `maxima` is in shared memory, because the warp has few registers.
  __device__ __forceinline__ TileScheduler(const HopperPrefillParams& params, StartMaxima& maxima)
      : params_(params.attention), heads_(params.packs), is_causal_(params.is_causal != 0), maxima_(maxima) {}

  /// Reads the metadata of the first sequences.
  __device__ __forceinline__ void begin() {
    num_seqs_ = kWaitsForMetadataOnce ? given_sequences(params_) : live_sequences(params_);
    write_maxima(kStartsAscend);
    before_ = 0;
    load_sequences(0);
  }

  /// Writes tile `index` to `to`; past the last tile, one with num_rows = kNoRows. The CTAs of a cluster have the
  /// same index and adjacent rows.
  __device__ __forceinline__ void locate(uint32_t index, PrefillTile& to) {
    while (index - before_ >= num_tiles() && first_ + 32 < num_seqs_) {
      before_ += num_tiles();
      load_sequences(first_ + 32);
    }
    index -= before_;
    if (index >= num_tiles()) {
      if (threadIdx.x % 32 == 0) to.work.tile.num_rows = Shape::kNoRows;
      return;
    }
    if (kKeepsSequencesTogether && !is_causal_) {
      locate_in_sequences(index, to);
    } else {
      locate_in_groups(index, to);
    }
  }

 private:
  /// Whether a sequence's heads follow each other, because rows of K, V and O of adjacent heads are adjacent in DRAM: 1
  /// to 3 % faster. At smaller D it gains nothing, and the load warps have too few registers for it.
  static constexpr bool kKeepsSequencesTogether = Shape::kHeadDim >= 128;
  /// Whether the number of sequences is loaded together with their metadata; beside key ranges that takes a register
  /// too many.
  static constexpr bool kWaitsForMetadataOnce = !Shape::kTakesKeyRanges;

  /// Tiles of these sequences. 32 bits hold their numbers: every tile has rows of q of its own, so that 2^31 tiles
  /// would take 256 GB.
  __device__ __forceinline__ uint32_t num_tiles() const { return tiles_per_head_ * params_.num_kv_heads; }
  /// Loads the metadata of sequences [first, first + 32), one per lane.
  __device__ __forceinline__ void load_sequences(int32_t first) {
    const int32_t b = first + static_cast<int32_t>(threadIdx.x % 32);
    first_ = first;
    Metadata<1> metadata;
    metadata.load(params_, b);
    if constexpr (kWaitsForMetadataOnce) num_seqs_ = metadata.live_sequences(params_, num_seqs_);
    // Starts that ascend so far are at least as large as all starts before them, so their running maximum is not
    // needed.
    const bool ascend = __all_sync(~0u, b >= num_seqs_ || metadata.ascends(params_, 0)) != 0;
    StartMaxima maxima = maxima_;
    if (__builtin_expect(!ascend || !starts_ascend(maxima), false)) {
      metadata.ascend(params_, maxima);
      __syncwarp();
      write_maxima(maxima);
    }
    sequence_ = metadata.sequence(params_, 0, b);
    const bool is_selected =
        b < num_seqs_ && sequence_.len_q >= params_.min_queries && sequence_.len_q <= params_.max_queries;
    if (!is_selected) sequence_.len_q = 0;
    first_level_ = 0;
    if (is_causal_ && is_selected) {
      const int32_t shift = Visibility::shift_of(params_, sequence_);
      first_level_ = divide(clamp(shift, 0, sequence_.len_k), params_.tile_queries);
    }
    tiles_per_head_ = __reduce_add_sync(~0u, tiles_of_sequence());
    if (is_causal_) {
      choose_groups(is_selected);
    } else if constexpr (!kKeepsSequencesTogether) {
      has_seq_groups_ = false;
      group_size_ = first_group_size_ = 1;
    } else {
      first_level_ = sum_up_to_this_lane(tiles_of_sequence()) - tiles_of_sequence();
    }
  }
  __device__ __forceinline__ void write_maxima(StartMaxima maxima) {
    if (threadIdx.x % 32 == 0) maxima_ = maxima;
    __syncwarp();
  }
  /// Chooses the groups of these sequences. A group is large enough that its longest tiles fill kWaves waves of CTAs,
  /// which keeps the tail short, but no larger than leaves kSharing CTAs at work on the same keys at the same time,
  /// which keeps those in L2: tiles of the same level, one per sequence and head, run together. Both constants are
  /// measured (docs/dev/lab_notebook.md). Sequences of the same lengths are grouped by sequences if a group has all
  /// heads of one.
  __device__ __forceinline__ void choose_groups(bool is_selected) {
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
    const uint32_t all_heads = params_.num_kv_heads, all_seqs = min(num_seqs_ - first_, 32);
    const float seqs = __fdividef(heads * all_seqs, all_heads);
    has_seq_groups_ = false;
    if constexpr (kKeepsSequencesTogether) has_seq_groups_ = have_equal_lengths(all_seqs, is_selected) && seqs >= 1.0f;
    const uint32_t all = has_seq_groups_ ? all_seqs : all_heads;
    const uint32_t groups = max(static_cast<uint32_t>(__fdividef(all, has_seq_groups_ ? seqs : heads)), 1u);
    group_size_ = divide_mostly_small(all + groups - 1, groups);
    first_group_size_ = all - divide_mostly_small(all - 1, group_size_) * group_size_;
  }

  /// Whether the first `count` lanes have selected sequences of the same lengths.
  __device__ __forceinline__ bool have_equal_lengths(uint32_t count, bool is_selected) const {
    const int32_t len_q = __shfl_sync(~0u, sequence_.len_q, 0), len_k = __shfl_sync(~0u, sequence_.len_k, 0);
    const bool is_equal = is_selected && sequence_.len_q == len_q && sequence_.len_k == len_k;
    return __all_sync(~0u, threadIdx.x % 32 >= count || is_equal) != 0;
  }

  /// Tiles of this lane's sequence in each head. Not held in a register: the warp has few.
  __device__ __forceinline__ int32_t tiles_of_sequence() const {
    return divide(sequence_.len_q + params_.tile_queries.divisor - 1, params_.tile_queries);
  }
  /// They have the levels first_level_ + 1 to end_level(), in the order of their rows.
  __device__ __forceinline__ int32_t end_level() const { return first_level_ + tiles_of_sequence(); }
  /// The smallest `first_level_` of the sequences that have tiles.
  __device__ __forceinline__ int32_t lowest_level() const {
    return INT32_MAX - __reduce_max_sync(~0u, sequence_.len_q > 0 ? INT32_MAX - first_level_ : 0);
  }

  /// Locates tile `index` in the groups.
  __device__ __forceinline__ void locate_in_groups(uint32_t index, PrefillTile& to) const {
    const uint32_t heads = params_.num_kv_heads;
    // Tiles of a head, or of a sequence, of which all have as many as the first one.
    const uint32_t tiles = has_seq_groups_ ? heads * __shfl_sync(~0u, tiles_of_sequence(), 0) : tiles_per_head_;
    const uint32_t missing = group_size_ - first_group_size_;
    const uint32_t group = divide_mostly_small(index + missing * tiles, group_size_ * tiles);
    const uint32_t first = group == 0 ? 0 : group * group_size_ - missing;
    const uint32_t size = group == 0 ? first_group_size_ : group_size_;
    const uint32_t in_group = index - first * tiles;
    if (has_seq_groups_) {
      const uint32_t steps = divide_mostly_small(in_group, size * heads), in_level = in_group - steps * size * heads;
      const uint32_t seq = divide(in_level, heads_);
      if (threadIdx.x % 32 == first + seq) {
        to.work.kv_head = in_level - seq * heads;
        write(tiles_of_sequence() - 1 - steps, to);
      }
    } else {
      const uint32_t in_head = divide_mostly_small(in_group, size);
      // Written by all lanes at once: no register holds it while the tile is located.
      to.work.kv_head = first + in_group - in_head * size;
      locate_in_head(in_head, to);
    }
  }
  /// Locates tile `index` without a causal mask: one sequence after the other, and in it one head after the other.
  __device__ __forceinline__ void locate_in_sequences(uint32_t index, PrefillTile& to) const {
    const uint32_t tiles = tiles_of_sequence(), in_sequence = index - first_level_ * params_.num_kv_heads;
    if (in_sequence >= tiles * params_.num_kv_heads) return;
    const uint32_t head = divide_mostly_small(in_sequence, tiles);
    to.work.kv_head = head;
    write(tiles - 1 - (in_sequence - head * tiles), to);
  }

  /// Locates tile `index` of a head. A level holds at most one tile of each sequence; under a causal mask those end at
  /// about the same number of keys. Levels descend, and sequences ascend within a level.
  __device__ __forceinline__ void locate_in_head(uint32_t index, PrefillTile& to) const {
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
    const uint32_t count = __popc(has_level), steps = divide_mostly_small(index, count);
    level -= steps;
    // The lane whose sequence has this rank among those with the level writes the tile.
    const uint32_t rank = __popc(has_level & ptx::lower_lanes());
    if ((has_level & ptx::this_lane()) != 0 && rank == index - steps * count) {
      write(level - 1 - first_level_, to);
    }
  }

  /// Writes tile `index` of this lane's sequence, but for its KV head.
  __device__ __forceinline__ void write(int32_t index, PrefillTile& to) const {
    int32_t first_query = index * params_.tile_queries.divisor;
    int32_t queries = min(params_.tile_queries.divisor, sequence_.len_q - first_query);
    const Visibility visibility(params_, sequence_);
    to.visible_begin = visibility.begin(0);
    to.visible_end = visibility.end(sequence_.len_q - 1);
    const KeyRange keys = visible_keys(visibility, first_query, first_query + queries - 1);
    to.work.keys = keys;
    to.first_block = keys.begin / Shape::kKeys;
    to.end_block = (keys.end + Shape::kKeys - 1) / Shape::kKeys;
    if constexpr (Shape::kClusterSize > 1) {
      const int32_t own = params_.tile_queries.divisor / Shape::kClusterSize, skipped = blockIdx.y * own;
      first_query += skipped;
      queries = clamp(queries - skipped, 0, own);
    }
    if constexpr (Shape::kHasBias) static_cast<BiasTile&>(to).first_query = first_query;
    to.shift = visibility.shift + first_query;
    to.work.tile = sequence_;
    to.work.tile.first_token += first_query;
    to.work.tile.first_row = 0;
    to.work.tile.num_rows = queries * params_.group;
  }

  const AttentionParams& params_;
  const IndexDivisor& heads_;  // of all packs
  const bool is_causal_;
  StartMaxima& maxima_;  // of these sequences and those before
  int32_t num_seqs_;
  int32_t first_;
  uint32_t before_;          // tiles of the sequences before first_
  uint32_t tiles_per_head_;  // of these sequences
  // Groups have group_size_ heads, or sequences with all of their heads; only the first may have fewer, for the last
  // one is to be long.
  bool has_seq_groups_;
  uint32_t group_size_;
  uint32_t first_group_size_;
  QoTile sequence_;  // this lane's sequence, without queries if it is not selected; the fields of rows are unused
  // The sequence's levels start past this one. In locate_in_sequences: tiles of a head of the sequences before it.
  int32_t first_level_;
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

/// Sets the blocks of each warpgroup of a tile. Run by the scheduler warp, one lane per warpgroup.
template <typename Shape>
__device__ __forceinline__ void set_warpgroup_blocks(const HopperPrefillParams& params, WarpgroupTile& tile) {
  const int32_t warpgroup = threadIdx.x % 32, num_rows = tile.work.tile.num_rows;
  if (64 * warpgroup >= min(num_rows, Shape::kRows)) return;
  const Visibility visibility(params.attention, tile.work.tile, tile.shift);
  const int32_t begin = visibility.begin(query_of_row(params, 64 * warpgroup));
  const int32_t end = visibility.end(query_of_row(params, min(64 * warpgroup + 63, num_rows - 1)));
  tile.warpgroup_first_block[warpgroup] = begin < end ? begin / Shape::kKeys : tile.first_block;
  tile.warpgroup_end_block[warpgroup] = begin < end ? (end + Shape::kKeys - 1) / Shape::kKeys : tile.first_block;
}

/// The cluster's tile index number `count`: the next value of the tile counter, which its first CTA takes for both.
template <typename Shape>
__device__ __forceinline__ uint32_t next_tile_index(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                                    int32_t count) {
  if (blockIdx.y != 0) return pipeline.receive_tile_index(count);
  uint32_t next = 0;
  if (threadIdx.x % 32 == 0) next = atomicAdd(reinterpret_cast<unsigned long long*>(params.next_tile), 1ull);
  next = __shfl_sync(~0u, next, 0);
  pipeline.send_tile_index(next, count);
  return next;
}

/// The scheduler warp: writes one work tile after another, then one without rows. The scheduler has begun.
template <typename Shape, typename LogitsTransform>
__device__ __forceinline__ void schedule_tiles(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                               const InitialTiles& initial, TileScheduler<Shape>& scheduler) {
  uint32_t index = initial.first;
  // Held in a register, it would be spilled past D 128; read anew, something else would be at D 64.
  const auto num_static = [&] {
    if constexpr (Shape::kHeadDim > 128) return initial.first < 0 ? 0 : ptx::num_ctas();
    return initial.num_static;
  };
  constexpr int32_t kNoRows = Shape::kNoRows;
  int32_t rows = 1;
#pragma unroll 1
  for (int32_t count = 0; rows > kNoRows; ++count) {
    const PipelineState<2> state(count);
    pipeline.tile_empty(state).producer_wait();
    if (count > 0) pipeline.tile_wanted(count - 1).wait();
    if (count > 0 || initial.first < 0) {
      if (params.next_tile == nullptr) {
        index += num_static();
      } else if constexpr (Shape::kClusterSize > 1) {
        index = num_static() + next_tile_index(params, pipeline, count - 1);
      } else {
        uint32_t next = 0;
        if (threadIdx.x % 32 == 0) next = atomicAdd(reinterpret_cast<unsigned long long*>(params.next_tile), 1ull);
        index = num_static() + __shfl_sync(~0u, next, 0);
      }
    }
    typename Shape::Tile& tile = pipeline.tile(state);
    scheduler.locate(index, tile);
    __syncwarp();
    if constexpr (Shape::kTakesKeyRanges) {
      if (tile.work.tile.num_rows > kNoRows) narrow_to_key_ranges<Shape>(params, tile);
    }
    rows = tile.work.tile.num_rows;
    if constexpr (Shape::kHasWarpgroupBlocks) {
      set_warpgroup_blocks<Shape>(params, tile);
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) {
      const int32_t kv_head = divide(tile.work.kv_head, params.packs_per_kv_head);
      tile.work.score_factor = rows > kNoRows ? LogitsTransform::factor(params.attention, kv_head) : 0.0f;
      tile.value_factor =
          rows > kNoRows ? params.attention.value_factor * scale_of(params.attention.v_scale, kv_head) : 0.0f;
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
  TileScheduler<Shape> scheduler(params, pipeline.tile(PipelineState<2>(0)).work.maxima);
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
