// delta of all query rows, to the workspace, where attention_bwd_dq, which would store it, leaves its rows to
// attention_bwd_dq_from_ds.
//
// Compiled once for each value of
//   XA_DTYPE   f16, bf16
// Launch: kDeltaThreads threads, a CTA per kDeltaRows rows of a query head.

#include "bwd/rows.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"
#include "params/bias.cuh"

extern "C" __global__ void __launch_bounds__(xa::kDeltaThreads)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  using namespace xa;
  using T = XA_PASTE(dtype_, XA_DTYPE);
  constexpr int32_t kLanes = kDeltaThreads / kDeltaRows;
  const BackwardParams& backward = params.backward;
  const int32_t num_tokens = backward.forward.num_tokens, blocks = (num_tokens + kDeltaRows - 1) / kDeltaRows;
  const int32_t head = blockIdx.x / blocks;
  const int32_t token = blockIdx.x % blocks * kDeltaRows + static_cast<int32_t>(threadIdx.x) / kLanes;
  const float delta = delta_of<T, kLanes>(backward, min(token, num_tokens - 1), head);
  const bool is_first = threadIdx.x % kLanes == 0;
  if (is_first && token < num_tokens) backward.delta[static_cast<int64_t>(head) * num_tokens + token] = delta;
}
