// Runs before hopper_bwd.cu and hopper_bwd_wide.cu: writes the plan of their tiles, delta and the base-2 lse of each
// query row, and clears dq_semaphore.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket of D and Dv; 192 also serves 192x128
// Launch: kThreads threads, 1 + ceil(Tq / kRows) * Hq CTAs.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "chunk.cuh"
#include "element.cuh"
#include "hopper_bwd/ptx.cuh"
#include "hopper_bwd/sequence_plan.cuh"
#include "hopper_bwd/shape.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "log2_units.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

constexpr int kThreads = 256, kRows = 64;

/// Loads eight columns of a row of out or dout, which this kernel reads once.
template <typename T>
__device__ __forceinline__ Chunk<T, 8> load_row_chunk(const T* from) {
  const uint4 bits = ptx::load_no_allocate(from);
  Chunk<T, 8> chunk;
  memcpy(&chunk, &bits, sizeof(chunk));
  return chunk;
}

/// Writes delta and lse_log2 of kRows rows of one head, whether or not they belong to a sequence. `sums` is shared.
template <typename T, typename Shape>
__device__ __forceinline__ void compute_row_stats(const HopperBackwardParams& params, int32_t index,
                                                  float (&sums)[kRows]) {
  // Lanes per row; each lane has one chunk of 8 columns.
  constexpr int kLanesPerRow = Shape::kHeadDim == 64    ? 8
                               : Shape::kHeadDim <= 128 ? 16
                                                        : 32,
                kRowsPerRound = kThreads / kLanesPerRow, kRounds = kRows / kRowsPerRound;
  const AttentionParams& forward = params.base.forward;
  const int32_t num_heads = params.num_q_heads, block = index / num_heads;
  const int32_t head = index - block * num_heads, lane = threadIdx.x % kLanesPerRow;
  const int32_t first_row = block * kRows, row_in_round = static_cast<int32_t>(threadIdx.x) / kLanesPerRow;
  // All loads are started before the first one is needed.
  Chunk<T, 8> out[kRounds], dout[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int64_t token = min(first_row + round * kRowsPerRound + row_in_round, forward.num_tokens - 1);
    const int32_t column = 8 * lane < forward.value_dim ? 8 * lane : 0;
    out[round] = load_row_chunk(static_cast<const T*>(forward.out) + token * forward.out_token_stride +
                                head * forward.out_head_stride + column);
    dout[round] = load_row_chunk(static_cast<const T*>(params.base.dout) + token * params.base.dout_token_stride +
                                 head * params.base.dout_head_stride + column);
  }
  // The row that this thread writes, if it is one of the first kRows threads.
  const int32_t row = first_row + static_cast<int32_t>(threadIdx.x);
  const int64_t offset = static_cast<int64_t>(head) * forward.num_tokens + row;
  const bool writes = threadIdx.x < kRows && row < forward.num_tokens;
  float lse = 0.0f, dlse = 0.0f;
  if (writes) {
    lse = __ldg(forward.lse + offset);
    if (params.base.dlse != nullptr) dlse = __ldg(params.base.dlse + offset);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      delta = __fmaf_rn(Element<T>::to_f32(out[round].elements[i]), Element<T>::to_f32(dout[round].elements[i]), delta);
    }
    if (8 * lane >= forward.value_dim) delta = 0.0f;
#pragma unroll
    for (int distance = 1; distance < kLanesPerRow; distance *= 2) delta += __shfl_xor_sync(~0u, delta, distance);
    if (lane == 0) sums[round * kRowsPerRound + row_in_round] = delta;
  }
  __syncthreads();
  if (!writes) return;
  params.base.delta[offset] = sums[threadIdx.x] - dlse;
  // A row that attends to no key gets lse = inf, which makes its probabilities 0.
  params.lse_log2[offset] = lse == -INFINITY ? INFINITY : lse * kLog2E;
}

}  // namespace xa::hopper

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
#if XA_HEAD_DIM <= 128
using Shape = xa::hopper::BackwardShape<XA_HEAD_DIM, xa::tiles::logits_none>;
#else
using Shape = xa::hopper::WidePlanShape<XA_HEAD_DIM>;
#endif
}  // namespace

extern "C" __global__ void __launch_bounds__(xa::hopper::kThreads)
    XA_ENTRY(const __grid_constant__ xa::HopperBackwardParams params) {
  using namespace xa::hopper;
  ptx::launch_dependents();
  if (blockIdx.x == 0) {
    __shared__ SequencePlanScratch<kThreads> scratch;
    plan_sequences<Shape, kThreads>(params, scratch);
    return;
  }
  const int64_t num_semaphores = static_cast<int64_t>(params.num_q_heads) * params.num_query_blocks;
  const int64_t first = static_cast<int64_t>(blockIdx.x - 1) * kThreads + threadIdx.x;
  for (int64_t i = first; i < num_semaphores; i += static_cast<int64_t>(gridDim.x - 1) * kThreads)
    params.dq_semaphore[i] = 0;
  __shared__ float sums[kRows];
  compute_row_stats<T, Shape>(params, static_cast<int32_t>(blockIdx.x) - 1, sums);
}
