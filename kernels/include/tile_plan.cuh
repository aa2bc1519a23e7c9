// Which rows a CTA works on. Lengths are known on the device alone, so every CTA derives its tile from query_start_loc.
//
// The query rows of a sequence and one KV head are packed: packed row r is query r / group of head r % group. A tile is
// up to kRows neighbouring packed rows of one sequence; tiles are numbered over sequences, the last rows of a sequence
// first, because under a causal mask those are the longest.
//
// Metadata is never trusted: starts are clamped to [0, T], an end to [start, T]. Where starts descend, sequences can
// overlap; a row then belongs to the first sequence that claims it.
#pragma once

#include <cstdint>

#include "attention_params.cuh"

namespace xa {

/// Neighbouring packed rows of one sequence. `num_rows` is 0 where there is no such tile.
struct Tile {
  int32_t sequence;
  int32_t first_token;  // of the sequence, in [0, T]
  int32_t len_q;
  int32_t len_k;
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
  int32_t reserved;
  int64_t warp_totals[2][4];  // of the search
};

static_assert(sizeof(Plan) == 120, "what a CTA asks for beyond its rows");

__device__ __forceinline__ int32_t clamp(int32_t x, int32_t low, int32_t high) { return min(max(x, low), high); }

__device__ __forceinline__ int32_t live_sequences(const AttentionParams& params) {
  return clamp(__ldg(params.num_seqs), 0, params.max_seqs);
}

/// Where sequence `b` starts and `b - 1` ends; b in [0, S].
__device__ __forceinline__ int32_t start_of(const AttentionParams& params, int32_t b) {
  return clamp(__ldg(params.query_start_loc + b), 0, params.num_tokens);
}

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

/// Where the rows of a tile lie in query, out and lse.
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

/// The visible keys of one query: [visible_begin, visible_end) of [0, len_k). Query i stands at key i + len_k - len_q.
struct Visibility {
  int32_t shift;
  int32_t len_k;
  int32_t window_left;
  int32_t window_right;

  __device__ __forceinline__ Visibility(const AttentionParams& params, const Tile& tile)
      : shift(tile.len_k - tile.len_q),
        len_k(tile.len_k),
        window_left(params.window_left),
        window_right(params.window_right) {}

  __device__ __forceinline__ int32_t begin(int32_t query) const {
    const int32_t position = query + shift;
    return window_left < 0 || position < window_left ? 0 : position - window_left;
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
  return KeyRange{visibility.begin(first), visibility.end(last), visibility.begin(last), visibility.end(first)};
}

__device__ __forceinline__ int64_t sum_up_to_this_lane(int64_t mine) {
  const int lane = threadIdx.x % 32;
  int64_t sum = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(~0u, sum, distance);
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
__device__ __forceinline__ void start_plan(const AttentionParams& params, Plan& plan) {
  if (threadIdx.x != 0) return;
  plan.round = 0;
  plan.kv_head = blockIdx.x % params.num_kv_heads;
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
    // These loads do not wait for num_seqs: slots past it are read, and what they hold is ignored.
    const int32_t first = round_first + threadIdx.x * kPerThread;
    int32_t starts[kPerThread + 1], contexts[kPerThread], tiles[kPerThread], mine = 0;
#pragma unroll
    for (int i = 0; i <= kPerThread; ++i) starts[i] = first + i <= params.max_seqs ? start_of(params, first + i) : 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      contexts[i] = first + i < params.max_seqs ? __ldg(params.context_lens + first + i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int32_t len_q = starts[i + 1] - starts[i];
      const bool live = first + i < num_seqs;
      ascends &= !live || len_q >= 0;
      const bool ours = live && len_q >= params.min_queries && len_q <= params.max_queries;
      tiles[i] = ours ? (len_q * params.group + kRows - 1) / kRows : 0;
      mine += tiles[i];
    }
    const int64_t inclusive = sum_up_to_this_lane(mine);
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
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (index >= 0 && index < tiles[i]) {
          const int32_t len_q = starts[i + 1] - starts[i], first_row = (tiles[i] - 1 - index) * kRows;
          const int32_t len_k = clamp(contexts[i], 0, params.capacity), num_rows = len_q * params.group - first_row;
          plan.tile = Tile{first + i, starts[i], len_q, len_k, first_row, min(kRows, num_rows)};
        }
        index -= tiles[i];
      }
      plan.keys = visible_keys(params, plan.tile);
    }
    if (round_first + kPerRound >= num_seqs) break;
  }
  const bool starts_ascend = __syncthreads_and(ascends);
  if (threadIdx.x == 0) {
    const bool more = next_tile(params, plan) + gridDim.x / params.num_kv_heads < before;
    plan.overlap = starts_ascend ? Overlap::kNone : (more ? Overlap::kMoreTiles : Overlap::kPossible);
  }
}

/// The first sequence that claims token row `token`, or -1.
__device__ inline int32_t first_owner(const AttentionParams& params, int32_t token) {
  const int32_t num_seqs = live_sequences(params);
  for (int32_t b = 0; b < num_seqs; ++b) {
    if (start_of(params, b) <= token && token < start_of(params, b + 1)) return b;
  }
  return -1;
}

}  // namespace xa
