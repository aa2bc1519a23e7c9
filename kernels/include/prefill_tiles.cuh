// Which tile a CTA of the portable prefill computes. Tiles are numbered over the sequences; within a sequence the last
// rows come first, because under a causal mask they attend to the most keys.
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa {

/// Sets `work` to the tile of this CTA, tile blockIdx.x / Hkv of KV head blockIdx.x % Hkv. Adjacent CTAs read
/// the same pages for different KV heads, which improves DRAM locality. Every thread of the CTA calls this; `maxima` is
/// valid after the next barrier, the rest on return.
template <int kThreads, int kRows>
__device__ __forceinline__ void find_tile(const AttentionParams& params, WorkTile& work) {
  constexpr int kWarps = kThreads / 32, kPerThread = 4, kPerRound = kThreads * kPerThread;
  static_assert(kWarps <= 4, "WorkTile::warp_totals");
  const int warp = threadIdx.x / 32;
  const int32_t num_seqs = live_sequences(params);
  const int64_t wanted = blockIdx.x / params.num_kv_heads;
  bool raises_starts = false;
#pragma unroll 1
  for (;;) {
    int64_t before = 0;
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
        const bool ours = live && len_q >= params.min_queries && len_q <= params.max_queries;
        tiles[i] = ours ? (len_q * params.group + kRows - 1) / kRows : 0;
        mine += tiles[i];
      }
      const int64_t inclusive = sum_up_to_this_lane(static_cast<int64_t>(mine));
      if (threadIdx.x % 32 == 31) work.warp_totals[parity][warp] = inclusive;
      __syncthreads();
      int64_t exclusive = before + inclusive - mine;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int64_t total = work.warp_totals[parity][w];
        if (w < warp) exclusive += total;
        before += total;
      }
      if (wanted >= exclusive && wanted < exclusive + mine) {
        int32_t index = static_cast<int32_t>(wanted - exclusive);
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

}  // namespace xa
