// Which tile a CTA of the portable prefill computes: tile blockIdx.x / Hkv of KV head blockIdx.x % Hkv. Adjacent CTAs
// read the same pages for different KV heads, which improves DRAM locality.
//
// Tiles are numbered sequence by sequence, in a sequence from the last rows to the first, which attend to the most keys
// under a causal mask. Then the tiles of a few sequences come longest first (LPT), by the key at which they end, so
// that all CTAs finish at about the same time.
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa {

/// Tiles of a sequence of `len_q` queries; none if it is another launch's.
template <int kRows>
__device__ __forceinline__ int32_t count_tiles(const AttentionParams& params, int32_t len_q) {
  const bool is_ours = len_q >= params.min_queries && len_q <= params.max_queries;
  return is_ours ? (len_q * params.group + kRows - 1) / kRows : 0;
}

/// Finds the tile sequence by sequence. Every thread of the CTA calls this. 32 bits hold the numbers of tiles, because
/// each tile has rows of its own; sequences overlap only where starts descend, and then the scan is repeated.
template <int kThreads, int kRows>
__device__ __forceinline__ void find_tile_in_order(const AttentionParams& params, WorkTile& work) {
  constexpr int kWarps = kThreads / 32, kPerThread = 4, kPerRound = kThreads * kPerThread;
  static_assert(kWarps <= 4, "WorkTile::warp_totals");
  const int warp = threadIdx.x / 32;
  const int32_t num_seqs = live_sequences(params);
  const uint32_t wanted = blockIdx.x / params.num_kv_heads;
  bool raises_starts = false;
#pragma unroll 1
  for (;;) {
    uint32_t before = 0;
    bool ascends = true;
    StartScan scan;
    if (threadIdx.x == 0) work.tile.num_rows = 0;
    for (int32_t round_first = 0, parity = 0; round_first < params.max_seqs; round_first += kPerRound, parity ^= 1) {
      const int32_t first = round_first + threadIdx.x * kPerThread;
      Metadata<kPerThread> metadata;
      metadata.load(params, first);
      if (__builtin_expect(raises_starts, false)) {
        scan.ascend(params, round_first + warp * 32 * kPerThread, metadata);
      }
      int32_t tiles[kPerThread], mine = 0;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int32_t len_q = metadata.len_q(i);
        const bool live = first + i < num_seqs;
        ascends &= !live || metadata.ascends(params, i);
        tiles[i] = live ? count_tiles<kRows>(params, len_q) : 0;
        mine += tiles[i];
      }
      const uint32_t inclusive = sum_up_to_this_lane(static_cast<uint32_t>(mine));
      if (threadIdx.x % 32 == 31) work.warp_totals[parity][warp] = inclusive;
      __syncthreads();
      uint32_t exclusive = before + inclusive - mine;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const auto total = static_cast<uint32_t>(work.warp_totals[parity][w]);
        if (w < warp) exclusive += total;
        before += total;
      }
      if (wanted - exclusive < static_cast<uint32_t>(mine)) {
        int32_t index = wanted - exclusive;
        KeyMetadata keys = {};
        QoTile tile = {};
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
        work.tile = tile;
        work.keys = visible_keys(params, tile);
      }
      if (round_first + kPerRound >= num_seqs) break;
    }
    if (__syncthreads_and(ascends)) break;
    raises_starts = true;
  }
  if (threadIdx.x == 0) work.maxima = raises_starts ? StartMaxima{0, 0} : kStartsAscend;
}

/// Whether the longest tiles come first, which shortens the tail of a call. With two sequences it becomes hardly
/// shorter. Of more than kMaxCtas CTAs it is a small part, and CTAs that run together read the same keys if tiles are
/// in order.
__device__ __forceinline__ bool sorts_tiles(const AttentionParams& params) {
  constexpr int32_t kMinSequences = 3, kMaxSequences = 32, kMaxCtas = 4096;
  return params.window_right >= 0 && params.max_seqs >= kMinSequences && params.max_seqs <= kMaxSequences &&
         gridDim.x <= kMaxCtas;
}

/// Sequences whose tiles are in one order: a power of two, adjacent from a multiple of it on. More than 2^kLog2Pairs
/// pairs of a sequence and a KV head at a time would leave few CTAs at work on the same keys, which would come from
/// DRAM more often.
__device__ __forceinline__ int32_t sequences_per_group(const AttentionParams& params) {
  constexpr int32_t kLog2Pairs = 6;
  const int32_t log2_heads = 32 - __clz(params.num_kv_heads - 1);
  return 1 << clamp(kLog2Pairs - log2_heads, 0, 5);
}

/// The tiles of `sequence`, `count` in number, that end past key `key`, under a causal mask. They do not become more as
/// `key` rises.
template <int kRows>
__device__ __forceinline__ int32_t count_tiles_past(const Visibility& visibility, const QoTile& sequence, int32_t group,
                                                    int32_t count, int32_t key) {
  const int32_t position = key - visibility.window_right;
  if (key >= sequence.len_k) return 0;
  if (position <= visibility.shift) return count;
  const uint32_t query = static_cast<uint32_t>(position) - static_cast<uint32_t>(visibility.shift);
  return query < sequence.len_q ? count - static_cast<int32_t>(query) * group / kRows : 0;
}

/// Finds the tile among those of up to 32 sequences, of which the longest come first. A warp calls this, whose lanes
/// have a sequence each.
template <int kRows>
__device__ __forceinline__ void find_longest_first(const AttentionParams& params, WorkTile& work) {
  const int32_t lane = threadIdx.x % 32, wanted = blockIdx.x / params.num_kv_heads;
  Metadata<1> metadata;
  metadata.load(params, lane);
  const bool live = lane < live_sequences(params);
  const bool ascends = __all_sync(~0u, !live || metadata.ascends(params, 0)) != 0;
  StartMaxima maxima = {0, 0};
  if (__builtin_expect(!ascends, false)) metadata.ascend(params, maxima);
  if (lane == 0) work.maxima = ascends ? kStartsAscend : maxima;
  QoTile sequence = metadata.sequence(params, 0, lane);
  int32_t count = live ? count_tiles<kRows>(params, sequence.len_q) : 0;
  // The group that has the tile.
  const int32_t end = sum_up_to_this_lane(count), group_size = sequences_per_group(params);
  const uint32_t up_to = __ballot_sync(~0u, end > wanted);
  if (up_to == 0) {
    if (lane == 0) work.tile.num_rows = 0;
    return;
  }
  const int32_t first = (__ffs(up_to) - 1) & -group_size;
  int32_t index = wanted - __shfl_sync(~0u, end - count, first);
  if (lane < first || lane >= first + group_size) count = 0;
  if (count == 0) sequence.len_q = 0;
  // Bisects for the key past which the tile ends, to a block of keys or a 32nd to a 16th of the largest end. `all` of
  // this sequence's tiles end past the key, `longer` of them later than that.
  constexpr int kSteps = 5, kLog2Block = 6;
  const Visibility visibility(params, sequence);
  const int32_t last = __reduce_max_sync(~0u, count > 0 ? visibility.end(sequence.len_q - 1) - 1 : 0);
  const int32_t bits = 32 - __clz(last);
  int32_t all = count, longer = 0, before = 0, key = 0;
#pragma unroll 1
  for (int32_t bit = bits - 1; bit >= max(bits - kSteps, kLog2Block); --bit) {
    const int32_t next_key = key + (1 << bit);
    const int32_t past = count_tiles_past<kRows>(visibility, sequence, params.group, count, next_key);
    const int32_t sum = __reduce_add_sync(~0u, past);
    if (sum > index) {
      key = next_key;
      all = past;
    } else {
      longer = past;
      before = sum;
    }
  }
  // Among the others sequences ascend.
  const int32_t mine = all - longer;
  index -= before + sum_up_to_this_lane(mine) - mine;
  if (index < 0 || index >= mine) return;
  sequence.first_row = (count - 1 - longer - index) * kRows;
  sequence.num_rows = min(kRows, sequence.len_q * params.group - sequence.first_row);
  work.tile = sequence;
  work.keys = visible_keys(params, sequence);
}

/// Sets `work` to the tile of this CTA. Every thread of the CTA calls this; `maxima` is valid after the next barrier,
/// the rest on return.
template <int kThreads, int kRows>
__device__ __forceinline__ void find_tile(const AttentionParams& params, WorkTile& work) {
  if (sorts_tiles(params)) {
    if (threadIdx.x < 32) find_longest_first<kRows>(params, work);
    __syncthreads();
  } else {
    find_tile_in_order<kThreads, kRows>(params, work);
  }
}

}  // namespace xa
