// A CTA's work range of a decode launch (work_partition.cuh), and the iteration over its work tiles.
//
// A work tile is what the CTA computes at a time: a whole tile or a split of a tile. With batch_invariant the latter is
// one or more whole fixed-size splits.
#pragma once

#include <cstdint>

#include "output_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "sequence_work.cuh"
#include "split_kv.cuh"
#include "work_tile.cuh"

namespace xa {

/// Which work range of its KV head is the CTA's, and how many there are at most.
struct WorkRangeIndex {
  int32_t index;
  int32_t count;
};

/// The split tile inside of which a work range starts. The CTA keeps this until its range is done, then writes the
/// SplitRecord for the combine kernel.
struct StartSplit {
  QoTile tile;
  int64_t tile_begin;
  int64_t rows_before;
  int32_t tile_chunks;  // 0 if the range starts at a tile's end
  int32_t reserved;
};

/// A CTA's work range and its progress in it, in shared memory. Chunks are numbered over all tiles of a KV head.
struct WorkRange {
  KvSplit kv_split;
  StartSplit start_split;
  int64_t end;          // past the range's last chunk
  int64_t tile_begin;   // the current tile's first chunk
  int64_t rows_before;  // batch_invariant: partial rows of the tiles before this one
  int32_t tile_chunks;
  int32_t first_chunk;  // chunk of the sequence's keys that is the tile's chunk 0
  int32_t tiles_left;   // of the sequence, after the current one
  int32_t split_begin;  // the range's chunks of the tile, counted from the tile's first
  int32_t split_end;
  int32_t has_begun;           // 0 before the first work tile
  int32_t fixed_split_chunks;  // batch_invariant: of each fixed-size split of the tile, a power of two; else 0
  int32_t fixed_split_begin;   // batch_invariant: the range's first chunk that has not been computed (fixed_splits.cuh)
  int32_t partial_row;         // in the workspace, for row 0 of the result; -1: the result goes to out and lse
  int32_t first_tile_chunks;   // of tile 0 of the first sequence
  LiveRows live;
  int64_t warp_totals[2][12];  // scratch of the prefix sums
};

static_assert(sizeof(WorkRange) == 352, "shared_bytes in variants.toml include it");

// A work range has at most two partials: of the split with which it starts, if that does not begin its tile, and of the
// split with which it ends, if that begins its tile but does not end it. The workspace has two arrays of them:
//
//     starts [num_ranges - 1, kRows], of ranges 1, 2, ...     ends [num_ranges - 1, kRows], of ranges 0, 1, ...

/// The first partial row of the split with which work range `range_index` starts.
template <int kRows>
__device__ __forceinline__ int32_t start_partial_row(int32_t range_index) {
  return (range_index - 1) * kRows;
}

/// The first partial row of the split with which work range `range_index` ends.
template <int kRows>
__device__ __forceinline__ int32_t end_partial_row(int32_t num_ranges, int32_t range_index) {
  return (num_ranges - 1 + range_index) * kRows;
}

/// Makes tile `index` of a sequence the current one. If starts descend, the caller sets WorkTile::maxima.
template <typename Unit>
__device__ __forceinline__ void enter(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                      const SequenceWork<Unit>& sequence, int32_t index) {
  work.tile = sequence.tile_at(params, index);
  range.tile_chunks = sequence.chunks_of(params, index);
  range.first_chunk = sequence.first_chunk_of(params, index);
  range.tiles_left = sequence.num_tiles - 1 - index;
}

/// The visible keys of a tile in its chunks `begin` to `end`; `range` is that of the tile.
template <int kKvChunkKeys>
__device__ __forceinline__ KeyRange keys_of_chunks(const AttentionParams& params, const QoTile& tile,
                                                   const WorkRange& range, int32_t begin, int32_t end) {
  KeyRange keys = visible_keys(params, tile);
  if (begin > 0) keys.begin = max(keys.begin, (range.first_chunk + begin) * kKvChunkKeys);
  if (end < range.tile_chunks) keys.end = min(keys.end, (range.first_chunk + end) * kKvChunkKeys);
  return keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
}

/// Advances a CTA through its work range. Only one warp of the CTA calls it; the state is in shared memory.
template <typename Unit>
class WorkRangeIterator {
 public:
  __device__ __forceinline__ WorkRangeIterator(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               int32_t range_index)
      : params_(params), work_(work), range_(range), range_index_(range_index) {}

  /// Advances to the next work tile, in lane `lane` of the warp. At the end of the range, WorkTile::tile has no rows.
  __device__ __forceinline__ void next(int32_t lane) const {
    const int32_t begin = range_.has_begun != 0 ? range_.split_end : range_.split_begin;
    const bool is_in_range = range_.tile_begin + begin < range_.end && work_.tile.num_rows > 0;
    const bool is_in_tile = begin < range_.tile_chunks;
    __syncwarp();
    if (is_in_range && !is_in_tile) next_tile(lane);
    if (ptx::opaque(lane) != 0) return;
    if (!is_in_range) {
      work_.tile.num_rows = 0;
    } else {
      const int64_t left = range_.end - range_.tile_begin;
      begin_split(range_.kv_split, is_in_tile ? begin : 0,
                  left < range_.tile_chunks ? static_cast<int32_t>(left) : range_.tile_chunks);
    }
  }

  /// Starts the split of chunks `begin` to `end` of the current tile.
  __device__ __forceinline__ void begin_split(const KvSplit& kv_split, int32_t begin, int32_t end) const {
    const int32_t chunks = range_.tile_chunks;
    const int32_t shift = kv_split.max_fixed_splits > 0 ? kv_split.fixed_split_shift(chunks) : 0;
    work_.keys = keys_of_chunks<Unit::kKvChunkKeys>(params_, work_.tile, range_, begin, end);
    range_.split_begin = begin;
    range_.split_end = end;
    range_.has_begun = 1;
    range_.fixed_split_begin = begin;
    range_.fixed_split_chunks = kv_split.max_fixed_splits > 0 ? 1 << shift : 0;
    range_.partial_row = begin == 0 && end == chunks ? -1 : partial_row(kv_split, begin >> shift);
  }

 private:
  /// Advances to the next tile, which exists because the range does not end before it.
  __device__ __forceinline__ void next_tile(int32_t this_lane) const {
    const int32_t left = range_.tiles_left, sequence = work_.tile.sequence;
    __syncwarp();
    if (ptx::opaque(this_lane) == 0) {
      const KvSplit& kv_split = range_.kv_split;
      if (kv_split.max_fixed_splits > 0) {
        range_.rows_before += kv_split.num_partials(range_.tile_begin, range_.tile_chunks) * work_.tile.num_rows;
      }
      range_.tile_begin += range_.tile_chunks;
      if constexpr (Unit::kIsFolded) {
        enter_next_tile(left);
      } else {
        range_.tiles_left = left - 1;
        work_.tile.first_row -= Unit::rows(params_);
        work_.tile.num_rows = left > 0 ? Unit::rows(params_) : 0;
      }
    }
    __syncwarp();
    if (left > 0) return;
    const int32_t lane = ptx::opaque(this_lane), num_seqs = live_sequences(params_);
    StartMaxima maxima = work_.maxima;
    const bool raises_starts = !starts_ascend(maxima);
    for (int32_t first = sequence + 1; first < num_seqs; first += 32) {
      SequenceWork<Unit> candidate[1];
      load_sequences(params_, min(first + lane, num_seqs), num_seqs, candidate, [&](auto& metadata) {
        if (__builtin_expect(raises_starts, false)) metadata.ascend(params_, maxima);
      });
      const uint32_t with_tiles = __ballot_sync(~0u, candidate[0].num_tiles > 0);
      if (with_tiles == 0) continue;
      if (lane == __ffs(with_tiles) - 1) {
        enter(params_, work_, range_, candidate[0], 0);
        if (raises_starts) work_.maxima = candidate[0].end;
      }
      break;
    }
    __syncwarp();
  }

  /// Enters the next one of the sequence's last `left` tiles; without any, there is no tile.
  __device__ __forceinline__ void enter_next_tile(int32_t left) const {
    if (left == 0) {
      work_.tile.num_rows = 0;
      return;
    }
    SequenceWork<Unit> sequence;
    sequence.tile = work_.tile;
    sequence.measure(params_, true);
    enter(params_, work_, range_, sequence, sequence.num_tiles - left);
  }

  /// The partial row of row 0 of a split that is not a whole tile and starts, with batch_invariant, with fixed-size
  /// split `split`.
  __device__ __forceinline__ int32_t partial_row(const KvSplit& kv_split, int32_t split) const {
    if (kv_split.max_fixed_splits == 0) {
      return range_.split_begin > 0 ? start_partial_row<Unit::kRows>(range_index_)
                                    : end_partial_row<Unit::kRows>(kv_split.num_ranges, range_index_);
    }
    int32_t partial = 0;
    if (range_.split_begin > 0)
      partial = 1 + split - kv_split.fixed_splits_before_boundary(range_.tile_begin, range_.tile_chunks);
    return static_cast<int32_t>(range_.rows_before) + partial * work_.tile.num_rows;
  }

  const AttentionParams& params_;
  WorkTile& work_;
  WorkRange& range_;
  const int32_t range_index_;
};

/// Advances the CTA to its next work tile; at the end of its range work.tile.num_rows is 0. Every thread calls this.
template <typename Unit>
__device__ __forceinline__ void next_work_tile(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               int32_t range_index) {
  __syncthreads();
  if (ptx::opaque(threadIdx.x) < 32) WorkRangeIterator<Unit>(params, work, range, range_index).next(threadIdx.x);
  __syncthreads();
}

}  // namespace xa
