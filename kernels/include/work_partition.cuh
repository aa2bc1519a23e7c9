// How the keys of a decode launch are shared out between CTAs.
//
// A unit is one round of a CTA over keys: kUnitKeys of them, from a multiple of kUnitKeys on. The tiles of a KV head
// have a fixed order, all heads alike, and so have their units. The CTAs of share number g, one a KV head, take
// the units from g * per to (g + 1) * per. Where an end of it falls inside of a tile it moves to a place
// where the tile may be cut (split_kv.cuh), if there is any, else to the nearer end of the tile. What a CTA computes of
// a tile is a *part*. A part that is not the whole tile goes to the workspace (partial_rows.cuh), and combine.cu
// makes rows of parts.
//
// Every place follows from per and the tile by arithmetic, so that CTAs agree without a word: the end of a share inside
// of a tile has one part to its right, and the first of the tile's ends has the tile's first part to its left.
//
// batch_invariant: a tile's keys are cut into *spans*, whose size depends on the tile alone. Each is computed from a
// fresh state, and the tile's result is defined as the spans folded in order. A tile is cut between spans only. A CTA
// folds the spans of a part that begins the tile, and hands in every other span by itself.
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "sequence_work.cuh"
#include "split_kv.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// Finds a CTA's share of the work. Every thread has one. Units are counted as `Index`; batch_invariant needs `kSpans`.
template <int kThreads, int kRows, int kKvChunkKeys, typename Index, int kPerThread, bool kFixedSplits>
class WorkPartitioner {
  static constexpr int kPerRound = kThreads * kPerThread;
  /// batch_invariant: the fewest keys of a span. Part of what the result is.
  static constexpr int kMinFixedSplitKeys = 512;
  /// Of its units.
  static constexpr int kMinFixedSplitShift = kKvChunkKeys == 128 ? 2 : kKvChunkKeys == 64 ? 3 : 4;
  static_assert(!kFixedSplits || kMinFixedSplitKeys == kKvChunkKeys << kMinFixedSplitShift);
  /// An end of a share may move by this fraction of the share, if that keeps a tile whole.
  static constexpr int kSlack = 32;
  /// With 32 bits: no thread has so much work that those of a round could not be added up, or is taken to have it.
  static constexpr Index kLimit = sizeof(Index) == 4 ? Index{1} << 22 : Index{1} << 62;
  static_assert(sizeof(Index) == 8 || kPerRound < 512);
  using Sequence = xa::Sequence<kRows, kKvChunkKeys>;

  /// What goes over the sequences. Planning is short beside fetching its instructions: each step is there once.
  enum class Pass {
    kCount,   // how much work there is
    kFit,     // batch_invariant: how many partial rows
    kLocate,  // where the share begins and ends
  };

 public:
  /// With `raises_starts` starts may descend.
  __device__ __forceinline__ WorkPartitioner(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                             const WorkRangeIndex& mine, bool raises_starts)
      : params_(params), work_(work), range_(range), index_(mine), raises_starts_(raises_starts) {}

  /// Leaves the CTA at the first piece of its share, or before it. False where there is more work than can be counted,
  /// or starts descend that may not.
  __device__ __forceinline__ bool partition() {
    const int32_t num_seqs = live_sequences(params_);
    // Not of the live ones, which are not known yet.
    const int32_t num_rounds = max((params_.max_seqs + int64_t{kPerRound} - 1) / kPerRound, int64_t{1});
    if (threadIdx.x == 0) clear();
    Pass pass = Pass::kCount;
#pragma unroll 1
    for (bool done = false; !done;) {
      Index chunks = 0;
      int64_t rows = 0;
      scan_ = StartScan();
#pragma unroll 1
      for (int32_t round = 0; round < num_rounds; ++round) {
        if (pass == Pass::kCount || num_rounds > 1) chunks += load_round(round, chunks, num_seqs);
        if (chunks >= kLimit || !starts_ascend_) return false;
        if (pass != Pass::kCount) {
          PrefixSum<int64_t> partial_rows = {};
          if (kFixedSplits && kv_split_.max_fixed_splits > 0)
            partial_rows = prefix_sum(partial_rows_until(INT64_MAX), true);
          if (pass == Pass::kLocate) locate(rows + partial_rows.before);
          rows += partial_rows.total;
        }
        if ((round + 1) * kPerRound >= num_seqs) break;
      }
      switch (pass) {
        case Pass::kCount:
          cut(chunks);
          pass = kFixedSplits && kv_split_.max_fixed_splits > 0 && kv_split_.max_unsplit_chunks != KvSplit::kNeverSplit
                     ? Pass::kFit
                     : Pass::kLocate;
          break;
        case Pass::kFit:
          // Ever longer tiles stay whole until the parts of the others fit into the workspace.
          if (rows <= params_.partial.rows_per_head) {
            pass = Pass::kLocate;
          } else {
            kv_split_.max_unsplit_chunks = 2 * kv_split_.max_unsplit_chunks + 1;
          }
          break;
        case Pass::kLocate:
          done = true;
      }
    }
    if (threadIdx.x == 0) range_.kv_split = kv_split_;
    return true;
  }

 private:
  /// Before any thread has found anything.
  __device__ __forceinline__ void clear() const {
    work_.tile.num_rows = 0;
    work_.maxima = raises_starts_ ? StartMaxima{0, 0} : kStartsAscend;
    range_.work_tile = -1;
    range_.end = INT64_MAX;
    range_.start_split.tile_chunks = 0;
  }

  /// Loads this thread's sequences of a round, `before` units before it; the round's units.
  __device__ __forceinline__ Index load_round(int32_t round, Index before, int32_t num_seqs) {
    const int32_t first = round * kPerRound + threadIdx.x * kPerThread;
    const bool ascend = load_sequences(params_, first, num_seqs, sequences_, [&](auto& metadata) {
      if (!raises_starts_) return;
      scan_.ascend(params_, round * kPerRound + static_cast<int32_t>(threadIdx.x / 32 * 32) * kPerThread, metadata);
    });
    int64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int32_t rows_begin = sequences_[i].tile.first_token;
      if (first + i == 0) {
        range_.first_tile_chunks = sequences_[0].num_tiles > 0 ? sequences_[0].chunks : 1;
        range_.live.begin = rows_begin;
        if (num_seqs == 0) range_.live.end = rows_begin;
      }
      if (first + i == num_seqs - 1) range_.live.end = sequences_[i].end.q;
      mine += sequences_[i].work();
    }
    const PrefixSum<Index> sum = prefix_sum(static_cast<Index>(min(mine, int64_t{kLimit})), ascend);
    chunks_before_ = before + sum.before;
    starts_ascend_ &= sum.all;
    return sum.total;
  }

  template <typename Sum>
  struct PrefixSum {
    Sum before;  // of the threads before this one
    Sum total;
    bool all;
  };
  template <typename Sum>
  __device__ __forceinline__ PrefixSum<Sum> prefix_sum(Sum mine, bool flag) {
    constexpr int kWarps = kThreads / 32;
    static_assert(kWarps <= 12, "WorkRange::warp_totals");
    const int warp = threadIdx.x / 32;
    const Sum inclusive = sum_up_to_this_lane(mine);
    int64_t* const totals = range_.warp_totals[parity_];
    parity_ ^= 1;
    if (threadIdx.x % 32 == 31) totals[warp] = inclusive;
    PrefixSum<Sum> sum = {inclusive - mine, 0, __syncthreads_and(flag) != 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Sum of_warp = static_cast<Sum>(totals[w]);
      if (w < warp) sum.before += of_warp;
      sum.total += of_warp;
    }
    return sum;
  }

  /// Decides how `total` units are shared out and which tiles may be split.
  __device__ __forceinline__ void cut(Index total) {
    constexpr int32_t kMinChunks = (kMinSplitKeys + kKvChunkKeys - 1) / kKvChunkKeys,
                      kMinTileChunks = kMinSplitTileKeys / kKvChunkKeys;
    const PartialResults& results = params_.partial;
    const int32_t first_tile_chunks = range_.first_tile_chunks;
    kv_split_.num_ranges = index_.count;
    kv_split_.max_fixed_splits = kFixedSplits ? results.max_fixed_splits : 0;
    kv_split_.min_shift = kMinFixedSplitShift;
    bool whole = results.num_ranges == 0;
    if (!whole && kv_split_.max_fixed_splits == 0 && results.num_ranges < kv_split_.num_ranges) {
      // Partial rows for fewer shares only: these, unless that leaves more CTAs idle than whole tiles would.
      whole = 2 * results.num_ranges < kv_split_.num_ranges && int64_t{first_tile_chunks} * results.num_ranges <= total;
      if (!whole) kv_split_.num_ranges = results.num_ranges;
    }
    Index range_chunks = max(divide_up<Index>(total, kv_split_.num_ranges), Index{kMinChunks});
    // Tiles of one length stay whole where that costs little.
    const Index fitted = divide_up<Index>(range_chunks, first_tile_chunks) * first_tile_chunks;
    if (fitted - range_chunks <= range_chunks / kSlack) range_chunks = fitted;
    kv_split_.range_chunks = range_chunks;
    kv_split_.min_chunks = max(kMinChunks, static_cast<int32_t>(min(range_chunks / kSlack, Index{1} << 28)));
    kv_split_.max_unsplit_chunks = whole ? KvSplit::kNeverSplit : max(2 * kv_split_.min_chunks, kMinTileChunks) - 1;
  }

  /// batch_invariant: partial rows of those tiles of this thread's sequences that begin before `unit`.
  __device__ __forceinline__ int64_t partial_rows_until(int64_t chunk) const {
    int64_t rows = 0, begin = chunks_before_;
#pragma unroll 1
    for (int i = 0; i < kPerThread; ++i) {
      const Sequence& sequence = this->sequence(i);
#pragma unroll 1
      for (int32_t index = 0; index < sequence.num_tiles && begin < chunk; ++index) {
        const int64_t num_partials = kv_split_.num_partials(begin, sequence.chunks);
        rows += num_partials * sequence.num_rows(index, params_.group);
        begin += sequence.chunks;
      }
    }
    return rows;
  }

  /// Sequence `i` of this thread, chosen without an address.
  __device__ __forceinline__ Sequence sequence(int i) const {
    Sequence chosen = sequences_[0];
#pragma unroll
    for (int other = 1; other < kPerThread; ++other) {
      if (i == other) chosen = sequences_[other];
    }
    return chosen;
  }

  /// Finds the beginning and the end of the share, where they are in this thread's sequences. batch_invariant: there
  /// are `rows_before` partial rows before these.
  __device__ __forceinline__ void locate(int64_t rows_before) {
    if (index_.number >= kv_split_.num_ranges) return;
    const Index begin = static_cast<Index>(kv_split_.range_chunks) * static_cast<Index>(index_.number);
    const Index end = begin + static_cast<Index>(kv_split_.range_chunks);
    int first = -1, last = -1;
    Index at = chunks_before_, first_at = 0, last_at = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const Index next = at + static_cast<Index>(sequences_[i].work());
      if (begin >= at && begin < next) first = i, first_at = at;
      if (end >= at && end < next) last = i, last_at = at;
      at = next;
    }
    if (first >= 0) begin_at(sequence(first), first_at, begin, end, rows_before);
    if (last >= 0) range_.end = end_at(sequence(last).chunks, last_at, end);
  }

  /// Where the share ends that is to end at `unit`, in a sequence of tiles of `units` that begins at unit `at`.
  __device__ __forceinline__ int64_t end_at(int32_t chunks, Index at, Index chunk) const {
    const Index tile_begin = at + divide(chunk - at, Index{chunks}) * chunks;
    return tile_begin + kv_split_.place(static_cast<int32_t>(chunk - tile_begin), chunks);
  }

  /// The share is to begin at `unit` and to end at `end`, in this sequence, which begins at unit `at`.
  __device__ __forceinline__ void begin_at(const Sequence& sequence, Index at, Index chunk, Index end,
                                           int64_t rows_before) {
    const int32_t chunks = sequence.chunks;
    const int32_t index = static_cast<int32_t>(divide(chunk - at, Index{chunks}));
    const Index tile_begin = at + Index{index} * chunks;
    const int32_t split_begin = kv_split_.place(static_cast<int32_t>(chunk - tile_begin), chunks);
    enter(params_, work_, range_, sequence, index);
    if (raises_starts_) work_.maxima = sequence.end;
    range_.tile_begin = tile_begin;
    range_.split_begin = split_begin;
    range_.rows_before = rows_before;
    if (kFixedSplits && kv_split_.max_fixed_splits > 0) range_.rows_before += partial_rows_until(tile_begin);
    if (split_begin > 0 && split_begin < chunks) {
      range_.start_split = StartSplit{work_.tile, tile_begin, range_.rows_before, chunks, 0};
    }
    const Index left = end - tile_begin;
    const int32_t split_end = left < chunks ? kv_split_.place(static_cast<int32_t>(left), chunks) : chunks;
    if (split_begin < split_end) {
      WorkRangeIterator<kRows, kKvChunkKeys>(params_, work_, range_, index_.number)
          .begin_split(kv_split_, split_begin, split_end);
    }
  }

  const AttentionParams& params_;
  WorkTile& work_;
  WorkRange& range_;
  const WorkRangeIndex index_;
  const bool raises_starts_;
  StartScan scan_;
  Sequence sequences_[kPerThread];
  KvSplit kv_split_;
  Index chunks_before_ = 0;  // of the round's sequences of this thread
  int32_t parity_ = 0;
  bool starts_ascend_ = true;
};

/// Leads the CTA to the first piece of its share, if there is one: plan.tile.num_rows is 0 otherwise. Every thread
/// calls this. batch_invariant needs `kSpans`.
template <int kThreads, int kRows, int kKvChunkKeys, bool kFixedSplits>
__device__ __forceinline__ void partition_work(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               const WorkRangeIndex& mine) {
  using Fast = WorkPartitioner<kThreads, kRows, kKvChunkKeys, int32_t, 1, false>;
  using General = WorkPartitioner<kThreads, kRows, kKvChunkKeys, int64_t, kFixedSplits ? 4 : 1, kFixedSplits>;
  bool is_done = params.partial.max_fixed_splits == 0 && Fast(params, work, range, mine, false).partition();
#pragma unroll 1
  for (bool raises_starts = params.partial.max_fixed_splits == 0; __builtin_expect(!is_done, false);
       raises_starts = true) {
    __syncthreads();
    is_done = General(params, work, range, mine, raises_starts).partition() || raises_starts;
  }
  __syncthreads();
  // It has not begun where there is none, or where the share begins with the next tile.
  if (range.work_tile < 0) next_work_tile<kRows, kKvChunkKeys>(params, work, range, mine.number);
}

/// Tells the merging kernel about the tile that the share begins inside of. One KV head does for all, and the first
/// share has none.
template <int kRows>
__device__ __forceinline__ void store_split_record(const AttentionParams& params, const WorkTile& work,
                                                   const WorkRange& range, int32_t number) {
  const bool leaves = work.kv_head == 0 && number > 0 && number < params.partial.num_ranges;
  if (threadIdx.x != 0 || !leaves) return;
  const StartSplit& start_split = range.start_split;
  const KvSplit& kv_split = range.kv_split;
  SplitRecord record = {};
  if (start_split.tile_chunks > 0) {
    const KvSplit::RangeStarts range_starts = kv_split.range_starts(start_split.tile_begin, start_split.tile_chunks);
    const int32_t first = static_cast<int32_t>(range_starts.first);
    record.tile = start_split.tile;
    record.num_records = static_cast<int32_t>(range_starts.last) - first + 1;
    record.index = number - first;
    if (kv_split.max_fixed_splits > 0) {
      record.num_partials = kv_split.num_partials(start_split.tile_begin, start_split.tile_chunks);
      record.row_stride = start_split.tile.num_rows;
      record.first_row = static_cast<int32_t>(start_split.rows_before);
      record.second_row = record.first_row + record.row_stride;
    } else {
      record.num_partials = record.num_records + 1;
      record.row_stride = kRows;
      record.first_row = last_partial_row<kRows>(kv_split.num_ranges, first - 1);
      record.second_row = first_partial_row<kRows>(first);
    }
  }
  static_cast<SplitRecord*>(params.partial.split_records)[number - 1] = record;
}

}  // namespace xa
