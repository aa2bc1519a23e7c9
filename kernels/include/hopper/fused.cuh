// Fused prefill and decode: in a batch that has both, some CTAs of Hopper's prefill decode first. Decode is bound by
// memory and prefill by the tensor cores, so different SMs keep both busy. CTAs that have finished decode join in
// prefill.
#pragma once

#include <cstdint>

#include "hopper/schedule.cuh"
#include "params/attention.cuh"
#include "params/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// SM time per key of a prefill tile, relative to decode (H200, D 128: 1.6 and 1.0 us per 128 keys).
constexpr float kPrefillCost = 1.6f;

/// Estimated work of the batch, in keys of a decode tile. Every CTA computes the same values.
struct FusedWork {
  float decode;
  float prefill;

  __device__ __forceinline__ void add(const FusedWork& other) {
    decode += other.decode;
    prefill += other.prefill;
  }
};

/// The mean of the numbers of keys that a sequence's first and last query attend to.
__device__ __forceinline__ float mean_keys(const AttentionParams& params, const QoTile& tile) {
  const Visibility visibility(params, tile);
  const int32_t last = tile.len_q - 1;
  const float first_keys = max(visibility.end(0) - visibility.begin(0), 0);
  const float last_keys = max(visibility.end(last) - visibility.begin(last), 0);
  return 0.5f * (first_keys + last_keys);
}

/// Estimates the work of the batch. Every thread of the CTA calls this; `sums` [kThreads / 32] is shared memory.
template <int kThreads, int kDecodeRows, int kPrefillRows>
__device__ __forceinline__ FusedWork estimate_work(const HopperFusedParams& params, FusedWork* sums) {
  const AttentionParams &decode = params.decode, &prefill = params.prefill.attention;
  const int32_t given = given_sequences(decode);
  FusedWork work;
  // A second round replaces starts that do not ascend by their running maximum.
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
      if (b >= metadata.live_sequences(decode, given)) continue;
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

/// This CTA's place in the order in which CTAs take decode's work ranges: every second CTA, then the others. CTAs 2 i
/// and 2 i + 1 run on the two SMs of a TPC, which read L2 faster if only one of them decodes
/// (docs/dev/kernels/hopper_fused.md).
__device__ __forceinline__ int32_t decode_place() {
  const int32_t pair = blockIdx.x / 2, pairs = (gridDim.x + 1) / 2;
  return blockIdx.x % 2 == 0 ? pair : pairs + pair;
}

/// Number of decode's work ranges per KV head, each of one CTA: decode's part of the SM time, rounded up. Decode's
/// total SM time hardly depends on the number of SMs.
__device__ __forceinline__ int32_t decode_ranges(const FusedWork& work, int32_t num_kv_heads) {
  if (work.decode == 0.0f) return 0;
  const int32_t max_ranges = static_cast<int32_t>(gridDim.x) / num_kv_heads;
  const float ctas = static_cast<float>(gridDim.x) * __fdividef(work.decode, work.decode + work.prefill);
  return clamp(static_cast<int32_t>(ceilf(ctas / num_kv_heads)), 1, max_ranges);
}

}  // namespace xa::hopper
