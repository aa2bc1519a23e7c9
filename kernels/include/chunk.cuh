// A few neighbouring elements that a thread reads, computes with and writes at once.
#pragma once

#include <cstdint>

#include "element.cuh"

namespace xa {

/// kCount elements, aligned to all of them.
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

/// f32 as T, rounded to nearest even.
template <typename T>
__device__ __forceinline__ T rounded(float x) {
  if constexpr (Element<T>::kIs16Bit) {
    return T{static_cast<uint16_t>(Element<T>::pack(x, 0.0f))};
  } else {
    return x;
  }
}

}  // namespace xa
