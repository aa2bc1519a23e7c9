// Powers of two that bring scales of V into f16's range, where weights are multiplied by both (token_scales.cuh).
#pragma once

#include <cstdint>

namespace xa {

/// The exponent of a row before it has met a scale, which is also that for scales below 2^-111.
constexpr int32_t kLargestScaleExponent = 126;

/// The exponent field of a scale; 0 for a NaN and infinity, which no power of two brings into f16's range.
__device__ __forceinline__ uint32_t exponent_of_scale(float scale) {
  const uint32_t field = __float_as_uint(scale) >> 23 & 0xff;
  return field == 0xff ? 0 : field;
}
/// The exponent for scales whose largest exponent field is `field`: it brings that scale into [2^14, 2^15).
__device__ __forceinline__ int32_t exponent_for_scales(int32_t field) {
  return min(127 + 14 - field, kLargestScaleExponent);
}
__device__ __forceinline__ float power_of_two(int32_t exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}
/// The factor of what was added up before an exponent changed by `change`, which is not positive.
__device__ __forceinline__ float exponent_change(int32_t change) { return change < -126 ? 0.0f : power_of_two(change); }

}  // namespace xa
