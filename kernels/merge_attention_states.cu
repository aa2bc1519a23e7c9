// Merges the attention states (out [n, h, d], lse [h, n]) of the same queries over two disjoint sets of keys.
//
// A state whose lse is not finite is empty: its out is ignored. If both are empty, out is 0 and lse -inf.
//
// Compiled once for each XA_DTYPE: f16, bf16, f32.
// Launch: kMergeStatesThreads threads; a CTA computes MergeStatesParams::cta_rows rows, or, if that is 1, the
// CTAs (row, 0), (row, 1), ... compute one row together.

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "params/merge_attention_states.cuh"

namespace xa {

/// How two states of one row merge: their weights, which add up to 1, and the merged log-sum-exp.
struct MergeWeights {
  bool has_a;
  bool has_b;
  float weight_a;
  float weight_b;
  float lse;
};

__device__ __forceinline__ MergeWeights merge_weights(float lse_a, float lse_b) {
  // NaN compares false, so a NaN lse counts as empty too.
  const bool has_a = fabsf(lse_a) < INFINITY, has_b = fabsf(lse_b) < INFINITY;
  if (!has_a || !has_b) return {has_a, has_b, 0.0f, 0.0f, has_a ? lse_a : has_b ? lse_b : -INFINITY};
  const float largest = fmaxf(lse_a, lse_b);
  // The larger of the two is exactly 1, so log1p of the smaller is the log of their sum.
  const float a = expf(lse_a - largest), b = expf(lse_b - largest);
  const float sum = a + b;
  return {true, true, a / sum, b / sum, largest + log1pf(fminf(a, b))};
}

template <typename T, int kCount>
__device__ __forceinline__ Chunk<T, kCount> load(const AttentionState& state, int64_t row, int32_t head,
                                                 int32_t element) {
  const T* const out = static_cast<const T*>(state.out);
  return load_chunk<T, kCount>(out + row * state.row_stride + head * state.head_stride + element);
}

/// Computes this CTA's part of the output, kCount elements at a time.
template <typename T, int kCount>
__device__ __forceinline__ void merge_rows(const MergeStatesParams& params) {
  const uint32_t row_vectors = params.row_vectors.divisor, vectors = params.cta_rows * row_vectors;
  for (uint32_t index = blockIdx.y * kMergeStatesThreads + threadIdx.x; index < vectors;
       index += gridDim.y * kMergeStatesThreads) {
    const uint32_t row_in_cta = params.cta_rows == 1 ? 0 : divided(index, params.row_vectors);
    const uint32_t in_row = index - row_in_cta * row_vectors;
    const int64_t row = int64_t{blockIdx.x} * params.cta_rows + row_in_cta;
    if (row >= params.num_rows) return;
    const int32_t head = divided(in_row, params.head_vectors);
    const int32_t element = (in_row - head * params.head_vectors.divisor) * kCount;
    const int64_t lse_index = head * params.num_rows + row;
    // All loads are issued together: whether a state is empty, which depends on its lse, is decided afterwards.
    const auto chunk_a = load<T, kCount>(params.a, row, head, element);
    const auto chunk_b = load<T, kCount>(params.b, row, head, element);
    const MergeWeights merged = merge_weights(__ldg(params.a.lse + lse_index), __ldg(params.b.lse + lse_index));
    Chunk<T, kCount> chunk = {};
    if (merged.has_a && merged.has_b) {
      float numbers[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float a = Element<T>::to_f32(chunk_a.elements[i]), b = Element<T>::to_f32(chunk_b.elements[i]);
        numbers[i] = merged.weight_a * a + merged.weight_b * b;
      }
      chunk = rounded<T>(numbers);
    } else if (merged.has_a) {
      chunk = chunk_a;
    } else if (merged.has_b) {
      chunk = chunk_b;
    }
    const int64_t first = (row * params.num_heads + head) * params.head_dim + element;
    store_chunk(static_cast<T*>(params.out) + first, chunk);
    if (element == 0) params.lse[lse_index] = merged.lse;
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kMergeStatesThreads)
    XA_ENTRY(const __grid_constant__ xa::MergeStatesParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  if (params.aligned != 0) {
    xa::merge_rows<T, 16 / sizeof(T)>(params);
  } else {
    xa::merge_rows<T, 1>(params);
  }
}
