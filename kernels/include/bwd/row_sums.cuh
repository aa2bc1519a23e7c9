// Rows of gradients that all warps of a CTA add up together, each some terms: their sums in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/gradient_type.cuh"
#include "chunk.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"

namespace xa {

/// kRows rows of Shape::kHeadDim columns. In each warp kLanes adjacent lanes divide the columns of a row, and the other
/// lanes have other terms of the same columns.
template <typename Shape, int kLanes, int kRows>
class RowSums {
  static constexpr int kPitch = kRows * Shape::kHeadDim;
  float* const sums_;  // [kWarps, kRows, kHeadDim]

 public:
  static constexpr int kBytes = Shape::kThreads / 32 * kPitch * sizeof(float);

  /// `memory` has kBytes bytes.
  __device__ __forceinline__ explicit RowSums(uint8_t* memory) : sums_(reinterpret_cast<float*>(memory)) {}

  /// Adds up the warp's terms of row `row` and columns from `column` on. All lanes of the warp call it; __syncthreads
  /// must follow.
  template <int kElements>
  __device__ __forceinline__ void put(int row, int32_t column, const float (&terms)[kElements]) const {
    float* const to = sums_ + threadIdx.x / 32 * kPitch + row * Shape::kHeadDim + column;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      float sum = terms[i];
#pragma unroll
      for (int distance = kLanes; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      if (threadIdx.x % 32 < kLanes) to[i] = sum;
    }
  }

  /// Stores `factor` times row `row` as row `place` of `gradient`, which has `dim` columns. All threads of the CTA call
  /// it.
  template <typename T>
  __device__ __forceinline__ void store(const BackwardParams& params, void* gradient, int row, int64_t place,
                                        int32_t dim, float factor) const {
    with_gradient_type<T>(params, gradient, [&](auto* to) {
      for (int32_t column = threadIdx.x; column < dim; column += Shape::kThreads) {
        to[place * dim + column] = rounded<std::remove_reference_t<decltype(*to)>>(sum(row, column) * factor);
      }
    });
  }
  /// The sum of a column of row `row`.
  __device__ __forceinline__ float sum(int row, int32_t column) const {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Shape::kThreads / 32; ++warp) {
      sum += sums_[warp * kPitch + row * Shape::kHeadDim + column];
    }
    return sum;
  }
};

}  // namespace xa
