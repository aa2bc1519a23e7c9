// The parameter of the portable backward kernels, by shape.
#pragma once

#include <type_traits>

#include "params/attention_bwd.cuh"
#include "params/bias.cuh"
#include "params/key_ranges.cuh"

namespace xa {

/// The parameter of a kernel of this shape.
template <typename Shape>
using BackwardParamsOf = std::conditional_t<Shape::kHasRanges, KeyRangeBackwardParams,
                                            std::conditional_t<Shape::kHasBias, BiasBackwardParams, BackwardParams>>;

__device__ __forceinline__ const BackwardParams& backward_of(const BackwardParams& params) { return params; }
__device__ __forceinline__ const BackwardParams& backward_of(const KeyRangeBackwardParams& params) {
  return params.backward;
}
__device__ __forceinline__ const BackwardParams& backward_of(const BiasBackwardParams& params) {
  return params.backward;
}

}  // namespace xa
