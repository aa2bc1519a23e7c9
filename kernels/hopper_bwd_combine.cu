// Adds up dK and dV of the parts into which hopper_bwd.cu has split the query heads of each KV head, in the order of
// the parts, and rounds the sums to the dtype of the call's gradients.
//
// Compiled once for each XA_DTYPE: f16, bf16.
// Launch: kCombineGradientsThreads threads, a thread per chunk of eight columns of dk and dv.

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

constexpr int kChunkColumns = 8;

/// Stores chunk `index` of a gradient `[Tk, Hkv, head_chunks]`: the sum of `partial[Tk, Hkv, splits, head_chunks]`.
template <typename T>
__device__ __forceinline__ void combine_chunk(const CombineGradientsParams& params, const float* partial,
                                              void* gradient, int64_t index, int32_t head_chunks) {
  const int64_t head = index / head_chunks;
  const int32_t in_head = static_cast<int32_t>(index - head * head_chunks);
  const float* from = partial + (head * params.head_splits * head_chunks + in_head) * kChunkColumns;
  float sums[kChunkColumns] = {};
  for (int32_t split = 0; split < params.head_splits; ++split, from += head_chunks * kChunkColumns) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; i += 4) {
      const auto part = load_chunk<float, 4>(from + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] += part.elements[j];
    }
  }
  if (params.widens_gradients != 0) {
    float* const to = static_cast<float*>(gradient) + index * kChunkColumns;
    store_chunk(to, Chunk<float, 4>{{sums[0], sums[1], sums[2], sums[3]}});
    store_chunk(to + 4, Chunk<float, 4>{{sums[4], sums[5], sums[6], sums[7]}});
  } else {
    store_chunk(static_cast<T*>(gradient) + index * kChunkColumns, rounded<T>(sums));
  }
}

}  // namespace xa::hopper

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
}  // namespace

extern "C" __global__ void __launch_bounds__(xa::kCombineGradientsThreads)
    XA_ENTRY(const __grid_constant__ xa::CombineGradientsParams params) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * xa::kCombineGradientsThreads + threadIdx.x;
  if (index < params.dk_chunks) {
    xa::hopper::combine_chunk<T>(params, params.partial_dk, params.dk, index, params.dk_head_chunks);
  } else if (index < params.dk_chunks + params.dv_chunks) {
    const int64_t in_dv = index - params.dk_chunks;
    xa::hopper::combine_chunk<T>(params, params.partial_dv, params.dv, in_dv, params.dv_head_chunks);
  }
}
