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
  int64_t end;          // the boundary past the range's last chunk, before it moves
  int64_t tile_begin;   // the current tile's first chunk
  int64_t rows_before;  // batch_invariant: partial rows of the tiles before this one
  int32_t tile_chunks;
  int32_t first_chunk;  // chunk of the sequence's keys that is the tile's chunk 0
  int32_t tiles_left;   // of the sequence, after the current one
  int32_t split_begin;  // the range's chunks of the tile, counted from the tile's first
  int32_t split_end;
  int32_t fixed_split_chunks;  // batch_invariant: of each fixed-size split of the tile, a power of two; else 0
  int32_t fixed_split_begin;   // batch_invariant: the range's first chunk that has not been computed (fixed_splits.cuh)
  int32_t partial_row;         // in the workspace, for row 0 of the result; -1: the result goes to out and lse
  int32_t first_tile_chunks;   // of tile 0 of the first sequence
  int32_t has_warp_tiles;      // whether warps compute tiles alone (warp_tiles.cuh); the CTA then has no work tiles
  LiveRows live;
  int64_t warp_totals[2][12];  // scratch of the prefix sums

  /// Whether the range has chunks of the current tile. Of the tile with its first boundary it has none if that moves to
  /// the tile's end.
  __device__ __forceinline__ bool has_split() const { return split_begin < split_end; }
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

/// The chunks of a tile.
struct TileChunks {
  int32_t first;  // chunk of the sequence's keys that is the tile's chunk 0
  int32_t count;
};

/// The visible keys of a tile in its chunks `begin` to `end`.
template <int kKvChunkKeys>
__device__ __forceinline__ KeyRange keys_of_chunks(const AttentionParams& params, const QoTile& tile,
                                                   const TileChunks& chunks, int32_t begin, int32_t end) {
  KeyRange keys = visible_keys(params, tile);
  if (begin > 0) keys.begin = max(keys.begin, (chunks.first + begin) * kKvChunkKeys);
  if (end < chunks.count) keys.end = min(keys.end, (chunks.first + end) * kKvChunkKeys);
  return keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
}

/// Advances a CTA through its work range. Only one warp of the CTA calls it; the state is in shared memory.
template <typename Unit>
class WorkRangeIterator {
 public:
  __device__ __forceinline__ WorkRangeIterator(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               int32_t range_index)
      : params_(params), work_(work), range_(range), range_index_(range_index) {}

  /// Makes `tile`, which is tile `index` of a sequence, the current one. If starts descend, the caller sets
  /// WorkTile::maxima.
  __device__ __forceinline__ void enter(const SequenceWork<Unit>& sequence, const QoTile& tile, int32_t index,
                                        const TileChunks& chunks) const {
    work_.tile = tile;
    range_.tile_chunks = chunks.count;
    range_.first_chunk = chunks.first;
    range_.tiles_left = sequence.num_tiles - 1 - index;
  }

  /// Starts the split of `tile`, the current one, that begins at its chunk `begin` and ends with the tile or before the
  /// range's end, which is `left` chunks after the tile's first. Without chunks it is not started.
  template <typename Index>
  __device__ __forceinline__ void begin_split(const KvSplit& kv_split, const QoTile& tile, const TileChunks& chunks,
                                              int32_t begin, Index left) const {
    int32_t end = chunks.count;
    if (left < end) end = kv_split.move_boundary(static_cast<int32_t>(left), chunks.count);
    range_.split_begin = begin;
    range_.split_end = end;
    if (begin >= end) return;
    const int32_t shift = kv_split.max_fixed_splits > 0 ? kv_split.fixed_split_shift(chunks.count) : 0;
    work_.keys = keys_of_chunks<Unit::kKvChunkKeys>(params_, tile, chunks, begin, end);
    range_.fixed_split_begin = begin;
    range_.fixed_split_chunks = kv_split.max_fixed_splits > 0 ? 1 << shift : 0;
    range_.partial_row = begin == 0 && end == chunks.count ? -1 : partial_row(kv_split, tile, begin, begin >> shift);
  }

  /// Advances to the next work tile, in lane `lane` of the warp. At the end of the range, WorkTile::tile has no rows.
  __device__ __forceinline__ void next(int32_t lane) const {
    // A range goes on in another tile only where it reaches the end of this one.
    const int32_t reached = max(range_.split_begin, range_.split_end);
    const bool goes_on = work_.tile.num_rows > 0 && reached == range_.tile_chunks && range_.kv_split.is_aligned == 0 &&
                         range_.tile_begin + range_.tile_chunks < range_.end;
    __syncwarp();
    if (goes_on) next_tile(lane);
    if (ptx::opaque(lane) != 0) return;
    if (goes_on) {
      const TileChunks chunks = {range_.first_chunk, range_.tile_chunks};
      begin_split(range_.kv_split, work_.tile, chunks, 0, range_.end - range_.tile_begin);
    }
    if (!goes_on || range_.split_end == 0) work_.tile.num_rows = 0;
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
    const int32_t lane = ptx::opaque(this_lane);
    int32_t num_seqs = live_sequences(params_);
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
        enter(candidate[0], 0);
        if (raises_starts) work_.maxima = candidate[0].end;
      }
      break;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void enter(const SequenceWork<Unit>& sequence, int32_t index) const {
    enter(sequence, sequence.tile_at(params_, index), index,
          TileChunks{sequence.first_chunk_of(params_, index), sequence.chunks_of(params_, index)});
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
    enter(sequence, sequence.num_tiles - left);
  }

  /// The partial row of row 0 of a split of the current tile that is not all of it, begins at its chunk `begin` and,
  /// with batch_invariant, with fixed-size split `split`.
  __device__ __forceinline__ int32_t partial_row(const KvSplit& kv_split, const QoTile& tile, int32_t begin,
                                                 int32_t split) const {
    if (kv_split.max_fixed_splits == 0) {
      return begin > 0 ? start_partial_row<Unit::kRows>(range_index_)
                       : end_partial_row<Unit::kRows>(kv_split.num_ranges, range_index_);
    }
    int32_t partial = 0;
    if (begin > 0) partial = 1 + split - kv_split.fixed_splits_before_boundary(range_.tile_begin, range_.tile_chunks);
    return static_cast<int32_t>(range_.rows_before) + partial * tile.num_rows;
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
