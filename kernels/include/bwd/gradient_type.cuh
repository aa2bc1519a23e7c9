// The type of dq, dk and dv: that of the operands, or f32.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "params/attention_bwd.cuh"

namespace xa {

/// Calls `function(gradient)` with the gradient's address in its type: f32 with BackwardParams::widens_gradients, else
/// T.
template <typename T, typename Function>
__device__ __forceinline__ void with_gradient_type(const BackwardParams& params, void* gradient,
                                                   const Function& function) {
  if constexpr (Element<T>::kIs16Bit) {
    if (params.widens_gradients != 0) return function(static_cast<float*>(gradient));
  }
  function(static_cast<T*>(gradient));
}

/// Bytes of an element of a gradient.
template <typename T>
__device__ __forceinline__ int32_t gradient_bytes(const BackwardParams& params) {
  return Element<T>::kIs16Bit && params.widens_gradients != 0 ? sizeof(float) : sizeof(T);
}

}  // namespace xa
