// Vectors of consecutive elements that a thread loads, converts and stores with one instruction, and division by a
// run-time constant.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "params/divisor.cuh"

namespace xa {

/// kCount consecutive elements, aligned to their total size.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Chunk {
  T elements[kCount];
};

template <typename T, int kCount>
__device__ __forceinline__ Chunk<T, kCount> load_chunk(const T* from) {
  return *reinterpret_cast<const Chunk<T, kCount>*>(from);
}

template <typename T, int kCount>
__device__ __forceinline__ void store_chunk(T* to, const Chunk<T, kCount>& chunk) {
  *reinterpret_cast<Chunk<T, kCount>*>(to) = chunk;
}

/// An f32 as T, rounded to nearest even.
template <typename T>
__device__ __forceinline__ T rounded(float x) {
  if constexpr (Element<T>::kIs16Bit) {
    return T{static_cast<uint16_t>(Element<T>::pack(x, 0.0f))};
  } else {
    return x;
  }
}

/// f32 numbers as consecutive elements of T, each rounded to nearest even.
template <typename T, int kCount>
__device__ __forceinline__ Chunk<T, kCount> rounded(const float (&numbers)[kCount]) {
  Chunk<T, kCount> chunk;
  if constexpr (Element<T>::kIs16Bit && kCount % 2 == 0) {
    // One instruction rounds two numbers.
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const uint32_t pair = Element<T>::pack(numbers[i], numbers[i + 1]);
      chunk.elements[i] = T{static_cast<uint16_t>(pair)};
      chunk.elements[i + 1] = T{static_cast<uint16_t>(pair >> 16)};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) chunk.elements[i] = rounded<T>(numbers[i]);
  }
  return chunk;
}

/// n / by.divisor, by a multiplication if the host has found an inverse (params/divisor.cuh).
__device__ __forceinline__ uint32_t divided(uint32_t n, const Divisor& by) {
  return by.inverse != 0 ? __umulhi(n, by.inverse) : n / by.divisor;
}

}  // namespace xa
