// A CTA's share of a decode launch (work_partition.cuh), and the way through it, piece by piece.
#pragma once

#include <cstdint>

#include "output_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "sequence_work.cuh"
#include "split_kv.cuh"
#include "work_tile.cuh"

namespace xa {

/// Which share of a KV head's keys is the CTA's, of how many there are at most.
struct WorkRangeIndex {
  int32_t number;
  int32_t count;
};

/// What a share leaves to be told to the merging kernel when all else is done: the tile that its beginning cuts.
struct StartSplit {
  QoTile tile;
  int64_t tile_begin;
  int64_t rows_before;
  int32_t tile_chunks;  // 0 where it cuts none
  int32_t reserved;
};

/// The share and how far the CTA has come, in shared memory.
struct WorkRange {
  KvSplit kv_split;
  StartSplit start_split;
  int64_t end;          // past the share's last unit, in the order of all units
  int64_t tile_begin;   // the tile's first unit
  int64_t rows_before;  // batch_invariant: partial rows of the tiles before this one
  int32_t tile_chunks;
  int32_t first_chunk;  // of the sequence's keys, which is the tile's unit 0
  int32_t tiles_left;   // of the sequence, after this one
  int32_t split_begin;  // units of the tile
  int32_t split_end;
  int32_t work_tile;  // what is under way: the part, or one of its spans; -1 before the first one
  int32_t work_tile_end;
  int32_t partial_row;        // where row 0 of the result goes; -1 for out and lse
  int32_t merges;             // whether the part's pieces are folded before it goes anywhere
  int32_t first_tile_chunks;  // of a tile of the first sequence
  LiveRows live;
  int64_t warp_totals[2][12];  // of the search

  __device__ __forceinline__ bool is_last_work_tile() const { return work_tile_end == split_end; }
};

static_assert(sizeof(WorkRange) == 352, "what a CTA of a decode launch asks for beyond its WorkTile");

/// Partial rows of the part with which share `number` of `groups` begins, if that part does not begin its tile:
/// [groups - 1, kRows].
template <int kRows>
__device__ __forceinline__ int32_t first_partial_row(int32_t number) {
  return (number - 1) * kRows;
}

/// Those of the part with which it ends, if that part begins its tile: as many again.
template <int kRows>
__device__ __forceinline__ int32_t last_partial_row(int32_t num_ranges, int32_t number) {
  return (num_ranges - 1 + number) * kRows;
}

/// Makes tile `index` of a sequence the current one. Where starts descend, the caller sets WorkTile::maxima.
template <int kRows, int kKvChunkKeys>
__device__ __forceinline__ void enter(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                      const Sequence<kRows, kKvChunkKeys>& sequence, int32_t index) {
  work.tile = sequence.tile_at(index, params.group);
  range.tile_chunks = sequence.chunks;
  range.first_chunk = sequence.first_chunk;
  range.tiles_left = sequence.num_tiles - 1 - index;
}

/// Leads through a share. The work of the CTA's first warp; what it reads and writes is in shared memory.
template <int kRows, int kKvChunkKeys>
class WorkRangeIterator {
 public:
  __device__ __forceinline__ WorkRangeIterator(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               int32_t number)
      : params_(params), work_(work), range_(range), number_(number) {}

  /// To the next piece, if there is one; the WorkTile's tile has no rows otherwise.
  __device__ __forceinline__ void next() const {
    const bool is_new = range_.work_tile < 0, is_in_split = !is_new && range_.work_tile_end < range_.split_end;
    const int32_t begin = is_new ? range_.split_begin : (is_in_split ? range_.work_tile_end : range_.split_end);
    const bool is_in_range = range_.tile_begin + begin < range_.end && work_.tile.num_rows > 0;
    const bool is_in_tile = begin < range_.tile_chunks;
    __syncwarp();
    if (is_in_range && !is_in_tile) next_tile();
    if (ptx::opaque(threadIdx.x) != 0) return;
    if (!is_in_range) {
      work_.tile.num_rows = 0;
    } else if (is_in_split) {
      begin_work_tile(range_.kv_split, range_.work_tile + 1, begin);
    } else {
      const int64_t left = range_.end - range_.tile_begin;
      begin_split(range_.kv_split, is_in_tile ? begin : 0,
                  left < range_.tile_chunks ? static_cast<int32_t>(left) : range_.tile_chunks);
    }
  }

  /// To the current tile's units from `begin` to `end`.
  __device__ __forceinline__ void begin_split(const KvSplit& kv_split, int32_t begin, int32_t end) const {
    range_.split_begin = begin;
    range_.split_end = end;
    begin_work_tile(kv_split, 0, begin);
  }

 private:
  /// To the next tile, which there is.
  __device__ __forceinline__ void next_tile() const {
    const int32_t left = range_.tiles_left, sequence = work_.tile.sequence;
    __syncwarp();
    if (ptx::opaque(threadIdx.x) == 0) {
      const KvSplit& kv_split = range_.kv_split;
      if (kv_split.max_fixed_splits > 0) {
        range_.rows_before += kv_split.num_partials(range_.tile_begin, range_.tile_chunks) * work_.tile.num_rows;
      }
      range_.tile_begin += range_.tile_chunks;
      range_.tiles_left = left - 1;
      work_.tile.first_row -= kRows;
      work_.tile.num_rows = left > 0 ? kRows : 0;
    }
    __syncwarp();
    if (left > 0) return;
    const int32_t lane = ptx::opaque(threadIdx.x), num_seqs = live_sequences(params_);
    StartMaxima maxima = work_.maxima;
    const bool raises_starts = !starts_ascend(maxima);
    for (int32_t first = sequence + 1; first < num_seqs; first += 32) {
      Sequence<kRows, kKvChunkKeys> candidate[1];
      load_sequences(params_, min(first + lane, num_seqs), num_seqs, candidate, [&](auto& metadata) {
        if (__builtin_expect(raises_starts, false)) metadata.ascend(params_, maxima);
      });
      const uint32_t found = __ballot_sync(~0u, candidate[0].num_tiles > 0);
      if (found == 0) continue;
      if (lane == __ffs(found) - 1) {
        enter(params_, work_, range_, candidate[0], 0);
        if (raises_starts) work_.maxima = candidate[0].end;
      }
      break;
    }
    __syncwarp();
  }

  /// Piece number `piece` of the part, from unit `begin` of the tile on.
  __device__ __forceinline__ void begin_work_tile(const KvSplit& kv_split, int32_t work_tile, int32_t begin) const {
    const int32_t chunks = range_.tile_chunks, split_begin = range_.split_begin, split_end = range_.split_end;
    const int32_t shift = kv_split.max_fixed_splits > 0 ? kv_split.fixed_split_shift(chunks) : 0;
    const int32_t end = kv_split.max_fixed_splits > 0 ? min(begin + (1 << shift), split_end) : split_end;
    KeyRange keys = visible_keys(params_, work_.tile);
    if (begin > 0) keys.begin = max(keys.begin, (range_.first_chunk + begin) * kKvChunkKeys);
    if (end < chunks) keys.end = min(keys.end, (range_.first_chunk + end) * kKvChunkKeys);
    work_.keys = keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
    range_.work_tile = work_tile;
    range_.work_tile_end = end;
    range_.merges = split_begin == 0 && (work_tile > 0 || end < split_end);
    const bool is_whole = split_begin == 0 && split_end == chunks;
    range_.partial_row = is_whole ? -1 : partial_row(kv_split, begin >> shift);
  }

  /// Of a part that is not a whole tile; batch_invariant: of its span `span`.
  __device__ __forceinline__ int32_t partial_row(const KvSplit& kv_split, int32_t span) const {
    if (kv_split.max_fixed_splits == 0) {
      return range_.split_begin > 0 ? first_partial_row<kRows>(number_)
                                    : last_partial_row<kRows>(kv_split.num_ranges, number_);
    }
    int32_t part = 0;
    if (range_.split_begin > 0)
      part = 1 + span - kv_split.fixed_splits_before_boundary(range_.tile_begin, range_.tile_chunks);
    return static_cast<int32_t>(range_.rows_before) + part * work_.tile.num_rows;
  }

  const AttentionParams& params_;
  WorkTile& work_;
  WorkRange& range_;
  const int32_t number_;
};

/// Leads the CTA to its next piece, if there is one: plan.tile.num_rows is 0 otherwise. Every thread calls this.
template <int kRows, int kKvChunkKeys>
__device__ __forceinline__ void next_work_tile(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               int32_t number) {
  __syncthreads();
  if (ptx::opaque(threadIdx.x) < 32) WorkRangeIterator<kRows, kKvChunkKeys>(params, work, range, number).next();
  __syncthreads();
}

}  // namespace xa
