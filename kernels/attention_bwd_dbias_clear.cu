// Stores zeros to the gradient of a bias wherever no row attends to the key, before attention_bwd_dkdv, which stores
// the other elements, among blocks of which it stores zeros once more. attention_bwd_dq stores all of the rows that
// attend to some keys (dq_stores_dbias), so before it only the other rows are cleared.
//
// Launch: kDbiasThreads threads, a CTA per kDbiasRows rows, sequence and head of the bias. The rows of a CTA are a
// number of blocks apart: under a causal mask the first rows have the most to clear, and all CTAs run at the same time.

#include "bwd/dbias_rows.cuh"
#include "bwd/sequence_at.cuh"
#include "params/attention_bwd.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// Clears the CTA's rows: `first_row`, and others `step` apart.
template <typename E>
__device__ __forceinline__ void clear_rows(const BiasBackwardParams& params, const QoTile& tile, int32_t matrix,
                                           int32_t first_row, int32_t step) {
  const int32_t rows = params.bias.rows, keys = params.dbias_keys;
  const Visibility visibility(params.backward.forward, tile);
  constexpr int32_t kWarpRows = kDbiasRows / (kDbiasThreads / 32);
  const int32_t lane = threadIdx.x % 32, first_index = static_cast<int32_t>(threadIdx.x) / 32 * kWarpRows;
  const auto row_at = [&](int32_t index) { return first_row + (first_index + index) * step; };
  const int32_t own_row = row_at(lane);
  int32_t begin = 0, end = 0;
  if (own_row < tile.len_q) {
    begin = min(visibility.begin(own_row), keys);
    end = min(visibility.end(own_row), keys);
  }
  if (begin >= end) begin = end = 0;
  const bool has_row = lane < kWarpRows && own_row < rows;
  // A lane knows what to clear of a row, and all of them clear it.
  const bool is_part = params.dq_stores_dbias == 0 && end - begin < keys;
  for (uint32_t left = __ballot_sync(~0u, has_row && (begin == end || is_part)); left != 0; left &= left - 1) {
    const int32_t index = __ffs(left) - 1, row = row_at(index);
    const int32_t row_begin = __shfl_sync(~0u, begin, index), row_end = __shfl_sync(~0u, end, index);
    E* const to = static_cast<E*>(params.dbias) + (static_cast<int64_t>(matrix) * rows + row) * keys;
    clear_elements(to, row_begin);
    clear_elements(to + row_end, keys - row_end);
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kDbiasThreads)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  using namespace xa;
  const AttentionParams& forward = params.backward.forward;
  const int32_t blocks = (params.bias.rows + kDbiasRows - 1) / kDbiasRows, matrix = blockIdx.x / blocks;
  const int32_t first_row = blockIdx.x % blocks, sequence = matrix / params.heads;
  QoTile tile = {};
  if (sequence < live_sequences(forward)) {
    StartMaxima maxima = {0, 0};
    tile = sequence_at(forward, sequence, 0, maxima);
  }
  if (params.dbias_is_f32 != 0) {
    clear_rows<float>(params, tile, matrix, first_row, blocks);
  } else {
    clear_rows<uint16_t>(params, tile, matrix, first_row, blocks);
  }
}
