// Which rows a CTA works on. Lengths are known on the device alone, so every CTA derives its tile from cu_seqlens_q.
//
// The query rows of a sequence and one KV head are packed: packed row r is query r / group of head r % group. A tile is
// up to kRows neighbouring packed rows of one sequence; tiles are numbered over sequences, the last rows of a sequence
// first, because under a causal mask those are the longest.
//
// Metadata is never trusted: starts are clamped to [0, Tq], an end to [start, Tq], lengths to what is there. Where
// starts descend, sequences can overlap; a row then belongs to the first sequence that claims it.
#pragma once

#include <cstdint>

#include "attention_params.cuh"

namespace xa {

/// Neighbouring packed rows of one sequence. `num_rows` is 0 where there is no such tile.
struct Tile {
  int32_t sequence;
  int32_t first_token;  // of the sequence, in [0, Tq]
  int32_t len_q;
  int32_t len_k;
  int32_t leftpad_k;  // in [0, len_k]
  int32_t start_k;    // contiguous: row of K and V that is the sequence's key 0
  int32_t first_row;  // of the tile, packed, counted in the sequence
  int32_t num_rows;
};

/// Keys [begin, end) that some row of a tile sees, of which every row sees [common_begin, common_end).
struct KeyRange {
  int32_t begin;
  int32_t end;
  int32_t common_begin;
  int32_t common_end;
};

/// Whether starts descend somewhere, so that sequences can overlap. Without that the grid holds every tile.
enum class Overlap : int32_t {
  kNone,
  kPossible,
  kMoreTiles,  // and there are tiles left for a further round of the same CTAs
};

/// What a CTA knows about its work, in shared memory: the loop over keys wants it now and then only, and has no
/// registers to spare.
struct Plan {
  Tile tile;
  KeyRange keys;
  int32_t kv_head;
  int32_t round;  // how many tiles the CTA has seen
  Overlap overlap;
  float score_factor;         // AttentionParams::score_factor times the scales of q and K
  int64_t warp_totals[2][4];  // of the search
};

static_assert(sizeof(Plan) == 128, "what a CTA asks for beyond its rows");

__device__ __forceinline__ int32_t clamp(int32_t x, int32_t low, int32_t high) { return min(max(x, low), high); }

__device__ __forceinline__ int32_t live_sequences(const AttentionParams& params) {
  return params.num_seqs == nullptr ? params.max_seqs : clamp(__ldg(params.num_seqs), 0, params.max_seqs);
}

/// Where sequence `b` starts and `b - 1` ends; b in [0, B].
__device__ __forceinline__ int32_t start_of(const AttentionParams& params, int32_t b) {
  return clamp(__ldg(params.cu_seqlens_q + b), 0, params.num_tokens);
}

/// Queries of a sequence of `rows` rows, of which it uses `used`. Negative where starts descend: it has none.
__device__ __forceinline__ int32_t query_count(int32_t rows, int32_t used) { return min(rows, max(used, 0)); }

/// What the metadata says of the keys of one sequence.
struct KeyMetadata {
  int32_t start;  // of cu_seqlens_k
  int32_t end;
  int32_t used;
  int32_t leftpad;

  /// Clamped, into `tile`.
  __device__ __forceinline__ void describe(const AttentionParams& params, Tile& tile) const {
    const bool contiguous = params.block_table == nullptr;
    tile.start_k = contiguous ? clamp(start, 0, params.capacity) : 0;
    const int32_t capacity = contiguous ? clamp(end, tile.start_k, params.capacity) - tile.start_k : params.capacity;
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

/// Entries `first` to `first + kEntries - 1` of metadata of `count` entries; `otherwise` past them, and where there is
/// no such metadata. The loads do not wait for one another.
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

/// What the metadata says of neighbouring sequences. Slots past the live ones are read, up to B, and what they hold is
/// ignored: so the loads wait neither for num_seqs nor for one another.
template <int kCount>
struct Metadata {
  int32_t starts[kCount + 1];  // clamped
  int32_t used[kCount];
  int32_t starts_k[kCount + 1];
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
  }
  __device__ __forceinline__ bool ascends(int i) const { return starts[i] <= starts[i + 1]; }
  __device__ __forceinline__ int32_t len_q(int i) const { return query_count(starts[i + 1] - starts[i], used[i]); }
  __device__ __forceinline__ KeyMetadata keys(int i) const {
    return KeyMetadata{starts_k[i], starts_k[i + 1], used_k[i], leftpads[i]};
  }
};

/// x / divisor for 0 <= x < 2^20, given 1.0f / divisor: (x + 0.5) / divisor keeps 0.5 / divisor away from every
/// integer.
__device__ __forceinline__ int32_t divide_small(int32_t x, float reciprocal) {
  return __float2int_rd((static_cast<float>(x) + 0.5f) * reciprocal);
}

/// Which query and head the packed rows of a tile are.
struct PackedRows {
  int32_t first_query;  // of the tile, counted in the sequence
  int32_t first_head;   // of that query, among the group's heads
  int32_t group;
  float group_reciprocal;

  __device__ __forceinline__ PackedRows(const AttentionParams& params, int32_t first_row)
      : first_query(first_row / params.group),
        first_head(first_row - first_query * params.group),
        group(params.group),
        group_reciprocal(params.group_reciprocal) {}

  /// Query, counted in the sequence, of row `row` of the tile; rows past the last one have queries past the last one.
  __device__ __forceinline__ int32_t query(int32_t row) const {
    return first_query + divide_small(first_head + row, group_reciprocal);
  }
  /// Head, among the group's, of row `row` of the tile.
  __device__ __forceinline__ int32_t head(int32_t row) const {
    return first_head + row - (query(row) - first_query) * group;
  }
};

/// Where the rows of a tile lie in q, out and lse.
struct RowMap {
  PackedRows rows;
  int32_t num_rows;
  int32_t first_token;
  int32_t head_base;  // query head 0 of the group

  __device__ __forceinline__ RowMap(const AttentionParams& params, const Tile& tile, int32_t kv_head)
      : rows(params, tile.first_row),
        num_rows(tile.num_rows),
        first_token(tile.first_token),
        head_base(kv_head * params.group) {}

  __device__ __forceinline__ int32_t token(int32_t row) const { return first_token + rows.query(row); }
  __device__ __forceinline__ int32_t head(int32_t row) const { return head_base + rows.head(row); }
};

/// The visible keys of one query: [begin, end) of [leftpad_k, len_k).
struct Visibility {
  int32_t shift;  // query i stands at key i + shift
  int32_t leftpad_k;
  int32_t len_k;
  int32_t window_left;
  int32_t window_right;

  __device__ __forceinline__ Visibility(const AttentionParams& params, const Tile& tile)
      : shift(params.top_left != 0 ? 0 : tile.len_k - tile.len_q),
        leftpad_k(tile.leftpad_k),
        len_k(tile.len_k),
        window_left(params.window_left),
        window_right(params.window_right) {}

  __device__ __forceinline__ int32_t begin(int32_t query) const {
    const int32_t position = query + shift;
    return window_left < 0 || position < window_left ? leftpad_k : max(position - window_left, leftpad_k);
  }
  __device__ __forceinline__ int32_t end(int32_t query) const {
    const int32_t position = query + shift;
    return window_right < 0 || position >= len_k - 1 - window_right ? len_k : max(position + 1 + window_right, 0);
  }
};

__device__ __forceinline__ KeyRange visible_keys(const AttentionParams& params, const Tile& tile) {
  const Visibility visibility(params, tile);
  const PackedRows rows(params, tile.first_row);
  const int32_t first = rows.query(0), last = rows.query(tile.num_rows - 1);
  const KeyRange keys = {visibility.begin(first), visibility.end(last), visibility.begin(last), visibility.end(first)};
  return keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
}

/// Keys from here on are those of the sequence's queries; where params.new_tokens are given, the cache does not hold
/// them.
__device__ __forceinline__ int32_t first_new_key(const Tile& tile) { return tile.len_k - tile.len_q; }

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

/// Number of this CTA's next tile, of those of a KV head.
__device__ __forceinline__ int64_t next_tile(const AttentionParams& params, const Plan& plan) {
  const int64_t tiles_a_round = gridDim.x / params.num_kv_heads;
  return plan.round * tiles_a_round + blockIdx.x / params.num_kv_heads;
}

/// Call before the first `find_tile`.
template <typename Score>
__device__ __forceinline__ void start_plan(const AttentionParams& params, Plan& plan) {
  if (threadIdx.x != 0) return;
  const int32_t kv_head = blockIdx.x % params.num_kv_heads;
  plan.round = 0;
  plan.kv_head = kv_head;
  plan.score_factor = Score::factor(params, kv_head);
}

/// Puts this CTA's next tile into `plan`. Neighbouring CTAs take one KV head each of the same tile. Every thread of the
/// CTA calls this; `overlap` is there after the next barrier, the rest at once.
template <int kThreads, int kRows>
__device__ __forceinline__ void find_tile(const AttentionParams& params, Plan& plan) {
  constexpr int kWarps = kThreads / 32, kPerThread = 4, kPerRound = kThreads * kPerThread;
  static_assert(kWarps <= 4, "Plan::warp_totals");
  const int warp = threadIdx.x / 32;
  const int32_t num_seqs = live_sequences(params);
  int64_t before = 0;
  bool ascends = true;
  if (threadIdx.x == 0) plan.tile.num_rows = 0;
  for (int32_t round_first = 0, parity = 0; round_first < params.max_seqs; round_first += kPerRound, parity ^= 1) {
    const int32_t first = round_first + threadIdx.x * kPerThread;
    Metadata<kPerThread> metadata;
    metadata.load(params, first);
    int32_t tiles[kPerThread], mine = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int32_t len_q = metadata.len_q(i);
      const bool live = first + i < num_seqs;
      ascends &= !live || metadata.ascends(i);
      const bool ours = live && len_q >= params.min_queries && len_q <= params.max_queries;
      tiles[i] = ours ? (len_q * params.group + kRows - 1) / kRows : 0;
      mine += tiles[i];
    }
    const int64_t inclusive = sum_up_to_this_lane(static_cast<int64_t>(mine));
    if (threadIdx.x % 32 == 31) plan.warp_totals[parity][warp] = inclusive;
    __syncthreads();
    int64_t exclusive = before + inclusive - mine;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int64_t total = plan.warp_totals[parity][w];
      if (w < warp) exclusive += total;
      before += total;
    }
    const int64_t wanted = next_tile(params, plan);
    if (wanted >= exclusive && wanted < exclusive + mine) {
      int32_t index = static_cast<int32_t>(wanted - exclusive);
      KeyMetadata keys = {};
      Tile tile = {};
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (index >= 0 && index < tiles[i]) {
          tile.sequence = first + i;
          tile.first_token = metadata.starts[i];
          tile.len_q = metadata.len_q(i);
          tile.first_row = (tiles[i] - 1 - index) * kRows;
          keys = metadata.keys(i);
        }
        index -= tiles[i];
      }
      tile.num_rows = min(kRows, tile.len_q * params.group - tile.first_row);
      keys.describe(params, tile);
      plan.tile = tile;
      plan.keys = visible_keys(params, tile);
    }
    if (round_first + kPerRound >= num_seqs) break;
  }
  const bool starts_ascend = __syncthreads_and(ascends);
  if (threadIdx.x == 0) {
    const bool more = next_tile(params, plan) + gridDim.x / params.num_kv_heads < before;
    plan.overlap = starts_ascend ? Overlap::kNone : (more ? Overlap::kMoreTiles : Overlap::kPossible);
  }
}

/// Whether sequence `b` claims token row `token`.
__device__ __forceinline__ bool claims(const AttentionParams& params, int32_t b, int32_t token) {
  const int32_t start = start_of(params, b), rows = start_of(params, b + 1) - start;
  const int32_t used = params.seqused_q == nullptr ? rows : __ldg(params.seqused_q + b);
  return token >= start && token - start < query_count(rows, used);
}

/// The first sequence that claims token row `token`, or -1.
__device__ inline int32_t first_owner(const AttentionParams& params, int32_t num_seqs, int32_t token) {
  for (int32_t b = 0; b < num_seqs; ++b) {
    if (claims(params, b, token)) return b;
  }
  return -1;
}

/// As above, where starts ascend: only the last sequence that starts at or before the row can claim it.
__device__ inline int32_t only_owner(const AttentionParams& params, int32_t num_seqs, int32_t token) {
  int32_t b = -1;
  for (int32_t end = num_seqs; end - b > 1;) {
    const int32_t middle = b + (end - b) / 2;
    (start_of(params, middle) <= token ? b : end) = middle;
  }
  return b >= 0 && claims(params, b, token) ? b : -1;
}

}  // namespace xa
