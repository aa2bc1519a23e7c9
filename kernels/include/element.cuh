// Element types of tensors: storage, conversion from f32, and the matrix instruction of each.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace xa {

struct F16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};
using F32 = float;

// Values of the axis `dtype` of variants.toml.
using dtype_f16 = F16;
using dtype_bf16 = Bf16;
using dtype_f32 = F32;

template <typename T>
struct Element;

template <>
struct Element<F16> {
  static constexpr bool kIs16Bit = true;
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return ptx::pack_f16(low, high); }
  static __device__ __forceinline__ float to_f32(F16 x) { return ptx::f16_to_f32(x.bits); }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_f16(c, a, b0, b1);
  }
};

template <>
struct Element<Bf16> {
  static constexpr bool kIs16Bit = true;
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return ptx::pack_bf16(low, high); }
  static __device__ __forceinline__ float to_f32(Bf16 x) {
    return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
};

template <>
struct Element<F32> {
  static constexpr bool kIs16Bit = false;
  static __device__ __forceinline__ float to_f32(float x) { return x; }
};

/// The two elements of 16 bits that are packed in a register.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return make_float2(Element<T>::to_f32(T{static_cast<uint16_t>(pair)}),
                     Element<T>::to_f32(T{static_cast<uint16_t>(pair >> 16)}));
}

/// Stores four f32 values as consecutive elements; `to` is aligned to all four.
template <typename T>
__device__ __forceinline__ void store_columns(T* to, const float4& x) {
  if constexpr (Element<T>::kIs16Bit) {
    *reinterpret_cast<uint2*>(to) = make_uint2(Element<T>::pack(x.x, x.y), Element<T>::pack(x.z, x.w));
  } else {
    *reinterpret_cast<float4*>(to) = x;
  }
}

/// Stores two f32 values as consecutive elements; `to` is aligned to both.
template <typename T>
__device__ __forceinline__ void store_columns(T* to, const float2& x) {
  if constexpr (Element<T>::kIs16Bit) {
    *reinterpret_cast<uint32_t*>(to) = Element<T>::pack(x.x, x.y);
  } else {
    *reinterpret_cast<float2*>(to) = x;
  }
}

__device__ __forceinline__ float2 scaled(const float2& x, float factor) {
  return make_float2(x.x * factor, x.y * factor);
}
__device__ __forceinline__ float4 scaled(const float4& x, float factor) {
  return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

}  // namespace xa

// XA_PASTE(dtype_, XA_DTYPE) is the type of the variant's dtype.
#define XA_PASTE_EXPANDED(a, b) a##b
#define XA_PASTE(a, b) XA_PASTE_EXPANDED(a, b)
