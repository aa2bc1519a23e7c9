// Gradients of the sinks: dsink_h = -sum_i exp(sink_h - lse_i) delta_i over the queries of all sequences. One CTA
// computes the sum of one head in a fixed order, so two runs give the same bits.
//
// Compiled once for each XA_DTYPE: f16, bf16, f32.
// Launch: kSinksThreads threads, Hq CTAs.

#include <cstdint>

#include "bwd/rows.cuh"
#include "bwd/sequence_segment.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"
#include "params/attention_bwd_sinks.cuh"

namespace xa {

/// The sum of `mine` over the CTA.
__device__ __forceinline__ float sum_of_all(float mine) {
  __shared__ float warps[kSinksThreads / 32];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) mine += __shfl_xor_sync(~0u, mine, distance);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < kSinksThreads / 32; ++warp) sum += warps[warp];
  return sum;
}

template <typename T>
__device__ __forceinline__ void sum_rows(const BackwardParams& params) {
  const AttentionParams& forward = params.forward;
  const int32_t head = blockIdx.x, num_seqs = live_sequences(forward);
  bool ascends = true;
  for (int32_t b = threadIdx.x; b < num_seqs; b += kSinksThreads)
    ascends &= start_of(forward, b) <= start_of(forward, b + 1);
  ascends = __syncthreads_and(ascends);
  SequenceSearch search(forward, ascends);
  const float sink = __ldg(forward.sinks + head);
  float sum = 0.0f;
  for (int64_t first = threadIdx.x; first < forward.num_tokens; first += kSinksThreads) {
    const int32_t token = static_cast<int32_t>(first);
    if (!search.finds_sequence(token)) continue;
    const int64_t index = static_cast<int64_t>(head) * forward.num_tokens + token;
    const float delta = stored_delta_of<T>(params, token, head);
    // A sink of -inf has no gradient. Where the row attends to no key its lse is -inf too, and the difference a NaN.
    if (sink != -INFINITY) sum -= expf(sink - __ldg(forward.lse + index)) * delta;
  }
  sum = sum_of_all(sum);
  if (threadIdx.x == 0) params.dsinks[head] = sum;
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kSinksThreads)
    XA_ENTRY(const __grid_constant__ xa::BackwardParams params) {
  if (params.forward.sinks == nullptr) {
    if (threadIdx.x == 0) params.dsinks[blockIdx.x] = 0.0f;
    return;
  }
  xa::sum_rows<xa::XA_PASTE(dtype_, XA_DTYPE)>(params);
}
