// Stores zeros to the gradient of a bias wherever no row attends to the key. attention_bwd_dq or hopper_bwd runs after
// it and stores the other elements, among blocks of which it stores zeros once more.
//
// Launch: kDbiasThreads threads, a CTA per kDbiasRows rows, sequence and head of the bias.

#include "bwd/sequence_at.cuh"
#include "params/attention_bwd.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// Stores zeros to `count` elements at `to`, by the lanes of a warp.
template <typename E>
__device__ __forceinline__ void clear_elements(E* to, int32_t count) {
  constexpr int32_t kElements = 16 / static_cast<int32_t>(sizeof(E));
  const auto misaligned = static_cast<int32_t>(reinterpret_cast<uint64_t>(to) % 16 / sizeof(E));
  const int32_t head = min(count, (kElements - misaligned) % kElements), chunks = (count - head) / kElements;
  const int32_t lane = threadIdx.x % 32, tail = head + chunks * kElements;
  if (lane < head) to[lane] = E{};
  for (int32_t i = lane; i < chunks; i += 32) reinterpret_cast<uint4*>(to + head)[i] = make_uint4(0, 0, 0, 0);
  if (lane < count - tail) to[tail + lane] = E{};
}

/// Clears the CTA's rows.
template <typename E>
__device__ __forceinline__ void clear_rows(const BiasBackwardParams& params, const QoTile& tile, int32_t matrix,
                                           int32_t first_row) {
  const BiasSource& bias = params.bias;
  const Visibility visibility(params.backward.forward, tile);
  const int32_t end_row = min(first_row + kDbiasRows, bias.rows);
  for (int32_t row = first_row + static_cast<int32_t>(threadIdx.x / 32); row < end_row; row += kDbiasThreads / 32) {
    E* const to = static_cast<E*>(params.dbias) + (static_cast<int64_t>(matrix) * bias.rows + row) * bias.keys;
    int32_t begin = 0, end = 0;
    if (row < tile.len_q) {
      begin = min(visibility.begin(row), bias.keys);
      end = min(visibility.end(row), bias.keys);
    }
    if (begin >= end) begin = end = 0;
    clear_elements(to, begin);
    clear_elements(to + end, bias.keys - end);
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kDbiasThreads)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  using namespace xa;
  const AttentionParams& forward = params.backward.forward;
  const int32_t blocks = (params.bias.rows + kDbiasRows - 1) / kDbiasRows, matrix = blockIdx.x / blocks;
  const int32_t first_row = blockIdx.x % blocks * kDbiasRows, sequence = matrix / params.heads;
  QoTile tile = {};
  if (sequence < live_sequences(forward)) {
    StartMaxima maxima = {0, 0};
    tile = sequence_at(forward, sequence, 0, maxima);
  }
  if (params.dbias_is_f32 != 0) {
    clear_rows<float>(params, tile, matrix, first_row);
  } else {
    clear_rows<uint16_t>(params, tile, matrix, first_row);
  }
}
