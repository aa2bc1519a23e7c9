// The combine kernel for tiles with many partials: those of a few long sequences, whose keys are divided between many
// CTAs.
//
// A CTA merges a chunk of a row at a time, and its warps divide the partials between them, so that 32 partials are on
// their way at once. In combine.cu a warp merges all partials of a row, eight at a time.
//
// Compiled once for each XA_DTYPE of out: f16, bf16, f32.
// Launch: like combine.cu.

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "params/attention.cuh"
#include "params/combine.cuh"
#include "partial_rows.cuh"
#include "split_tile.cuh"

namespace xa {

/// A lane has four columns of the chunk, and the state of one of 32 partials, from which it computes that partial's
/// weight.
template <typename T>
__device__ __forceinline__ void merge_by_warps(const SplitTile<T>& tile) {
  constexpr int32_t kPartials = 32 / kWarps;
  __shared__ float4 sums[kWarps][32];
  const float log2_unit = tile.params.partial.log2_unit;
  const int32_t value_dim = tile.params.value_dim, count = tile.record.num_partials;
  const int32_t log2_chunks = log2_row_chunks(value_dim);
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t item = tile.part; item >> log2_chunks < tile.record.tile.num_rows; item += tile.num_parts) {
    const int32_t row = item >> log2_chunks, column = column_of_item(item, log2_chunks) + 4 * lane;
    PartialState merged = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 1
    for (int32_t begin = 0; begin < count; begin += 32) {
      float2 state = tile.partials.state(tile.partial_row(begin + lane, row));
      float4 outputs[kPartials];
#pragma unroll
      for (int32_t j = 0; j < kPartials; ++j) {
        const int32_t partial_row = tile.partial_row(begin + kPartials * warp + j, row);
        outputs[j] = *reinterpret_cast<const float4*>(tile.partials.output(partial_row, min(column, value_dim - 4)));
      }
      if (begin + lane >= count) state = make_float2(-INFINITY, 0.0f);
      const float weight = add_states(merged, state, 32, log2_unit);
#pragma unroll
      for (int32_t j = 0; j < kPartials; ++j) {
        // Partials past the last one have the weight 0.
        add_weighted(merged.output, __shfl_sync(~0u, weight, kPartials * warp + j), outputs[j]);
      }
    }
    sums[warp][lane] = merged.output;
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int32_t other = 1; other < kWarps; ++other) add_weighted(merged.output, 1.0f, sums[other][lane]);
      if (column < value_dim) tile.write(row, column, merged);
    }
    __syncthreads();
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kCombineThreads, xa::kCombineCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  xa::SplitTile<T>::find(params, [](const xa::SplitTile<T>& tile) { xa::merge_by_warps(tile); });
}
