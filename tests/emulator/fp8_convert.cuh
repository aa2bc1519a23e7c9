// Replaces kernels/include/fp8_convert.cuh on the host: the same functions without PTX.
#pragma once
#include "device.h"

namespace xa::ptx {

namespace host {

/// `x` as fp8 with the given bits of exponent and mantissa. `largest` is the code of the largest finite number; the
/// highest bit of a code is the sign.
inline uint32_t to_fp8(float x, int exponent_bits, int mantissa_bits, uint32_t largest) {
  if (x != x) return 0x7f;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fabs(x);
  const int smallest = 2 - (1 << (exponent_bits - 1));
  // The number in units of the last place of its exponent, or of the smallest exponent.
  const int exponent = std::max(std::ilogb(size), smallest);
  const float steps = std::nearbyint(std::ldexp(size, mantissa_bits - exponent));
  if (std::isinf(steps)) return sign | largest;
  // Subnormal numbers count from 0; a carry from rounding goes into the exponent.
  const int64_t code = (int64_t{exponent - smallest} << mantissa_bits) + static_cast<int64_t>(steps);
  return sign | static_cast<uint32_t>(std::min<int64_t>(code, largest));
}

}  // namespace host

inline uint32_t f32_to_e4m3(float a, float b, float c, float d) {
  const auto code = [](float x) { return host::to_fp8(x, 4, 3, 0x7e); };
  return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
}
inline uint32_t f32_to_e5m2(float a, float b, float c, float d) {
  const auto code = [](float x) { return host::to_fp8(x, 5, 2, 0x7b); };
  return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
}

}  // namespace xa::ptx
