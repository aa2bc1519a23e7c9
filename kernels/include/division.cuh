// Divisions in few instructions. The instructions before a kernel's first loads are in no cache yet, and each takes as
// long as several of a loop; a division of integers compiles to about twenty.
#pragma once

#include <cstdint>

#include "params/divisor.cuh"

namespace xa {

/// n / by.divisor for n < 2^31.
__device__ __forceinline__ uint32_t divide(uint32_t n, const IndexDivisor& by) {
  return __umulhi(2 * n, by.reciprocal) >> by.shift;
}

/// x / divisor for 0 <= x < 2^20, given 1.0f / divisor: (x + 0.5) / divisor keeps 0.5 / divisor away from every
/// integer.
__device__ __forceinline__ int32_t divide_small(int32_t x, float reciprocal) {
  return __float2int_rd((static_cast<float>(x) + 0.5f) * reciprocal);
}

/// n / divisor, for numbers that are mostly below 2^20, by the same rule.
__device__ __forceinline__ uint32_t divide_mostly_small(uint32_t n, uint32_t divisor) {
  if (__builtin_expect(n >= 1u << 20, false)) return n / divisor;
  return __float2uint_rd(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(divisor)));
}

}  // namespace xa
