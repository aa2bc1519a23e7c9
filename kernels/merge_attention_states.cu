// Merges attention of the same queries over two disjoint sets of keys: out [n, h, d] and lse [h, n] of both from each.
//
// A part whose lse is not finite is empty: what its out holds has no effect. Where both are, out is 0 and lse -inf.
//
// Compiled once for each XA_DTYPE: f16, bf16, f32.
// Launch: kMergeStatesThreads threads; a CTA takes some rows, or the CTAs (row, 0), (row, 1) and so on share a row.

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "params/merge_attention_states.cuh"

namespace xa {

/// What both parts hold together: shares of a and b, which add up to 1, and the log-sum-exp.
struct Merge {
  bool has_a;
  bool has_b;
  float share_a;
  float share_b;
  float lse;
};

__device__ __forceinline__ Merge merge(float lse_a, float lse_b) {
  // False for NaN too.
  const bool has_a = fabsf(lse_a) < INFINITY, has_b = fabsf(lse_b) < INFINITY;
  if (!has_a || !has_b) return {has_a, has_b, 0.0f, 0.0f, has_a ? lse_a : has_b ? lse_b : -INFINITY};
  const float largest = fmaxf(lse_a, lse_b);
  // One of them is 1.
  const float of_a = expf(lse_a - largest), of_b = expf(lse_b - largest);
  const float sum = of_a + of_b;
  return {true, true, of_a / sum, of_b / sum, largest + log1pf(fminf(of_a, of_b))};
}

template <typename T, int kCount>
__device__ __forceinline__ Chunk<T, kCount> load(const AttentionState& state, int64_t row, int32_t head,
                                                 int32_t element) {
  const T* const out = static_cast<const T*>(state.out);
  return load_chunk<T, kCount>(out + row * state.row_stride + head * state.head_stride + element);
}

/// This CTA's rows, or its share of one, kCount elements at a time.
template <typename T, int kCount>
__device__ __forceinline__ void merge_rows(const MergeParams& params) {
  const uint32_t row_items = params.row_items.divisor, items = params.cta_rows * row_items;
  for (uint32_t item = blockIdx.y * kMergeStatesThreads + threadIdx.x; item < items;
       item += gridDim.y * kMergeStatesThreads) {
    const uint32_t row_in_cta = params.cta_rows == 1 ? 0 : divided(item, params.row_items);
    const uint32_t in_row = item - row_in_cta * row_items;
    const int64_t row = int64_t{blockIdx.x} * params.cta_rows + row_in_cta;
    if (row >= params.num_rows) return;
    const int32_t head = divided(in_row, params.head_items);
    const int32_t element = (in_row - head * params.head_items.divisor) * kCount;
    const int64_t sum = head * params.num_rows + row;
    // All at once: loads that waited for the lse would be late.
    const auto of_a = load<T, kCount>(params.a, row, head, element);
    const auto of_b = load<T, kCount>(params.b, row, head, element);
    const Merge merged = merge(__ldg(params.a.lse + sum), __ldg(params.b.lse + sum));
    Chunk<T, kCount> chunk = {};
    if (merged.has_a && merged.has_b) {
      float numbers[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float a = Element<T>::to_f32(of_a.elements[i]), b = Element<T>::to_f32(of_b.elements[i]);
        numbers[i] = merged.share_a * a + merged.share_b * b;
      }
      chunk = rounded<T>(numbers);
    } else if (merged.has_a) {
      chunk = of_a;
    } else if (merged.has_b) {
      chunk = of_b;
    }
    const int64_t first = (row * params.num_heads + head) * params.head_dim + element;
    store_chunk(static_cast<T*>(params.out) + first, chunk);
    if (element == 0) params.lse[sum] = merged.lse;
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kMergeStatesThreads)
    XA_ENTRY(const __grid_constant__ xa::MergeParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  if (params.aligned != 0) {
    xa::merge_rows<T, 16 / sizeof(T)>(params);
  } else {
    xa::merge_rows<T, 1>(params);
  }
}
