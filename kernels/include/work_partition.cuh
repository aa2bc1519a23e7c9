// The work partition of a decode launch: which CTA computes which keys (split-KV with a stream-K partition).
//
// Work is counted in KV chunks: one step of a CTA, kKvChunkKeys keys from a multiple of kKvChunkKeys on. The tiles of a
// KV head stand in a fixed order, the same for all heads, and so do their chunks. The CTAs of work range g, one per KV
// head, compute the chunks from g * range_chunks to (g + 1) * range_chunks:
//
//     tiles of a KV head  |      sequence 0      |  sequence 1  | seq. 2 |          sequence 3            |
//     chunks              |. . . . . . . . . . . |. . . . . . . |. . . . |. . . . . . . . . . . . . . . . |
//     work ranges         |--- 0 ----|---- 1 ----|------ 2 -----|----- 3 -----|---- 4 -----|---- 5 -------|
//
// A boundary between ranges that falls inside of a tile moves to an offset at which the tile may be split, or else to
// the tile's nearer end (split_kv.cuh). What a range has of a tile is a split of it. The result of a split that is not
// the whole tile is a partial: it goes to the workspace (partial_rows.cuh), and combine.cu merges the partials of a
// tile.
//
// All of this is arithmetic on range_chunks and the tile, so each CTA knows where every partial is, without
// communication: a boundary inside of a tile has one split to its right, and the first boundary has the tile's first
// split to its left.
//
// batch_invariant: the keys of a tile consist of fixed-size splits, whose size depends on the tile alone. Each is
// computed from a fresh state, and the tile's result is defined as their states merged in order. Boundaries lie between
// fixed-size splits. A CTA merges the fixed-size splits at the beginning of a tile itself, in order; every other one
// has its own partial, because merging two of those first would change the order and so the bits.
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "sequence_work.cuh"
#include "split_kv.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// Computes a CTA's work range by scanning the sequences, kPerThread per thread and round. Every thread of the CTA has
/// one of these. Chunks are counted as `Index`; batch_invariant needs `kFixedSplits`. `kFindsWarpTiles` looks for
/// launches whose sequences all have a tile that a warp computes alone.
template <int kThreads, typename Unit, typename Index, int kPerThread, bool kFixedSplits, bool kFindsWarpTiles = false>
class WorkPartitioner {
  static constexpr int kKvChunkKeys = Unit::kKvChunkKeys;
  static constexpr int kPerRound = kThreads * kPerThread;
  /// batch_invariant: minimum keys of a fixed-size split. Another value changes the bits of results.
  static constexpr int kMinFixedSplitKeys = 512;
  /// log2 of its chunks.
  static constexpr int kMinFixedSplitShift = kKvChunkKeys == 128  ? 2
                                             : kKvChunkKeys == 64 ? 3
                                             : kKvChunkKeys == 32 ? 4
                                                                  : 5;
  static_assert(!kFixedSplits || kMinFixedSplitKeys == kKvChunkKeys << kMinFixedSplitShift);
  /// A boundary may move by a fraction 1 / kSlack of the work range, if that keeps a tile whole.
  static constexpr int kSlack = 32;
  /// Sequences whose rows do not fit a tile of decode have several large tiles, which read the same keys.
  static constexpr bool kAlignsTiles = Unit::kRows >= 64;
  /// More chunks than this are not counted. With 32 bits they are divided as floats (divide_small).
  static constexpr Index kLimit = sizeof(Index) == 4 ? Index{1} << 19 : Index{1} << 62;
  static_assert(sizeof(Index) == 8 || kPerRound < 2048, "the sum over the threads of a round cannot overflow");
  /// Whether ranges may be aligned with tiles: all tiles of a sequence have as many chunks, a thread has one sequence,
  /// and an SM one CTA, whose loads stop where it starts another tile.
  static constexpr bool kAlignsRanges =
      kThreads >= 256 && sizeof(Index) == 4 && kPerThread == 1 && !kFixedSplits && !Unit::kIsFolded;
  /// The start of another tile then takes about as long as this many chunks. It counts only in short ranges.
  static constexpr int kTileStartChunks = 3, kMaxAlignedChunks = 8;
  /// There are fewer ranges than this: four counts up to it, of the sequences of all threads, are added in one sum.
  static constexpr int kMaxAlignedRanges = 0xffff / kThreads;
  /// Tiles of a warp that make up for each other's lengths.
  static constexpr int kManyTiles = 2;
  /// Sequences of a warp's round. If there are no more, the first warp plans alone, without a barrier.
  static constexpr int kPerWarp = 32 * kPerThread;
  // `partial_rows_until` takes all tiles of a sequence for equal.
  static_assert(!kFixedSplits || !Unit::kIsFolded);
  using Sequence = SequenceWork<Unit>;

  /// The passes over the sequences share one loop: fetching instructions takes longer than executing them, so each step
  /// is instantiated once.
  enum class Pass {
    kCount,   // counts the chunks
    kFit,     // batch_invariant: counts the partial rows
    kLocate,  // finds the start and the end of the work range
  };

 public:
  /// With `raises_starts`, cu_seqlens may descend: starts are replaced by their running maximum.
  __device__ __forceinline__ WorkPartitioner(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                             const WorkRangeIndex& index, bool raises_starts)
      : params_(params), work_(work), range_(range), index_(index), raises_starts_(raises_starts) {}

  /// Leaves the CTA at the first work tile of its range, or before it. Returns false if there are more chunks than can
  /// be counted, or if starts descend without `raises_starts`; in the first warp, if that one plans alone.
  __device__ __forceinline__ bool partition() {
    if (has_one_warp() && threadIdx.x >= 32) return true;
    int32_t num_seqs = given_sequences(params_);
    // Rounds over all slots: loading num_seqs is still under way.
    const int32_t num_rounds =
        params_.max_seqs <= kPerRound ? 1 : (static_cast<uint32_t>(params_.max_seqs) + (kPerRound - 1)) / kPerRound;
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
          if (kFindsWarpTiles && params_.partial.max_warp_tile_chunks > 0 && are_warp_tiles(chunks, num_seqs)) {
            if (threadIdx.x == 0) range_.has_warp_tiles = 1;
            return true;
          }
          choose_split(chunks);
          if constexpr (kAlignsRanges) {
            if (num_rounds == 1) align_ranges();
          }
          pass = kFixedSplits && kv_split_.max_fixed_splits > 0 && kv_split_.max_unsplit_chunks != KvSplit::kNeverSplit
                     ? Pass::kFit
                     : Pass::kLocate;
          break;
        case Pass::kFit:
          // Longer and longer tiles are left whole, until the partials of the others fit into the workspace.
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
  __device__ __forceinline__ bool has_one_warp() const { return params_.max_seqs <= kPerWarp; }

  /// x / divisor. Numbers of 32 bits are below 2^20 here.
  static __device__ __forceinline__ Index quotient(Index x, Index divisor) {
    if constexpr (sizeof(Index) == 4) {
      return divide_small(x, ptx::reciprocal_approx(static_cast<float>(divisor)));
    } else {
      return divide(x, divisor);
    }
  }
  static __device__ __forceinline__ Index quotient_up(Index x, Index divisor) {
    return quotient(x + divisor - 1, divisor);
  }

  /// Resets the shared state, before the thread that finds the start of the range writes it.
  __device__ __forceinline__ void clear() const {
    work_.tile.num_rows = 0;
    work_.maxima = raises_starts_ ? StartMaxima{0, 0} : kStartsAscend;
    range_.split_begin = range_.split_end = 0;
    range_.start_split.tile_chunks = 0;
    range_.has_warp_tiles = 0;
  }

  /// Whether a warp computes the tile of each sequence, of which there are `num_seqs` with `total` chunks. Where a warp
  /// has few tiles, those of more than 256 keys leave warps idle unless all are about as long.
  __device__ __forceinline__ bool are_warp_tiles(Index total, int32_t num_seqs) const {
    const int32_t most = params_.partial.max_warp_tile_chunks;
    const bool are_even =
        int64_t{8} * total >= int64_t{5} * most * num_seqs || num_seqs >= kManyTiles * (kThreads / 32) * index_.count;
    const bool fits = longest_warp_tile_ <= (are_even ? most : min(most, 256 / kKvChunkKeys));
    return has_one_warp() ? __all_sync(~0u, fits) != 0 : __syncthreads_and(fits) != 0;
  }

  /// Loads this thread's sequences of a round and returns the round's chunks; there are `before` in earlier rounds.
  /// `num_seqs` becomes the number of live sequences.
  __device__ __forceinline__ Index load_round(int32_t round, Index before, int32_t& num_seqs) {
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
      if (!kFindsWarpTiles || sequences_[i].num_tiles == 0) continue;
      longest_warp_tile_ = max(longest_warp_tile_, sequences_[i].tile.len_q == 1 ? sequences_[i].chunks : INT32_MAX);
    }
    const PrefixSum<Index> sum = prefix_sum(static_cast<Index>(min(mine, int64_t{kLimit})), ascend);
    chunks_before_ = before + sum.before;
    starts_ascend_ &= sum.all;
    return sum.total;
  }

  template <typename Sum>
  struct PrefixSum {
    Sum before;  // sum of the threads before this one
    Sum total;
    bool all;
  };
  template <typename Sum>
  __device__ __forceinline__ PrefixSum<Sum> prefix_sum(Sum mine, bool flag) {
    constexpr int kWarps = kThreads / 32;
    constexpr int kScratch = sizeof(WorkRange::warp_totals) / sizeof(int64_t);
    constexpr bool kHasTwoBuffers = 2 * kWarps <= kScratch;
    static_assert(kWarps <= kScratch);
    const int warp = threadIdx.x / 32;
    const Sum inclusive = sum_up_to_this_lane(mine);
    if (has_one_warp()) {
      __syncwarp();  // what this round has written to `range_`
      return PrefixSum<Sum>{inclusive - mine, __shfl_sync(~0u, inclusive, 31), __all_sync(~0u, flag) != 0};
    }
    int64_t* const totals = range_.warp_totals[kHasTwoBuffers ? parity_ : 0];
    parity_ ^= 1;
    // All warps have read the totals of the round before.
    if constexpr (!kHasTwoBuffers) __syncthreads();
    if (threadIdx.x % 32 == 31) totals[warp] = inclusive;
    PrefixSum<Sum> sum = {inclusive - mine, 0, __syncthreads_and(flag) != 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Sum warp_total = static_cast<Sum>(totals[w]);
      if (w < warp) sum.before += warp_total;
      sum.total += warp_total;
    }
    return sum;
  }

  /// Chooses the size of the work ranges for `total` chunks, and which tiles may be split.
  __device__ __forceinline__ void choose_split(Index total) {
    constexpr int32_t kMinChunks = (kMinSplitKeys + kKvChunkKeys - 1) / kKvChunkKeys,
                      kMinTileChunks = kMinSplitTileKeys / kKvChunkKeys;
    const PartialResults& results = params_.partial;
    const int32_t first_tile_chunks = range_.first_tile_chunks;
    kv_split_.num_ranges = index_.count;
    kv_split_.is_aligned = 0;
    kv_split_.max_fixed_splits = kFixedSplits ? results.max_fixed_splits : 0;
    kv_split_.min_fixed_split_shift = kMinFixedSplitShift;
    bool whole = results.num_ranges == 0;
    if (!whole && kv_split_.max_fixed_splits == 0 && results.num_ranges < kv_split_.num_ranges) {
      // The workspace has room for the partials of fewer ranges only. Fewer ranges leave CTAs idle; so do whole tiles.
      // Whole tiles win if less than half of the ranges have room and there are at least as many tiles.
      whole = 2 * results.num_ranges < kv_split_.num_ranges && int64_t{first_tile_chunks} * results.num_ranges <= total;
      if (!whole) kv_split_.num_ranges = results.num_ranges;
    }
    Index range_chunks = max(quotient_up(total, kv_split_.num_ranges), Index{kMinChunks});
    // If rounding up to whole tiles of the first sequence's length costs little, batches of equal lengths stay whole.
    const Index fitted = quotient_up(range_chunks, first_tile_chunks) * first_tile_chunks;
    if (fitted - range_chunks <= range_chunks / kSlack) range_chunks = fitted;
    if constexpr (kAlignsTiles) {
      // Likewise up to a whole fraction of such a tile: then the tiles of a sequence are split alike, and the CTAs that
      // walk the same keys do so at the same time.
      const Index parts = max(quotient(first_tile_chunks, range_chunks), Index{1});
      const Index part = quotient_up(first_tile_chunks, parts);
      if (part >= range_chunks && part - range_chunks <= range_chunks / kSlack) range_chunks = part;
    }
    kv_split_.range_chunks = range_chunks;
    kv_split_.min_chunks = max(kMinChunks, static_cast<int32_t>(min(range_chunks / kSlack, Index{1} << 28)));
    kv_split_.max_unsplit_chunks = whole ? KvSplit::kNeverSplit : max(2 * kv_split_.min_chunks, kMinTileChunks) - 1;
  }

  /// Aligns the work ranges, if there are enough of them for it: each then has chunks of one tile only, which saves the
  /// start of another one. A tile counts as many chunks as the ranges that share it, so it begins with the first of
  /// these.
  __device__ __forceinline__ void align_ranges() {
    const Index smallest = static_cast<Index>(kv_split_.range_chunks);
    const bool may_gain = smallest > 1 && smallest <= kMaxAlignedChunks;
    const bool may_split = kv_split_.max_unsplit_chunks != KvSplit::kNeverSplit;
    if (!may_gain || !may_split || kv_split_.num_ranges >= kMaxAlignedRanges) return;
    const Sequence& sequence = sequences_[0];
    // The ranges that sequences need if each has 0, 1, 2 or 3 chunks more.
    uint64_t counts = 0;
#pragma unroll 1
    for (int more = kTileStartChunks; more >= 0; --more) {
      const int32_t splits = min(kv_split_.num_splits(sequence.chunks, smallest + more), kMaxAlignedRanges);
      counts = counts << 16 | min(min(sequence.num_tiles, kMaxAlignedRanges) * splits, kMaxAlignedRanges);
    }
    const PrefixSum<int64_t> sum = prefix_sum(static_cast<int64_t>(counts), true);
    uint64_t before = sum.before, total = sum.total;
#pragma unroll 1
    for (int more = 0; more <= kTileStartChunks; ++more, before >>= 16, total >>= 16) {
      if (static_cast<int32_t>(total & 0xffff) > kv_split_.num_ranges) continue;
      kv_split_.is_aligned = 1;
      kv_split_.range_chunks = smallest + more;
      chunks_before_ = static_cast<Index>(before & 0xffff) * (smallest + more);
      return;
    }
  }

  /// Chunks that are counted for each tile of a sequence.
  __device__ __forceinline__ Index counted_chunks(const Sequence& sequence) const {
    if constexpr (kAlignsRanges) {
      const auto range_chunks = static_cast<Index>(kv_split_.range_chunks);
      if (kv_split_.is_aligned != 0) return kv_split_.num_splits(sequence.chunks, range_chunks) * range_chunks;
    }
    return sequence.chunks;
  }

  /// Chunks that are counted for a sequence.
  __device__ __forceinline__ int64_t counted_work(const Sequence& sequence) const {
    if constexpr (kAlignsRanges) return static_cast<int64_t>(sequence.num_tiles) * counted_chunks(sequence);
    return sequence.work();
  }

  /// batch_invariant: partial rows of those tiles of this thread's sequences that begin before `chunk`.
  __device__ __forceinline__ int64_t partial_rows_until(int64_t chunk) const {
    int64_t rows = 0, begin = chunks_before_;
#pragma unroll 1
    for (int i = 0; i < kPerThread; ++i) {
      const Sequence& sequence = this->sequence(i);
#pragma unroll 1
      for (int32_t index = 0; index < sequence.num_tiles && begin < chunk; ++index) {
        const int64_t num_partials = kv_split_.num_partials(begin, sequence.chunks);
        rows += num_partials * sequence.num_rows(params_, index);
        begin += sequence.chunks;
      }
    }
    return rows;
  }

  /// Sequence `i` of this thread. Selects instead of indexing, which would put the array into local memory.
  __device__ __forceinline__ Sequence sequence(int i) const {
    Sequence chosen = sequences_[0];
#pragma unroll
    for (int j = 1; j < kPerThread; ++j) {
      if (i == j) chosen = sequences_[j];
    }
    return chosen;
  }

  /// Writes the start of the work range if it is in this thread's sequences. batch_invariant: there are `rows_before`
  /// partial rows before these sequences.
  __device__ __forceinline__ void locate(int64_t rows_before) {
    if (index_.index >= kv_split_.num_ranges) return;
    const Index begin = static_cast<Index>(kv_split_.range_chunks) * static_cast<Index>(index_.index);
    int first = -1;
    Index at = chunks_before_, first_at = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const Index next = at + static_cast<Index>(counted_work(sequences_[i]));
      if (begin >= at && begin < next) first = i, first_at = at;
      at = next;
    }
    if (first >= 0) begin_at(sequence(first), first_at, begin, rows_before);
  }

  /// The tile with chunk `chunk` of a sequence's work.
  __device__ __forceinline__ TilePlace<Index> find(const Sequence& sequence, Index chunk) const {
    if constexpr (Unit::kIsFolded) {
      return sequence.find(params_, chunk);
    } else if (sequence.num_tiles == 1) {
      return TilePlace<Index>{0, 0, sequence.chunks};
    } else {
      const Index counted = counted_chunks(sequence);
      const auto index = static_cast<int32_t>(quotient(chunk, counted));
      return TilePlace<Index>{index, Index{index} * counted, sequence.chunks};
    }
  }

  /// Starts the range whose first boundary is at `chunk`, in this sequence, which begins at chunk `at`.
  __device__ __forceinline__ void begin_at(const Sequence& sequence, Index at, Index chunk, int64_t rows_before) {
    const TilePlace<Index> place = find(sequence, chunk - at);
    const Index tile_begin = at + place.first;
    const int32_t count = place.chunks;
    const int32_t split_begin = kv_split_.move_boundary(static_cast<int32_t>(chunk - tile_begin), count);
    const QoTile tile = sequence.tile_at(params_, place.index);
    if (raises_starts_) work_.maxima = sequence.end;
    if (kFixedSplits && kv_split_.max_fixed_splits > 0) rows_before += partial_rows_until(tile_begin);
    if (split_begin > 0 && split_begin < count) {
      range_.start_split = StartSplit{tile, tile_begin, rows_before, count, 0};
    }
    const Index end = chunk + static_cast<Index>(kv_split_.range_chunks);
    range_.end = end;
    range_.tile_begin = tile_begin;
    range_.rows_before = rows_before;
    const TileChunks chunks = {sequence.first_chunk_of(params_, place.index), count};
    const WorkRangeIterator<Unit> iterator(params_, work_, range_, index_.index);
    iterator.enter(sequence, tile, place.index, chunks);
    iterator.begin_split(kv_split_, tile, chunks, split_begin, end - tile_begin);
  }

  const AttentionParams& params_;
  WorkTile& work_;
  WorkRange& range_;
  const WorkRangeIndex index_;
  const bool raises_starts_;
  StartScan scan_;
  Sequence sequences_[kPerThread];
  KvSplit kv_split_;
  Index chunks_before_ = 0;  // in front of this thread's sequences of the round
  int32_t parity_ = 0;
  bool starts_ascend_ = true;
  int32_t longest_warp_tile_ = 0;  // chunks of this thread's longest tile, which has one query
};

/// Computes the CTA's work range. The current tile is the one with the range's first boundary, of which the range may
/// have no chunks (WorkRange::has_split); without a tile, it has no rows. Every thread calls this. batch_invariant
/// needs `kFixedSplits`.
///
/// The common case takes the path with 32-bit numbers, one sequence per thread and ascending starts, because fetching
/// instructions dominates planning. The other path handles everything, and is taken only where the first one gives up.
template <int kThreads, typename Unit, bool kFixedSplits, bool kFindsWarpTiles = false>
__device__ __forceinline__ void partition_work(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               const WorkRangeIndex& index) {
  using Fast = WorkPartitioner<kThreads, Unit, int32_t, 1, false, kFindsWarpTiles>;
  using General = WorkPartitioner<kThreads, Unit, int64_t, kFixedSplits ? 4 : 1, kFixedSplits>;
  const bool is_plain = params.partial.max_fixed_splits == 0;
  bool is_done = is_plain && Fast(params, work, range, index, false).partition();
#pragma unroll 1
  for (bool raises_starts = is_plain; !__syncthreads_and(is_done); raises_starts = true) {
    is_done = General(params, work, range, index, raises_starts).partition() || raises_starts;
  }
}

/// Computes the CTA's work range and calls `attend()` for each of its work tiles. Every thread calls this.
template <int kThreads, typename Unit, bool kFixedSplits, bool kFindsWarpTiles = false, typename Attend>
__device__ __forceinline__ void for_work_tiles(const AttentionParams& params, WorkTile& work, WorkRange& range,
                                               const WorkRangeIndex& index, const Attend& attend) {
  partition_work<kThreads, Unit, kFixedSplits, kFindsWarpTiles>(params, work, range, index);
  if (kFindsWarpTiles && range.has_warp_tiles != 0) return;
  bool has_split = range.has_split();
#pragma unroll 1
  while (true) {
    if (!has_split) next_work_tile<Unit>(params, work, range, index.index);
    if (work.tile.num_rows == 0) break;
    attend();
    has_split = false;
  }
}

/// Writes the SplitRecord of the tile inside of which the work range starts, if any. Tiles are split alike in all KV
/// heads, so the CTA of KV head 0 writes for all; range 0 starts at no boundary. Thread kThread writes it, at any time
/// after the partition.
template <int kRows, int kThread = 0>
__device__ __forceinline__ void store_split_record(const AttentionParams& params, const WorkTile& work,
                                                   const WorkRange& range, int32_t range_index) {
  const bool writes = work.kv_head == 0 && range_index > 0 && range_index < params.partial.num_ranges;
  if (threadIdx.x != kThread || !writes) return;
  const StartSplit& start_split = range.start_split;
  const KvSplit& kv_split = range.kv_split;
  SplitRecord record = {};
  if (start_split.tile_chunks > 0) {
    const KvSplit::Ranges ranges = kv_split.ranges_starting_in(start_split.tile_begin, start_split.tile_chunks);
    const int32_t first = static_cast<int32_t>(ranges.first);
    record.tile = start_split.tile;
    record.num_records = static_cast<int32_t>(ranges.last) - first + 1;
    record.index = range_index - first;
    if (kv_split.max_fixed_splits > 0) {
      record.num_partials = kv_split.num_partials(start_split.tile_begin, start_split.tile_chunks);
      record.row_stride = start_split.tile.num_rows;
      record.first_row = static_cast<int32_t>(start_split.rows_before);
      record.second_row = record.first_row + record.row_stride;
    } else {
      record.num_partials = record.num_records + 1;
      record.row_stride = kRows;
      record.first_row = end_partial_row<kRows>(kv_split.num_ranges, first - 1);
      record.second_row = start_partial_row<kRows>(first);
    }
  }
  static_cast<SplitRecord*>(params.partial.split_records)[range_index - 1] = record;
}

}  // namespace xa
