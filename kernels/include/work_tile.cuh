// The work of a CTA: a tile of query rows and the keys that they attend to. The host does not know lengths, so every
// CTA finds its tile by a scan over cu_seqlens_q.
//
// Packed GQA: the query rows of a sequence and one KV head are packed, row r being query r / group of head r % group of
// the group. A tile is up to kRows adjacent packed rows of one sequence.
//
// Metadata is untrusted. Lengths are clamped to the operands' sizes. Starts are clamped to [0, Tq], those of contiguous
// keys to [0, Tk], and then replaced by their running maximum. Sequences therefore never overlap, and the grid has a
// CTA for every tile. Ascending starts equal their running maximum, so planners check for that and compute it only if
// necessary (StartMaxima).
#pragma once

#include <cstdint>

#include "division.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"

namespace xa {

/// A tile of adjacent packed rows of one sequence (query and output rows). If `num_rows` is 0, there is no tile.
struct QoTile {
  int32_t sequence;
  int32_t first_token;  // row of q of the sequence's first query, in [0, Tq]
  int32_t len_q;
  int32_t len_k;
  int32_t leftpad_k;  // in [0, len_k]
  int32_t start_k;    // contiguous keys: row of K and V of the sequence's key 0
  int32_t first_row;  // packed row of the tile's row 0, counted in the sequence
  int32_t num_rows;
};

/// The keys of a tile: some row attends to each of [begin, end), every row to all of [common_begin, common_end).
struct KeyRange {
  int32_t begin;
  int32_t end;
  int32_t common_begin;
  int32_t common_end;
};

/// Running maxima of the starts: of queries, and of contiguous keys.
struct StartMaxima {
  int32_t q;  // negative if starts ascend, in which case there is nothing to keep
  int32_t k;
};
constexpr StartMaxima kStartsAscend = {-1, 0};

/// What a CTA works on. It is kept in shared memory, because the loop over keys needs it rarely and has no registers to
/// spare.
struct WorkTile {
  QoTile tile;
  KeyRange keys;
  int32_t kv_head;
  float score_factor;         // AttentionParams::score_factor times the scales of q and K
  StartMaxima maxima;         // decode: over the sequences up to the tile's
  int64_t warp_totals[2][4];  // scratch of the prefix sums
};

static_assert(sizeof(WorkTile) == 128, "shared_bytes in variants.toml include it");

/// Copies a work tile without what only planners use.
__device__ __forceinline__ void copy_work(WorkTile& to, const WorkTile& from) {
  to.tile = from.tile;
  to.keys = from.keys;
  to.kv_head = from.kv_head;
  to.score_factor = from.score_factor;
}

/// Whether `maxima` are those of starts that ascend.
__device__ __forceinline__ bool starts_ascend(const StartMaxima& maxima) { return maxima.q < 0; }

__device__ __forceinline__ int32_t clamp(int32_t x, int32_t low, int32_t high) { return min(max(x, low), high); }

/// The number of sequences as the caller gives it.
__device__ __forceinline__ int32_t given_sequences(const AttentionParams& params) {
  return params.num_seqs == nullptr ? params.max_seqs : __ldg(params.num_seqs);
}
__device__ __forceinline__ int32_t live_sequences(const AttentionParams& params) {
  return params.num_seqs == nullptr ? params.max_seqs : clamp(__ldg(params.num_seqs), 0, params.max_seqs);
}

__device__ __forceinline__ bool has_contiguous_keys(const AttentionParams& params) {
  return params.block_table == nullptr;
}

/// First row of q of sequence `b`, which ends sequence `b - 1`, if starts ascend; b in [0, B].
__device__ __forceinline__ int32_t start_of(const AttentionParams& params, int32_t b) {
  return clamp(__ldg(params.cu_seqlens_q + b), 0, params.num_tokens);
}

/// Likewise of contiguous K and V.
__device__ __forceinline__ int32_t key_start_of(const AttentionParams& params, int32_t b) {
  return clamp(__ldg(params.cu_seqlens_k + b), 0, params.capacity);
}

/// Queries of a sequence of `rows` rows, of which it uses `used`. Negative if starts descend; it then has none.
__device__ __forceinline__ int32_t query_count(int32_t rows, int32_t used) { return min(rows, max(used, 0)); }

/// The metadata of one sequence's keys.
struct KeyMetadata {
  int32_t start;  // of cu_seqlens_k; clamped if keys are contiguous
  int32_t end;
  int32_t used;
  int32_t leftpad;

  /// Sets the fields of `tile` that describe keys, clamped.
  __device__ __forceinline__ void describe(const AttentionParams& params, QoTile& tile) const {
    const bool contiguous = has_contiguous_keys(params);
    tile.start_k = contiguous ? start : 0;
    const int32_t capacity = contiguous ? max(end - start, 0) : params.capacity;
    if (params.seqused_k != nullptr) {
      tile.len_k = clamp(used, 0, capacity);
    } else if (contiguous) {
      tile.len_k = capacity;
    } else {
      const uint32_t length = static_cast<uint32_t>(end) - static_cast<uint32_t>(start);
      tile.len_k = end < start ? 0 : min(length, static_cast<uint32_t>(capacity));
    }
    tile.leftpad_k = clamp(leftpad, 0, tile.len_k);
  }
};

/// Reads entries `first` to `first + kEntries - 1` of a list of `count` entries. Entries past the end, and all entries
/// if `list` is null, become `otherwise`. The loads are independent.
template <int kEntries>
__device__ __forceinline__ void read_entries(int32_t (&to)[kEntries], const int32_t* list, int32_t first, int32_t count,
                                             int32_t otherwise) {
#pragma unroll
  for (int i = 0; i < kEntries; ++i) to[i] = otherwise;
  if (list == nullptr) return;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    if (first + i < count) to[i] = __ldg(list + first + i);
  }
}

/// The metadata of adjacent sequences. All B slots are read, and those past num_seqs ignored later, so that the loads
/// do not wait for num_seqs.
template <int kCount>
struct Metadata {
  int32_t starts[kCount + 1];  // clamped
  int32_t used[kCount];
  int32_t starts_k[kCount + 1];  // clamped if keys are contiguous
  int32_t used_k[kCount];
  int32_t leftpads[kCount];

  __device__ __forceinline__ void load(const AttentionParams& params, int32_t first) {
    const int32_t count = params.max_seqs;
    read_entries(starts, params.cu_seqlens_q, first, count + 1, 0);
    read_entries(used, params.seqused_q, first, count, params.num_tokens);
    read_entries(starts_k, params.cu_seqlens_k, first, count + 1, 0);
    read_entries(used_k, params.seqused_k, first, count, 0);
    read_entries(leftpads, params.leftpad_k, first, count, 0);
#pragma unroll
    for (int32_t& start : starts) start = clamp(start, 0, params.num_tokens);
    if (!has_contiguous_keys(params)) return;
#pragma unroll
    for (int32_t& start : starts_k) start = clamp(start, 0, params.capacity);
  }
  /// The number of live sequences, which was loaded as `given`. Starts are not negative: that the number seems to
  /// depend on one keeps the compiler from waiting for it before it issues the loads of the metadata.
  __device__ __forceinline__ int32_t live_sequences(const AttentionParams& params, int32_t given) const {
    return clamp(given + (ptx::opaque(starts[1]) >> 31), 0, params.max_seqs);
  }
  /// Whether sequence `i` ends where it starts or later.
  __device__ __forceinline__ bool ascends(const AttentionParams& params, int i) const {
    // Without a branch, which would diverge.
    const int32_t min_length =
        min(starts[i + 1] - starts[i], has_contiguous_keys(params) ? starts_k[i + 1] - starts_k[i] : 0);
    return min_length >= 0;
  }
  __device__ __forceinline__ int32_t len_q(int i) const { return query_count(starts[i + 1] - starts[i], used[i]); }
  __device__ __forceinline__ KeyMetadata keys(int i) const {
    return KeyMetadata{starts_k[i], starts_k[i + 1], used_k[i], leftpads[i]};
  }
  /// A tile of sequence `i`, which is sequence `b` of the batch, without its rows.
  __device__ __forceinline__ QoTile sequence(const AttentionParams& params, int i, int32_t b) const {
    QoTile tile = {};
    tile.sequence = b;
    tile.first_token = starts[i];
    tile.len_q = max(len_q(i), 0);
    keys(i).describe(params, tile);
    return tile;
  }

  /// Replaces the starts by their running maximum. A warp calls this, its lanes having adjacent sequences. `maxima` are
  /// those of all starts before; they are updated.
  __device__ __forceinline__ void ascend(const AttentionParams& params, StartMaxima& maxima) {
    maxima.q = running_maximum(starts, maxima.q);
    if (has_contiguous_keys(params)) maxima.k = running_maximum(starts_k, maxima.k);
  }

 private:
  static __device__ __forceinline__ int32_t running_maximum(int32_t (&list)[kCount + 1], int32_t before) {
    const int lane = threadIdx.x % 32;
    int32_t largest = list[0];
#pragma unroll
    for (int i = 1; i <= kCount; ++i) list[i] = largest = max(largest, list[i]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      // __shfl_up_sync returns a lane's own value if no lane is `distance` below it.
      largest = max(largest, __shfl_up_sync(~0u, largest, distance));
    }
    const int32_t lower_lanes = __shfl_up_sync(~0u, largest, 1);
    const int32_t lower_bound = lane > 0 ? max(lower_lanes, before) : before;
#pragma unroll
    for (int32_t& start : list) start = max(start, lower_bound);
    return max(__shfl_sync(~0u, largest, 31), before);
  }
};

/// Updates `maxima` by the starts [begin, end). A warp calls this.
__device__ __forceinline__ void raise_maxima(const AttentionParams& params, int32_t begin, int32_t end,
                                             StartMaxima& maxima) {
#pragma unroll 1
  for (int32_t b = begin + static_cast<int32_t>(threadIdx.x % 32); b < end; b += 32) {
    maxima.q = max(maxima.q, start_of(params, b));
    if (has_contiguous_keys(params)) maxima.k = max(maxima.k, key_start_of(params, b));
  }
  maxima.q = __reduce_max_sync(~0u, maxima.q);
  maxima.k = __reduce_max_sync(~0u, maxima.k);
}

/// The state of Metadata::ascend for a warp that visits the sequences in rounds, with those of other warps in between.
struct StartScan {
  StartMaxima maxima = {0, 0};
  int32_t next = 0;  // `maxima` covers the starts before this one

  /// `first` is the first sequence of lane 0.
  template <int kCount>
  __device__ __forceinline__ void ascend(const AttentionParams& params, int32_t first, Metadata<kCount>& metadata) {
    // There are B + 1 starts.
    raise_maxima(params, next, min(first, params.max_seqs + 1), maxima);
    metadata.ascend(params, maxima);
    next = first + 32 * kCount;
  }
};

/// The query and the head of each packed row of a tile.
struct PackedRows {
  int32_t first_query;  // of row 0, counted in the sequence
  int32_t first_head;   // of row 0, among the group's heads
  int32_t group;
  float group_reciprocal;

  __device__ __forceinline__ PackedRows(const AttentionParams& params, int32_t first_row)
      : first_query(first_row / params.group),
        first_head(first_row - first_query * params.group),
        group(params.group),
        group_reciprocal(params.group_reciprocal) {}

  /// Query of row `row`, counted in the sequence. Rows past the tile's last have queries past the sequence's last.
  __device__ __forceinline__ int32_t query(int32_t row) const {
    return first_query + divide_small(first_head + row, group_reciprocal);
  }
  /// Head of row `row`, among the group's heads.
  __device__ __forceinline__ int32_t head(int32_t row) const {
    return first_head + row - (query(row) - first_query) * group;
  }
};

/// The rows of q, out and lse of a tile's rows.
struct RowMap {
  PackedRows rows;
  int32_t num_rows;
  int32_t first_token;
  int32_t head_base;  // query head 0 of the group

  __device__ __forceinline__ RowMap(const AttentionParams& params, const QoTile& tile, int32_t kv_head)
      : RowMap(params, tile, kv_head, params.group) {}
  /// `params.group` counts padding heads, which follow the `group_heads` heads of a group.
  __device__ __forceinline__ RowMap(const AttentionParams& params, const QoTile& tile, int32_t kv_head,
                                    int32_t group_heads)
      : rows(params, tile.first_row),
        num_rows(tile.num_rows),
        first_token(tile.first_token),
        head_base(kv_head * group_heads) {}

  __device__ __forceinline__ int32_t token(int32_t row) const { return first_token + rows.query(row); }
  __device__ __forceinline__ int32_t head(int32_t row) const { return head_base + rows.head(row); }
};

/// The keys [begin, end) that a query of a sequence attends to, within [leftpad_k, len_k).
struct Visibility {
  int32_t shift;  // query i is at the position of key i + shift
  int32_t leftpad_k;
  int32_t len_k;
  int32_t window_left;
  int32_t window_right;

  __device__ __forceinline__ Visibility(const AttentionParams& params, const QoTile& tile)
      : Visibility(params, tile, shift_of(params, tile)) {}
  __device__ __forceinline__ Visibility(const AttentionParams& params, const QoTile& tile, int32_t known_shift)
      : shift(known_shift),
        leftpad_k(tile.leftpad_k),
        len_k(tile.len_k),
        window_left(params.window_left),
        window_right(params.window_right) {}

  static __device__ __forceinline__ int32_t shift_of(const AttentionParams& params, const QoTile& tile) {
    if (params.q_offset != nullptr) {
      // Planners describe sequences past the last one too, and ignore them later.
      if (tile.sequence >= params.max_seqs) return 0;
      return clamp(__ldg(params.q_offset + tile.sequence), -kLargestQOffset, kLargestQOffset);
    }
    return params.top_left != 0 ? 0 : tile.len_k - tile.len_q;
  }
  __device__ __forceinline__ int32_t begin(int32_t query) const {
    const int32_t position = query + shift;
    return window_left < 0 || position < window_left ? leftpad_k : max(position - window_left, leftpad_k);
  }
  __device__ __forceinline__ int32_t end(int32_t query) const {
    const int32_t position = query + shift;
    return window_right < 0 || position >= len_k - 1 - window_right ? len_k : max(position + 1 + window_right, 0);
  }
};

/// The keys of queries `first` to `last`.
__device__ __forceinline__ KeyRange visible_keys(const Visibility& visibility, int32_t first, int32_t last) {
  const KeyRange keys = {visibility.begin(first), visibility.end(last), visibility.begin(last), visibility.end(first)};
  return keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
}
__device__ __forceinline__ KeyRange visible_keys(const AttentionParams& params, const QoTile& tile) {
  int32_t first = 0, first_head = 0;
  if (tile.first_row > 0) {  // mostly not, and a division has twenty instructions
    first = tile.first_row / params.group;
    first_head = tile.first_row - first * params.group;
  }
  const int32_t last = first + divide_small(first_head + tile.num_rows - 1, params.group_reciprocal);
  return visible_keys(Visibility(params, tile), first, last);
}

/// The first of the len_q keys that belong to the sequence's queries. If AttentionParams::new_tokens is set, the cache
/// does not have these keys yet.
__device__ __forceinline__ int32_t first_new_key(const QoTile& tile) { return tile.len_k - tile.len_q; }

template <typename Sum>
__device__ __forceinline__ Sum sum_up_to_this_lane(Sum mine) {
  const int lane = threadIdx.x % 32;
  Sum sum = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Sum other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  return sum;
}

/// Sets what does not depend on the tile. Call this before the tile is set.
template <typename LogitsTransform>
__device__ __forceinline__ void init_work_tile(const AttentionParams& params, WorkTile& work, int32_t kv_head) {
  if (threadIdx.x != 0) return;
  work.kv_head = kv_head;
  work.score_factor = LogitsTransform::factor(params, kv_head);
}

/// Tells which rows of q belong to a sequence. Calls must be in ascending order of rows.
class SequenceSearch {
 public:
  __device__ __forceinline__ SequenceSearch(const AttentionParams& params, bool ascends)
      : params_(params), num_seqs_(live_sequences(params)), ascends_(ascends) {}

  /// Whether row `token` of q belongs to a sequence.
  __device__ __forceinline__ bool finds_sequence(int32_t token) {
    if (ascends_) {
      bisect(token);
    } else {
      continue_scan(token);
    }
    const int32_t b = next_ - 1;
    if (b < 0 || b >= num_seqs_) return false;
    return params_.seqused_q == nullptr || token - start_ < __ldg(params_.seqused_q + b);
  }

 private:
  /// Bisects for the last sequence that starts at or before the row: the only one that can have it.
  __device__ __forceinline__ void bisect(int32_t token) {
    int32_t begin = -1, end = num_seqs_ + 1;
    while (end - begin > 1) {
      const int32_t middle = begin + (end - begin) / 2;
      (start_of(params_, middle) <= token ? begin : end) = middle;
    }
    next_ = end;
    if (begin >= 0) start_ = start_of(params_, begin);
  }
  /// The same for starts that do not ascend, on their running maximum. Continues from the previous call.
  __device__ __forceinline__ void continue_scan(int32_t token) {
#pragma unroll 1
    for (; next_ <= num_seqs_; ++next_) {
      const int32_t start = start_of(params_, next_);
      if (start > token) break;
      start_ = max(start_, start);
    }
  }

  const AttentionParams& params_;
  const int32_t num_seqs_;
  const bool ascends_;
  int32_t next_ = 0;   // the first start past the row
  int32_t start_ = 0;  // the running maximum of the starts before `next_`
};

}  // namespace xa
