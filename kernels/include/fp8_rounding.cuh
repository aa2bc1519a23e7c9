// From f32 to 8-bit floats, in integers and one addition: the portable PTX has no instruction for it.
#pragma once

#include <cstdint>

namespace xa {

/// Of an 8-bit float. Numbers round to nearest even; what is larger than kLargest (the bits of an f32), infinities
/// included, becomes the largest finite number; every NaN becomes 0x7f.
template <int kMantissaBits, int kBias, uint32_t kLargest>
struct Fp8Rounding {
  static __device__ __forceinline__ uint32_t encode(float x) {
    constexpr int kDropped = 23 - kMantissaBits;
    constexpr uint32_t kSmallestNormal = (127u + 1u - kBias) << 23;
    // A power of two whose last place is the distance between subnormal numbers.
    constexpr uint32_t kCoarse = (127u + 1u - kBias - kMantissaBits + 23u) << 23;
    const uint32_t bits = __float_as_uint(x);
    const uint32_t magnitude = min(bits & 0x7fffffffu, kLargest);
    // Just under half of the last kept place, and one more where that place is odd; a carry into the exponent is right.
    const uint32_t rounded = magnitude + ((1u << (kDropped - 1)) - 1u) + ((magnitude >> kDropped) & 1u);
    const uint32_t normal = (rounded >> kDropped) - ((127u - kBias) << kMantissaBits);
    // The sum rounds to a multiple of that distance, and its mantissa counts them.
    const uint32_t subnormal = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kCoarse)) - kCoarse;
    const uint32_t code = magnitude < kSmallestNormal ? subnormal : normal;
    return x != x ? 0x7fu : code | (bits >> 31) << 7;
  }
};

using F8E4M3Fn = Fp8Rounding<3, 7, 0x43e00000u>;  // 448
using F8E5M2 = Fp8Rounding<2, 15, 0x47600000u>;   // 57344

}  // namespace xa
