// What a CTA of the gradients works on: a fixed block of rows of one KV head, and its segments.
//
// A CTA holds a block of kHeld rows of memory, independent of where sequences begin: packed query rows (token major,
// the heads of the group next to each other) in the dQ kernel, keys in the dK/dV kernel. A segment is the part of the
// block that belongs to one sequence. The CTA processes its segments in order and streams for each only the other
// operand's rows of that sequence. Rows of the block that belong to no segment are padding rows; they become zeros
// first.
//
//     rows held      0                                                     kHeld
//                    |  sequence 3  |    sequence 4    |  padding  | seq. 5  |
//                    |<- segment 1->|<--- segment 2 -->|  zeros    |<- s. 3->|
//
// So exactly one CTA writes each row of a gradient, whatever the metadata says, and a NaN of one sequence cannot reach
// the rows of another.
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// Statistics of one query row that each of its scores needs; logarithms are to base 2.
struct QueryRowStats {
  float negative_lse;    // -inf gives the row probabilities of 0: a row that attends to no key
  float delta;           // sum_c out_c dout_c - dlse
  float negative_slope;  // minus the ALiBi slope of its head
  int32_t position;      // of its query among the keys of the segment's sequence; kNoPosition outside of the segment
};
constexpr int32_t kNoPosition = INT32_MIN;

/// Where a query row begins: its addresses in Q and dO, and in the bias.
template <typename BiasPlace>
struct QueryRowPlace {
  const void* q;
  const void* dout;
  BiasPlace bias;
};

/// Columns [begin, end) of the score matrix of a segment. Columns are the streamed rows: keys of the sequence (dQ), or
/// its packed query rows (dK/dV), both counted from the sequence's first one.
struct ColumnRange {
  int32_t begin;
  int32_t end;
};

/// The rows of the block that belong to one sequence, and the columns that are streamed for them. It lies in shared
/// memory; the fields from `kv_head` on are the CTA's and outlive a segment.
struct SequenceSegment {
  QoTile tile;          // the sequence; first_row and num_rows are the segment's rows, counted in the block
  ColumnRange columns;  // visible to some row of the segment
  ColumnRange common;   // visible to every row of the block: no mask is needed there
  int32_t first_key;    // dK/dV: the first row of the block, counted in the sequence
  int32_t kv_head;
  int32_t first;           // first row of the block: a row of K and V, or a packed query row counted over all tokens
  int32_t clears_padding;  // 1 until padding rows have been cleared
  // State of the search for segments: running maxima of the starts before `base`, and bit i % 32 of word i / 32 for
  // sequence base + i that has a segment.
  StartMaxima maxima;
  uint32_t has_segment[8];
};

__device__ __forceinline__ int32_t clamp_to(int64_t x, int32_t low, int32_t high) {
  return static_cast<int32_t>(min(max(x, static_cast<int64_t>(low)), static_cast<int64_t>(high)));
}

/// Metadata of sequence `base` + thread, with starts raised to their running maximum. All lanes of a warp call it.
__device__ __forceinline__ Metadata<1> load_metadata(const AttentionParams& params, const SequenceSegment& segment,
                                                     int32_t base) {
  const int32_t thread = ptx::thread();
  Metadata<1> metadata;
  metadata.load(params, base + thread);
  if (__builtin_expect(!starts_ascend(segment.maxima), false)) {
    StartScan scan = {segment.maxima, base};
    scan.ascend(params, base + thread / 32 * 32, metadata);
  }
  return metadata;
}

/// The queries [begin, end) of a sequence that attend to some of its keys [first, last], not clamped to the sequence.
/// The keys are ones that some query can attend to.
struct AttendingQueries {
  int64_t begin;
  int64_t end;

  __device__ __forceinline__ AttendingQueries(const Visibility& visibility, int32_t first, int32_t last) {
    const int64_t shift = visibility.shift;
    begin = visibility.window_right < 0 ? INT32_MIN : first - static_cast<int64_t>(visibility.window_right) - shift;
    end = visibility.window_left < 0 ? INT32_MAX : last + static_cast<int64_t>(visibility.window_left) - shift + 1;
  }
};

/// Segments of a block of kHeld packed query rows that begins at SequenceSegment::first.
template <int kHeld>
struct HeldQueries {
  static constexpr int kRows = kHeld;

  /// Fills in the segment of the sequence in `tile`; `columns` is empty if it has no row in the block or attends to no
  /// key.
  static __device__ __forceinline__ void describe(const AttentionParams& params, QoTile tile, int32_t first,
                                                  SequenceSegment& segment) {
    const int64_t group = params.group, start = tile.first_token * group - first;
    tile.first_row = clamp_to(start, 0, kHeld);
    tile.num_rows = clamp_to(start + tile.len_q * group, 0, kHeld) - tile.first_row;
    ColumnRange columns = {0, 0}, common = {0, 0};
    if (tile.num_rows > 0) {
      const Visibility visibility(params, tile);
      const int32_t low = query(params, tile, first + tile.first_row);
      const int32_t high = query(params, tile, first + tile.first_row + tile.num_rows - 1);
      columns = {visibility.begin(low), visibility.end(high)};
      if (tile.num_rows == kHeld) common = {visibility.begin(high), visibility.end(low)};
    }
    segment.tile = tile;
    segment.columns = columns;
    segment.common = common;
  }
  /// Position of the query of row `row` among the keys of the segment's sequence.
  static __device__ __forceinline__ int32_t position(const AttentionParams& params, const SequenceSegment& segment,
                                                     int32_t row) {
    if (row < segment.tile.first_row || row >= segment.tile.first_row + segment.tile.num_rows) return kNoPosition;
    return query(params, segment.tile, segment.first + row) + Visibility(params, segment.tile).shift;
  }

 private:
  /// Query, counted in the sequence, of a packed row, counted over all tokens.
  static __device__ __forceinline__ int32_t query(const AttentionParams& params, const QoTile& tile, int32_t row) {
    return row / params.group - tile.first_token;
  }
};

/// Segments of a block of kHeld rows of K and V that begins at SequenceSegment::first.
template <int kHeld>
struct HeldKeys {
  static constexpr int kRows = kHeld;

  /// As HeldQueries::describe. Only keys that some query attends to belong to the segment: the gradients of the others
  /// are zero.
  static __device__ __forceinline__ void describe(const AttentionParams& params, QoTile tile, int32_t first,
                                                  SequenceSegment& segment) {
    ColumnRange columns = {0, 0}, common = {0, 0};
    tile.num_rows = 0;
    if (tile.len_q > 0) {
      const Visibility visibility(params, tile);
      const int64_t start = static_cast<int64_t>(tile.start_k) - first;
      tile.first_row = clamp_to(start + visibility.begin(0), 0, kHeld);
      tile.num_rows = clamp_to(start + visibility.end(tile.len_q - 1), 0, kHeld) - tile.first_row;
      if (tile.num_rows > 0) {
        const int32_t low = static_cast<int32_t>(tile.first_row - start), high = low + tile.num_rows - 1;
        const AttendingQueries any_key(visibility, low, high), lowest_key(visibility, low, low),
            highest_key(visibility, high, high);
        columns = packed(params, tile, any_key.begin, any_key.end);
        if (tile.num_rows == kHeld) common = packed(params, tile, highest_key.begin, lowest_key.end);
      }
    }
    segment.tile = tile;
    segment.columns = columns;
    segment.common = common;
    segment.first_key = first - tile.start_k;
  }
  /// The packed query rows that attend to the key of row `row`.
  static __device__ __forceinline__ ColumnRange columns_of(const AttentionParams& params,
                                                           const SequenceSegment& segment, int32_t row) {
    if (row < segment.tile.first_row || row >= segment.tile.first_row + segment.tile.num_rows) return ColumnRange{0, 0};
    const int32_t key = segment.first_key + row;
    const AttendingQueries queries(Visibility(params, segment.tile), key, key);
    return packed(params, segment.tile, queries.begin, queries.end);
  }

 private:
  /// Queries [begin, end) as packed rows, clamped to the sequence.
  static __device__ __forceinline__ ColumnRange packed(const AttentionParams& params, const QoTile& tile, int64_t begin,
                                                       int64_t end) {
    const ColumnRange columns = {clamp_to(begin, 0, tile.len_q) * params.group,
                                 clamp_to(end, 0, tile.len_q) * params.group};
    return columns.begin < columns.end ? columns : ColumnRange{0, 0};
  }
};

/// Calls `work` for each segment of the block, in order of sequences; `segment` then describes it. Calls `clear` once
/// before the first segment, unless that has all `count()` rows of the block that exist. All threads of the CTA call
/// it.
template <int kThreads, typename Held, typename Count, typename Work, typename Clear>
__device__ __forceinline__ void for_segments(const AttentionParams& params, SequenceSegment& segment,
                                             const Count& count, const Work& work, const Clear& clear) {
  static_assert(kThreads <= 256, "SequenceSegment::has_segment");
  // The state of the search stays in shared memory, so that it takes no registers while rows are streamed; metadata is
  // read again for each segment.
  for (int32_t base = 0; base < live_sequences(params);) {
    const int32_t thread = ptx::thread();
    const bool live = base + thread < live_sequences(params);
    bool ascends = true;
    {
      const Metadata<1> metadata = load_metadata(params, segment, base);
      SequenceSegment candidate;
      candidate.columns = {0, 0};
      if (live) {
        ascends = metadata.ascends(params, 0);
        Held::describe(params, metadata.sequence(params, 0, base + thread), segment.first, candidate);
      }
      const uint32_t has_segment = __ballot_sync(~0u, candidate.columns.begin < candidate.columns.end);
      if (thread % 32 == 0) segment.has_segment[thread / 32] = has_segment;
    }
    if (__builtin_expect(!__syncthreads_and(ascends), false)) {
      // Starts do not ascend in this round: repeat it with starts raised to their running maximum. Earlier starts
      // ascend up to the first one of this round, so 0 may stand for their maximum.
      if (thread == 0) segment.maxima = {0, 0};
      __syncthreads();
      continue;
    }
#pragma unroll 1
    for (int32_t index = 0; index < kThreads; ++index) {
      const uint32_t left = segment.has_segment[index / 32] >> index % 32;
      if (left == 0) {
        index |= 31;
        continue;
      }
      index += __ffs(left) - 1;
      if (ptx::thread() / 32 == index / 32) {
        const Metadata<1> metadata = load_metadata(params, segment, base);
        const QoTile sequence = metadata.sequence(params, 0, base + index);
        if (ptx::thread() == index) Held::describe(params, sequence, segment.first, segment);
      }
      __syncthreads();
      if (segment.clears_padding != 0) {
        if (segment.tile.num_rows < count()) clear();
        __syncthreads();
        if (ptx::thread() == 0) segment.clears_padding = 0;
      }
      work();
      index = segment.tile.sequence % kThreads;
      base = segment.tile.sequence - index;
      __syncthreads();
    }
    __syncthreads();
    if (__builtin_expect(!starts_ascend(segment.maxima), false)) {
      StartMaxima maxima = segment.maxima;
      __syncthreads();
      if (ptx::thread() < 32) raise_maxima(params, base, min(base + kThreads, live_sequences(params)), maxima);
      if (ptx::thread() == 0) segment.maxima = maxima;
      __syncthreads();
    }
    base += kThreads;
  }
  if (segment.clears_padding != 0) clear();
}

}  // namespace xa
