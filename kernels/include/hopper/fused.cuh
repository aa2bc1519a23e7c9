// Decode beneath prefill: in a batch that has both, some CTAs of Hopper's prefill first decode. What bounds them is
// memory, what bounds the others the tensor cores; whoever is through takes the tiles of prefill that are left.
#pragma once

#include <cstdint>

#include "hopper/schedule.cuh"
#include "params/attention.cuh"
#include "params/hopper_prefill.cuh"
#include "partial_rows.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Time that an SM takes for a key of a tile in prefill, as a multiple of that in decode (H200, D 128: 1.6 and 1.0 us
/// for 128 keys).
constexpr float kPrefillCost = 1.6f;

/// A CTA's estimate of what there is to do, the same in every CTA.
struct FusedWork {
  float decode;
  float prefill;

  __device__ __forceinline__ void add(const FusedWork& other) {
    decode += other.decode;
    prefill += other.prefill;
  }
};

/// Keys that the first and the last query of a tile's sequence see, on average.
__device__ __forceinline__ float mean_keys(const AttentionParams& params, const QoTile& tile) {
  const Visibility visibility(params, tile);
  const int32_t last = tile.len_q - 1;
  const float of_first = max(visibility.end(0) - visibility.begin(0), 0);
  const float of_last = max(visibility.end(last) - visibility.begin(last), 0);
  return 0.5f * (of_first + of_last);
}

/// How much work there is in all. Every thread of the CTA calls this; `sums` [kThreads / 32] are in shared memory.
template <int kThreads, int kDecodeRows, int kPrefillRows>
__device__ __forceinline__ FusedWork estimate_work(const HopperFusedParams& params, FusedWork* sums) {
  const AttentionParams &decode = params.decode, &prefill = params.prefill.attention;
  const int32_t num_seqs = live_sequences(decode);
  FusedWork work;
  bool raises_starts = false;
#pragma unroll 1
  for (;;) {
    work = {0.0f, 0.0f};
    bool ascends = true;
    StartScan scan;
    for (int32_t first = threadIdx.x / 32 * 32; first < decode.max_seqs; first += kThreads) {
      const int32_t b = first + static_cast<int32_t>(threadIdx.x % 32);
      Metadata<1> metadata;
      metadata.load(decode, b);
      if (__builtin_expect(raises_starts, false)) scan.ascend(decode, first, metadata);
      const QoTile tile = metadata.sequence(decode, 0, b);
      if (b >= num_seqs) continue;
      ascends &= metadata.ascends(decode, 0);
      if (tile.len_q == 0) continue;
      const float keys = mean_keys(decode, tile);
      if (tile.len_q <= decode.max_queries) {
        work.decode += keys * decode.num_kv_heads * ((tile.len_q * decode.group + kDecodeRows - 1) / kDecodeRows);
      } else {
        const float tiles = static_cast<float>(tile.len_q) * prefill.group * (1.0f / kPrefillRows);
        work.prefill += kPrefillCost * keys * prefill.num_kv_heads * tiles;
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      work.add(FusedWork{__shfl_xor_sync(~0u, work.decode, distance), __shfl_xor_sync(~0u, work.prefill, distance)});
    }
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = work;
    if (__syncthreads_and(ascends)) break;
    raises_starts = true;
  }
  work = sums[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) work.add(sums[warp]);
  __syncthreads();
  return work;
}

/// CTAs a KV head that decode: as many as are done when all is done, rather one too many. What decode needs of an SM's
/// time hardly depends on how many SMs share it.
__device__ __forceinline__ int32_t decode_ranges(const FusedWork& work, int32_t num_kv_heads) {
  if (work.decode == 0.0f) return 0;
  const int32_t most = static_cast<int32_t>(gridDim.x) / num_kv_heads;
  const float ctas = static_cast<float>(gridDim.x) * __fdividef(work.decode, work.decode + work.prefill);
  return clamp(static_cast<int32_t>(ceilf(ctas / num_kv_heads)), 1, most);
}

/// Tells the merging kernel that no tile is cut where share `number` would begin.
__device__ __forceinline__ void store_empty_split_record(const AttentionParams& params, int32_t kv_head,
                                                         int32_t number) {
  if (threadIdx.x != 0 || kv_head != 0 || number == 0 || number >= params.partial.num_ranges) return;
  static_cast<SplitRecord*>(params.partial.split_records)[number - 1] = SplitRecord{};
}

}  // namespace xa::hopper
