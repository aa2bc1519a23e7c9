// What a CTA of the gradients works on. The rows that it holds are rows of memory, whoever's they are: packed query
// rows of a KV head, token after token with the group's heads side by side, or keys. It makes a pass for each sequence
// that has some of them, in order, which writes these; the others become zeros first. So every row of a gradient is
// some CTA's, whatever the metadata says, and no sequence's NaN comes to another's rows.
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// What is known of a query row: to base 2.
struct QueryRow {
  float negative_lse;  // -inf where nothing is to come of the row
  float delta;
  float negative_slope;
  int32_t position;  // where its query stands among the keys; kNowhere in a sequence of others
};
constexpr int32_t kNowhere = INT32_MIN;

/// Columns [begin, end) that a row held takes part in, counted as the streamed rows of a pass are.
struct Span {
  int32_t begin;
  int32_t end;
};

/// One sequence, and what of it is streamed.
struct Pass {
  QoTile tile;        // first_row and num_rows: the rows held that are the sequence's, counted in the CTA
  Span columns;       // that some row held takes part in: keys of the sequence, or its packed query rows
  Span common;        // that every row held takes part in
  int32_t first_key;  // dkdv: the first row held, counted in the sequence
  int32_t kv_head;
  int32_t first;   // row held: of K and V, or packed query row of the KV head, counted over all tokens
  int32_t clears;  // whether rows may be left that are no sequence's
  // Of the search: what comes before the sequences looked at, and a bit for each of these.
  StartMaxima maxima;
  uint32_t found[8];
};

__device__ __forceinline__ int32_t clamp_to(int64_t x, int32_t low, int32_t high) {
  return static_cast<int32_t>(min(max(x, static_cast<int64_t>(low)), static_cast<int64_t>(high)));
}

/// What the metadata says of this thread's of the sequences that are looked at, from `base` on. The work of a warp.
__device__ __forceinline__ Metadata<1> load_metadata(const AttentionParams& params, const Pass& pass, int32_t base) {
  const int32_t thread = ptx::thread();
  Metadata<1> metadata;
  metadata.load(params, base + thread);
  if (__builtin_expect(!starts_ascend(pass.maxima), false)) {
    StartScan scan = {pass.maxima, base};
    scan.ascend(params, base + thread / 32 * 32, metadata);
  }
  return metadata;
}

/// The queries [begin, end) of a sequence that see some of its keys [first, last], which are keys that can be seen.
struct Seers {
  int64_t begin;
  int64_t end;

  __device__ __forceinline__ Seers(const Visibility& visibility, int32_t first, int32_t last) {
    const int64_t shift = visibility.shift;
    begin = visibility.window_right < 0 ? INT32_MIN : first - static_cast<int64_t>(visibility.window_right) - shift;
    end = visibility.window_left < 0 ? INT32_MAX : last + static_cast<int64_t>(visibility.window_left) - shift + 1;
  }
};

/// How kHeld packed query rows from Pass::first on take part in sequences.
template <int kHeld>
struct HeldQueries {
  /// The pass of a sequence; without columns where there is none.
  static __device__ __forceinline__ void describe(const AttentionParams& params, QoTile tile, int32_t first,
                                                  Pass& pass) {
    const int64_t group = params.group, start = tile.first_token * group - first;
    tile.first_row = clamp_to(start, 0, kHeld);
    tile.num_rows = clamp_to(start + tile.len_q * group, 0, kHeld) - tile.first_row;
    Span columns = {0, 0}, common = {0, 0};
    if (tile.num_rows > 0) {
      const Visibility visibility(params, tile);
      const int32_t low = query(params, tile, first + tile.first_row);
      const int32_t high = query(params, tile, first + tile.first_row + tile.num_rows - 1);
      columns = {visibility.begin(low), visibility.end(high)};
      if (tile.num_rows == kHeld) common = {visibility.begin(high), visibility.end(low)};
    }
    pass.tile = tile;
    pass.columns = columns;
    pass.common = common;
  }
  /// Where the query of row `row` stands among the keys; the pass has begun.
  static __device__ __forceinline__ int32_t position(const AttentionParams& params, const Pass& pass, int32_t row) {
    if (row < pass.tile.first_row || row >= pass.tile.first_row + pass.tile.num_rows) return kNowhere;
    return query(params, pass.tile, pass.first + row) + Visibility(params, pass.tile).shift;
  }

 private:
  /// Query, counted in the sequence, of a packed row, counted over all tokens.
  static __device__ __forceinline__ int32_t query(const AttentionParams& params, const QoTile& tile, int32_t row) {
    return row / params.group - tile.first_token;
  }
};

/// How kHeld rows of K and V from Pass::first on take part in sequences.
template <int kHeld>
struct HeldKeys {
  static __device__ __forceinline__ void describe(const AttentionParams& params, QoTile tile, int32_t first,
                                                  Pass& pass) {
    Span columns = {0, 0}, common = {0, 0};
    tile.num_rows = 0;
    if (tile.len_q > 0) {
      const Visibility visibility(params, tile);
      // Of keys that nobody sees nothing is streamed.
      const int64_t start = static_cast<int64_t>(tile.start_k) - first;
      tile.first_row = clamp_to(start + visibility.begin(0), 0, kHeld);
      tile.num_rows = clamp_to(start + visibility.end(tile.len_q - 1), 0, kHeld) - tile.first_row;
      if (tile.num_rows > 0) {
        const int32_t low = static_cast<int32_t>(tile.first_row - start), high = low + tile.num_rows - 1;
        const Seers of_some(visibility, low, high), of_low(visibility, low, low), of_high(visibility, high, high);
        columns = packed(params, tile, of_some.begin, of_some.end);
        if (tile.num_rows == kHeld) common = packed(params, tile, of_high.begin, of_low.end);
      }
    }
    pass.tile = tile;
    pass.columns = columns;
    pass.common = common;
    pass.first_key = first - tile.start_k;
  }
  /// The packed query rows that see row `row`.
  static __device__ __forceinline__ Span span(const AttentionParams& params, const Pass& pass, int32_t row) {
    if (row < pass.tile.first_row || row >= pass.tile.first_row + pass.tile.num_rows) return Span{0, 0};
    const int32_t key = pass.first_key + row;
    const Seers seers(Visibility(params, pass.tile), key, key);
    return packed(params, pass.tile, seers.begin, seers.end);
  }

 private:
  static __device__ __forceinline__ Span packed(const AttentionParams& params, const QoTile& tile, int64_t begin,
                                                int64_t end) {
    const Span span = {clamp_to(begin, 0, tile.len_q) * params.group, clamp_to(end, 0, tile.len_q) * params.group};
    return span.begin < span.end ? span : Span{0, 0};
  }
};

/// Calls `work` for each sequence, in order, that rows held take part in, and `clear` before, unless the first one has
/// all of the `count()` rows that there are. Every thread of the CTA comes here; `pass` has its first row and its head.
template <int kThreads, typename Held, typename Count, typename Work, typename Clear>
__device__ __forceinline__ void for_passes(const AttentionParams& params, Pass& pass, const Count& count,
                                           const Work& work, const Clear& clear) {
  static_assert(kThreads <= 256, "Pass::found");
  // No register holds any of this while rows stream past: what is found is looked up again.
  for (int32_t base = 0; base < live_sequences(params);) {
    const int32_t thread = ptx::thread();
    const bool live = base + thread < live_sequences(params);
    bool ascends = true;
    {
      const Metadata<1> metadata = load_metadata(params, pass, base);
      Pass looked;
      looked.columns = {0, 0};
      if (live) {
        ascends = metadata.ascends(params, 0);
        Held::describe(params, metadata.sequence(params, 0, base + thread), pass.first, looked);
      }
      const uint32_t found = __ballot_sync(~0u, looked.columns.begin < looked.columns.end);
      if (thread % 32 == 0) pass.found[thread / 32] = found;
    }
    if (__builtin_expect(!__syncthreads_and(ascends), false)) {
      // Starts have ascended so far: those of this round are no less than any before.
      if (thread == 0) pass.maxima = {0, 0};
      __syncthreads();
      continue;
    }
#pragma unroll 1
    for (int32_t index = 0; index < kThreads; ++index) {
      const uint32_t left = pass.found[index / 32] >> index % 32;
      if (left == 0) {
        index |= 31;
        continue;
      }
      index += __ffs(left) - 1;
      if (ptx::thread() / 32 == index / 32) {
        const Metadata<1> metadata = load_metadata(params, pass, base);
        const QoTile sequence = metadata.sequence(params, 0, base + index);
        if (ptx::thread() == index) Held::describe(params, sequence, pass.first, pass);
      }
      __syncthreads();
      if (pass.clears != 0) {
        if (pass.tile.num_rows < count()) clear();
        __syncthreads();
        if (ptx::thread() == 0) pass.clears = 0;
      }
      work();
      index = pass.tile.sequence % kThreads;
      base = pass.tile.sequence - index;
      __syncthreads();
    }
    __syncthreads();
    if (__builtin_expect(!starts_ascend(pass.maxima), false)) {
      StartMaxima maxima = pass.maxima;
      if (ptx::thread() < 32) raise_maxima(params, base, min(base + kThreads, live_sequences(params)), maxima);
      if (ptx::thread() == 0) pass.maxima = maxima;
      __syncthreads();
    }
    base += kThreads;
  }
  if (pass.clears != 0) clear();
}

}  // namespace xa
