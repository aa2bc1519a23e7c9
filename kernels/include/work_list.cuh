// How the keys of a decode launch are shared out between CTAs.
//
// A unit is one round of a CTA over keys: kUnitKeys of them, from a multiple of kUnitKeys on. The tiles of a KV head
// have a fixed order, all heads alike, and so have their units. The CTAs of share number g, one a KV head, take
// the units from g * per to (g + 1) * per. Where an end of it falls inside of a tile it moves to a place
// where the tile may be cut (cutting.cuh), if there is any, else to the nearer end of the tile. What a CTA computes of
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

#include "cutting.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "sequence_work.cuh"
#include "share.cuh"
#include "tile_plan.cuh"

namespace xa {

/// Finds a CTA's share of the work. Every thread has one. Units are counted as `Index`; batch_invariant needs `kSpans`.
template <int kThreads, int kRows, int kUnitKeys, typename Index, int kPerThread, bool kSpans>
class WorkList {
  static constexpr int kPerRound = kThreads * kPerThread;
  /// batch_invariant: the fewest keys of a span. Part of what the result is.
  static constexpr int kLeastSpanKeys = 512;
  /// Of its units.
  static constexpr int kMinShift = kUnitKeys == 128 ? 2 : kUnitKeys == 64 ? 3 : 4;
  static_assert(!kSpans || kLeastSpanKeys == kUnitKeys << kMinShift);
  /// An end of a share may move by this fraction of the share, if that keeps a tile whole.
  static constexpr int kSlack = 32;
  /// With 32 bits: no thread has so much work that those of a round could not be added up, or is taken to have it.
  static constexpr Index kLimit = sizeof(Index) == 4 ? Index{1} << 22 : Index{1} << 62;
  static_assert(sizeof(Index) == 8 || kPerRound < 512);
  using Sequence = xa::Sequence<kRows, kUnitKeys>;

  /// What goes over the sequences. Planning is short beside fetching its instructions: each step is there once.
  enum class Pass {
    kCount,   // how much work there is
    kFit,     // batch_invariant: how many partial rows
    kLocate,  // where the share begins and ends
  };

 public:
  /// With `raises_starts` starts may descend.
  __device__ __forceinline__ WorkList(const AttentionParams& params, Plan& plan, Share& share, const ShareNumber& mine,
                                      bool raises_starts)
      : params_(params), plan_(plan), share_(share), mine_(mine), raises_starts_(raises_starts) {}

  /// Leaves the CTA at the first piece of its share, or before it. False where there is more work than can be counted,
  /// or starts descend that may not.
  __device__ __forceinline__ bool share_out() {
    const int32_t num_seqs = live_sequences(params_);
    // Not of the live ones, which are not known yet.
    const int32_t num_rounds = max((params_.max_seqs + int64_t{kPerRound} - 1) / kPerRound, int64_t{1});
    if (threadIdx.x == 0) clear();
    Pass pass = Pass::kCount;
#pragma unroll 1
    for (bool done = false; !done;) {
      Index units = 0;
      int64_t rows = 0;
      scan_ = StartScan();
#pragma unroll 1
      for (int32_t round = 0; round < num_rounds; ++round) {
        if (pass == Pass::kCount || num_rounds > 1) units += load_round(round, units, num_seqs);
        if (units >= kLimit || !starts_ascend_) return false;
        if (pass != Pass::kCount) {
          PrefixSum<int64_t> partial_rows = {};
          if (kSpans && cutting_.max_spans > 0) partial_rows = prefix_sum(partial_rows_until(INT64_MAX), true);
          if (pass == Pass::kLocate) locate(rows + partial_rows.before);
          rows += partial_rows.total;
        }
        if ((round + 1) * kPerRound >= num_seqs) break;
      }
      switch (pass) {
        case Pass::kCount:
          cut(units);
          pass = kSpans && cutting_.max_spans > 0 && cutting_.uncut != Cutting::kNever ? Pass::kFit : Pass::kLocate;
          break;
        case Pass::kFit:
          // Ever longer tiles stay whole until the parts of the others fit into the workspace.
          if (rows <= params_.partial.rows_per_head) {
            pass = Pass::kLocate;
          } else {
            cutting_.uncut = 2 * cutting_.uncut + 1;
          }
          break;
        case Pass::kLocate:
          done = true;
      }
    }
    if (threadIdx.x == 0) share_.cutting = cutting_;
    return true;
  }

 private:
  /// Before any thread has found anything.
  __device__ __forceinline__ void clear() const {
    plan_.tile.num_rows = 0;
    plan_.maxima = raises_starts_ ? StartMaxima{0, 0} : kStartsAscend;
    share_.piece = -1;
    share_.end = INT64_MAX;
    share_.beginning.tile_units = 0;
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
        share_.first_units = sequences_[0].num_tiles > 0 ? sequences_[0].units : 1;
        share_.owned.begin = rows_begin;
        if (num_seqs == 0) share_.owned.end = rows_begin;
      }
      if (first + i == num_seqs - 1) share_.owned.end = sequences_[i].end.q;
      mine += sequences_[i].work();
    }
    const PrefixSum<Index> sum = prefix_sum(static_cast<Index>(min(mine, int64_t{kLimit})), ascend);
    units_before_ = before + sum.before;
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
    static_assert(kWarps <= 12, "Share::warp_totals");
    const int warp = threadIdx.x / 32;
    const Sum inclusive = sum_up_to_this_lane(mine);
    int64_t* const totals = share_.warp_totals[parity_];
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

  /// Decides how `total` units are shared out and which tiles may be cut.
  __device__ __forceinline__ void cut(Index total) {
    constexpr int32_t kLeastPart = (kLeastPartKeys + kUnitKeys - 1) / kUnitKeys,
                      kLeastTile = kLeastTileKeys / kUnitKeys;
    const PartialResults& results = params_.partial;
    const int32_t first_units = share_.first_units;
    cutting_.groups = mine_.count;
    cutting_.max_spans = kSpans ? results.max_spans : 0;
    cutting_.min_shift = kMinShift;
    bool whole = results.groups == 0;
    if (!whole && cutting_.max_spans == 0 && results.groups < cutting_.groups) {
      // Partial rows for fewer shares only: these, unless that leaves more CTAs idle than whole tiles would.
      whole = 2 * results.groups < cutting_.groups && int64_t{first_units} * results.groups <= total;
      if (!whole) cutting_.groups = results.groups;
    }
    Index per = max(divide_up<Index>(total, cutting_.groups), Index{kLeastPart});
    // Tiles of one length stay whole where that costs little.
    const Index fitted = divide_up<Index>(per, first_units) * first_units;
    if (fitted - per <= per / kSlack) per = fitted;
    cutting_.per = per;
    cutting_.least = max(kLeastPart, static_cast<int32_t>(min(per / kSlack, Index{1} << 28)));
    cutting_.uncut = whole ? Cutting::kNever : max(2 * cutting_.least, kLeastTile) - 1;
  }

  /// batch_invariant: partial rows of those tiles of this thread's sequences that begin before `unit`.
  __device__ __forceinline__ int64_t partial_rows_until(int64_t unit) const {
    int64_t rows = 0, begin = units_before_;
#pragma unroll 1
    for (int i = 0; i < kPerThread; ++i) {
      const Sequence& sequence = this->sequence(i);
#pragma unroll 1
      for (int32_t index = 0; index < sequence.num_tiles && begin < unit; ++index) {
        const int64_t parts = cutting_.parts_of_spans(begin, sequence.units);
        rows += parts * sequence.num_rows(index, params_.group);
        begin += sequence.units;
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
    if (mine_.number >= cutting_.groups) return;
    const Index begin = static_cast<Index>(cutting_.per) * static_cast<Index>(mine_.number);
    const Index end = begin + static_cast<Index>(cutting_.per);
    int first = -1, last = -1;
    Index at = units_before_, first_at = 0, last_at = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const Index next = at + static_cast<Index>(sequences_[i].work());
      if (begin >= at && begin < next) first = i, first_at = at;
      if (end >= at && end < next) last = i, last_at = at;
      at = next;
    }
    if (first >= 0) begin_at(sequence(first), first_at, begin, end, rows_before);
    if (last >= 0) share_.end = end_at(sequence(last).units, last_at, end);
  }

  /// Where the share ends that is to end at `unit`, in a sequence of tiles of `units` that begins at unit `at`.
  __device__ __forceinline__ int64_t end_at(int32_t units, Index at, Index unit) const {
    const Index tile_begin = at + divide(unit - at, Index{units}) * units;
    return tile_begin + cutting_.place(static_cast<int32_t>(unit - tile_begin), units);
  }

  /// The share is to begin at `unit` and to end at `end`, in this sequence, which begins at unit `at`.
  __device__ __forceinline__ void begin_at(const Sequence& sequence, Index at, Index unit, Index end,
                                           int64_t rows_before) {
    const int32_t units = sequence.units;
    const int32_t index = static_cast<int32_t>(divide(unit - at, Index{units}));
    const Index tile_begin = at + Index{index} * units;
    const int32_t part_begin = cutting_.place(static_cast<int32_t>(unit - tile_begin), units);
    enter(params_, plan_, share_, sequence, index);
    if (raises_starts_) plan_.maxima = sequence.end;
    share_.tile_begin = tile_begin;
    share_.part_begin = part_begin;
    share_.rows_before = rows_before;
    if (kSpans && cutting_.max_spans > 0) share_.rows_before += partial_rows_until(tile_begin);
    if (part_begin > 0 && part_begin < units) {
      share_.beginning = CutBeginning{plan_.tile, tile_begin, share_.rows_before, units, 0};
    }
    const Index left = end - tile_begin;
    const int32_t part_end = left < units ? cutting_.place(static_cast<int32_t>(left), units) : units;
    if (part_begin < part_end) {
      ShareWalk<kRows, kUnitKeys>(params_, plan_, share_, mine_.number).begin_part(cutting_, part_begin, part_end);
    }
  }

  const AttentionParams& params_;
  Plan& plan_;
  Share& share_;
  const ShareNumber mine_;
  const bool raises_starts_;
  StartScan scan_;
  Sequence sequences_[kPerThread];
  Cutting cutting_;
  Index units_before_ = 0;  // of the round's sequences of this thread
  int32_t parity_ = 0;
  bool starts_ascend_ = true;
};

/// Leads the CTA to the first piece of its share, if there is one: plan.tile.num_rows is 0 otherwise. Every thread
/// calls this. batch_invariant needs `kSpans`.
template <int kThreads, int kRows, int kUnitKeys, bool kSpans>
__device__ __forceinline__ void share_out_work(const AttentionParams& params, Plan& plan, Share& share,
                                               const ShareNumber& mine) {
  using Fast = WorkList<kThreads, kRows, kUnitKeys, int32_t, 1, false>;
  using General = WorkList<kThreads, kRows, kUnitKeys, int64_t, kSpans ? 4 : 1, kSpans>;
  bool is_done = params.partial.max_spans == 0 && Fast(params, plan, share, mine, false).share_out();
#pragma unroll 1
  for (bool raises_starts = params.partial.max_spans == 0; __builtin_expect(!is_done, false); raises_starts = true) {
    __syncthreads();
    is_done = General(params, plan, share, mine, raises_starts).share_out() || raises_starts;
  }
  __syncthreads();
  // It has not begun where there is none, or where the share begins with the next tile.
  if (share.piece < 0) next_piece<kRows, kUnitKeys>(params, plan, share, mine.number);
}

/// Tells the merging kernel about the tile that the share begins inside of. One KV head does for all, and the first
/// share has none.
template <int kRows>
__device__ __forceinline__ void leave_cut(const AttentionParams& params, const Plan& plan, const Share& share,
                                          int32_t number) {
  const bool leaves = plan.kv_head == 0 && number > 0 && number < params.partial.groups;
  if (threadIdx.x != 0 || !leaves) return;
  const CutBeginning& beginning = share.beginning;
  const Cutting& cutting = share.cutting;
  CutTile cut = {};
  if (beginning.tile_units > 0) {
    const Cutting::Ends ends = cutting.ends(beginning.tile_begin, beginning.tile_units);
    const int32_t first = static_cast<int32_t>(ends.first);
    cut.tile = beginning.tile;
    cut.cuts = static_cast<int32_t>(ends.last) - first + 1;
    cut.index = number - first;
    if (cutting.max_spans > 0) {
      cut.parts = cutting.parts_of_spans(beginning.tile_begin, beginning.tile_units);
      cut.row_step = beginning.tile.num_rows;
      cut.first_row = static_cast<int32_t>(beginning.rows_before);
      cut.next_row = cut.first_row + cut.row_step;
    } else {
      cut.parts = cut.cuts + 1;
      cut.row_step = kRows;
      cut.first_row = last_part_row<kRows>(cutting.groups, first - 1);
      cut.next_row = first_part_row<kRows>(first);
    }
  }
  static_cast<CutTile*>(params.partial.cuts)[number - 1] = cut;
}

}  // namespace xa
