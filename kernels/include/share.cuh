// A CTA's share of a decode launch (work_list.cuh), and the way through it, piece by piece.
#pragma once

#include <cstdint>

#include "cutting.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "sequence_work.cuh"
#include "tile_plan.cuh"

namespace xa {

/// Which share of a KV head's keys is the CTA's, of how many there are at most.
struct ShareNumber {
  int32_t number;
  int32_t count;
};

/// What a share leaves to be told to the merging kernel when all else is done: the tile that its beginning cuts.
struct CutBeginning {
  Tile tile;
  int64_t tile_begin;
  int64_t rows_before;
  int32_t tile_units;  // 0 where it cuts none
  int32_t reserved;
};

/// The share and how far the CTA has come, in shared memory.
struct Share {
  Cutting cutting;
  CutBeginning beginning;
  int64_t end;          // past the share's last unit, in the order of all units
  int64_t tile_begin;   // the tile's first unit
  int64_t rows_before;  // batch_invariant: partial rows of the tiles before this one
  int32_t tile_units;
  int32_t first_unit;  // of the sequence's keys, which is the tile's unit 0
  int32_t tiles_left;  // of the sequence, after this one
  int32_t part_begin;  // units of the tile
  int32_t part_end;
  int32_t piece;  // what is under way: the part, or one of its spans; -1 before the first one
  int32_t piece_end;
  int32_t partial_row;  // where row 0 of the result goes; -1 for out and lse
  int32_t folds;        // whether the part's pieces are folded before it goes anywhere
  int32_t first_units;  // of a tile of the first sequence
  OwnedRows owned;
  int64_t warp_totals[2][12];  // of the search

  __device__ __forceinline__ bool is_last_piece() const { return piece_end == part_end; }
};

static_assert(sizeof(Share) == 352, "what a CTA of a decode launch asks for beyond its Plan");

/// Partial rows of the part with which share `number` of `groups` begins, if that part does not begin its tile:
/// [groups - 1, kRows].
template <int kRows>
__device__ __forceinline__ int32_t first_part_row(int32_t number) {
  return (number - 1) * kRows;
}

/// Those of the part with which it ends, if that part begins its tile: as many again.
template <int kRows>
__device__ __forceinline__ int32_t last_part_row(int32_t groups, int32_t number) {
  return (groups - 1 + number) * kRows;
}

/// Makes tile `index` of a sequence the current one. Where starts descend, the caller sets Plan::maxima.
template <int kRows, int kUnitKeys>
__device__ __forceinline__ void enter(const AttentionParams& params, Plan& plan, Share& share,
                                      const Sequence<kRows, kUnitKeys>& sequence, int32_t index) {
  plan.tile = sequence.tile_at(index, params.group);
  share.tile_units = sequence.units;
  share.first_unit = sequence.first_unit;
  share.tiles_left = sequence.num_tiles - 1 - index;
}

/// Leads through a share. The work of the CTA's first warp; what it reads and writes is in shared memory.
template <int kRows, int kUnitKeys>
class ShareWalk {
 public:
  __device__ __forceinline__ ShareWalk(const AttentionParams& params, Plan& plan, Share& share, int32_t number)
      : params_(params), plan_(plan), share_(share), number_(number) {}

  /// To the next piece, if there is one; the Plan's tile has no rows otherwise.
  __device__ __forceinline__ void next() const {
    const bool is_new = share_.piece < 0, is_in_part = !is_new && share_.piece_end < share_.part_end;
    const int32_t begin = is_new ? share_.part_begin : (is_in_part ? share_.piece_end : share_.part_end);
    const bool is_in_share = share_.tile_begin + begin < share_.end && plan_.tile.num_rows > 0;
    const bool is_in_tile = begin < share_.tile_units;
    __syncwarp();
    if (is_in_share && !is_in_tile) next_tile();
    if (ptx::opaque(threadIdx.x) != 0) return;
    if (!is_in_share) {
      plan_.tile.num_rows = 0;
    } else if (is_in_part) {
      begin_piece(share_.cutting, share_.piece + 1, begin);
    } else {
      const int64_t left = share_.end - share_.tile_begin;
      begin_part(share_.cutting, is_in_tile ? begin : 0,
                 left < share_.tile_units ? static_cast<int32_t>(left) : share_.tile_units);
    }
  }

  /// To the current tile's units from `begin` to `end`.
  __device__ __forceinline__ void begin_part(const Cutting& cutting, int32_t begin, int32_t end) const {
    share_.part_begin = begin;
    share_.part_end = end;
    begin_piece(cutting, 0, begin);
  }

 private:
  /// To the next tile, which there is.
  __device__ __forceinline__ void next_tile() const {
    const int32_t left = share_.tiles_left, sequence = plan_.tile.sequence;
    __syncwarp();
    if (ptx::opaque(threadIdx.x) == 0) {
      const Cutting& cutting = share_.cutting;
      if (cutting.max_spans > 0) {
        share_.rows_before += cutting.parts_of_spans(share_.tile_begin, share_.tile_units) * plan_.tile.num_rows;
      }
      share_.tile_begin += share_.tile_units;
      share_.tiles_left = left - 1;
      plan_.tile.first_row -= kRows;
      plan_.tile.num_rows = left > 0 ? kRows : 0;
    }
    __syncwarp();
    if (left > 0) return;
    const int32_t lane = ptx::opaque(threadIdx.x), num_seqs = live_sequences(params_);
    StartMaxima maxima = plan_.maxima;
    const bool raises_starts = !starts_ascend(maxima);
    for (int32_t first = sequence + 1; first < num_seqs; first += 32) {
      Sequence<kRows, kUnitKeys> candidate[1];
      load_sequences(params_, min(first + lane, num_seqs), num_seqs, candidate, [&](auto& metadata) {
        if (__builtin_expect(raises_starts, false)) metadata.ascend(params_, maxima);
      });
      const uint32_t found = __ballot_sync(~0u, candidate[0].num_tiles > 0);
      if (found == 0) continue;
      if (lane == __ffs(found) - 1) {
        enter(params_, plan_, share_, candidate[0], 0);
        if (raises_starts) plan_.maxima = candidate[0].end;
      }
      break;
    }
    __syncwarp();
  }

  /// Piece number `piece` of the part, from unit `begin` of the tile on.
  __device__ __forceinline__ void begin_piece(const Cutting& cutting, int32_t piece, int32_t begin) const {
    const int32_t units = share_.tile_units, part_begin = share_.part_begin, part_end = share_.part_end;
    const int32_t shift = cutting.max_spans > 0 ? cutting.span_shift(units) : 0;
    const int32_t end = cutting.max_spans > 0 ? min(begin + (1 << shift), part_end) : part_end;
    KeyRange keys = visible_keys(params_, plan_.tile);
    if (begin > 0) keys.begin = max(keys.begin, (share_.first_unit + begin) * kUnitKeys);
    if (end < units) keys.end = min(keys.end, (share_.first_unit + end) * kUnitKeys);
    plan_.keys = keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
    share_.piece = piece;
    share_.piece_end = end;
    share_.folds = part_begin == 0 && (piece > 0 || end < part_end);
    const bool is_whole = part_begin == 0 && part_end == units;
    share_.partial_row = is_whole ? -1 : partial_row(cutting, begin >> shift);
  }

  /// Of a part that is not a whole tile; batch_invariant: of its span `span`.
  __device__ __forceinline__ int32_t partial_row(const Cutting& cutting, int32_t span) const {
    if (cutting.max_spans == 0) {
      return share_.part_begin > 0 ? first_part_row<kRows>(number_) : last_part_row<kRows>(cutting.groups, number_);
    }
    int32_t part = 0;
    if (share_.part_begin > 0) part = 1 + span - cutting.spans_before_cut(share_.tile_begin, share_.tile_units);
    return static_cast<int32_t>(share_.rows_before) + part * plan_.tile.num_rows;
  }

  const AttentionParams& params_;
  Plan& plan_;
  Share& share_;
  const int32_t number_;
};

/// Leads the CTA to its next piece, if there is one: plan.tile.num_rows is 0 otherwise. Every thread calls this.
template <int kRows, int kUnitKeys>
__device__ __forceinline__ void next_piece(const AttentionParams& params, Plan& plan, Share& share, int32_t number) {
  __syncthreads();
  if (ptx::opaque(threadIdx.x) < 32) ShareWalk<kRows, kUnitKeys>(params, plan, share, number).next();
  __syncthreads();
}

}  // namespace xa
