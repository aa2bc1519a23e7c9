// Conversion of f32 to fp8: rounded to nearest even, saturated to the largest finite number (infinities included),
// every NaN as 0x7f.
#pragma once

#include <cstdint>

#include "fp8_convert.cuh"
#include "ptx.cuh"

namespace xa {

#if __CUDA_ARCH__ >= 890

struct F8E4M3Fn {
  /// The codes of four numbers, the first in the lowest byte.
  static __device__ __forceinline__ uint32_t encode(float a, float b, float c, float d) {
    return ptx::f32_to_e4m3(a, b, c, d);
  }
};

struct F8E5M2 {
  static __device__ __forceinline__ uint32_t encode(float a, float b, float c, float d) {
    return ptx::f32_to_e5m2(a, b, c, d);
  }
};

#else

/// Conversion to fp8 by f32 and f16 arithmetic, for GPUs before sm_89, which have no instruction for it.
///
/// Numbers are scaled so that the smallest normal number of the format becomes that of f16. A number that is rounded to
/// the mantissa of the format is then an f16 whose upper bits, shifted by kExponentShift, are the fp8 code.
template <int kMantissaBits, int kExponentShift>
struct Fp8Rounding {
  static_assert(kExponentShift == 0 || kExponentShift == 1, "exponent bits that f16 has more than the format");

  /// The codes of four numbers, the first in the lowest byte.
  static __device__ __forceinline__ uint32_t encode(float a, float b, float c, float d) {
    return __byte_perm(pair(a, b), pair(c, d), 0x7531);
  }

 private:
  // The exponent of e4m3fn is one bit shorter than that of f16, and its bias smaller by 8.
  static constexpr float kScale = kExponentShift == 0 ? 1.0f : 0x1p-8f;
  static constexpr float kLargest = kExponentShift == 0 ? 57344.0f : 448.0f * kScale;

  /// The codes of two numbers, each in the upper byte of 16 bits.
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const uint32_t magnitudes = ptx::pack_f16(magnitude(low), magnitude(high));
    // Only the signs are used; packing makes a NaN positive.
    const uint32_t signs = ptx::pack_bf16(low, high);
    return (magnitudes << kExponentShift & 0x7fff7fffu) | (signs & 0x80008000u);
  }

  /// |x| clamped, scaled by kScale and rounded to the mantissa of the format.
  static __device__ __forceinline__ float magnitude(float x) {
    const float size = fabsf(x) * kScale;
    // A NaN stays a NaN.
    const float clamped = size > kLargest ? kLargest : size;
    constexpr uint32_t kSmallestNormal = (127u - 14u) << 23;
    const float power = __uint_as_float(max(__float_as_uint(clamped) & 0x7f800000u, kSmallestNormal));
    // Adding and subtracting power * kCoarse rounds: the last place of the sum is that of the format.
    constexpr float kCoarse = static_cast<float>(1u << (23 - kMantissaBits));
    return fmaf(power, -kCoarse, fmaf(power, kCoarse, clamped));
  }
};

using F8E4M3Fn = Fp8Rounding<3, 1>;
using F8E5M2 = Fp8Rounding<2, 0>;

#endif

}  // namespace xa
