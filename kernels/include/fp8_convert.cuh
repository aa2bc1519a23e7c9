// PTX that converts f32 to fp8, from sm_89 on. It is kept out of ptx.cuh because every attention kernel includes that
// and would be recompiled after a change here, but few of them store fp8.
#pragma once

#include <cstdint>

namespace xa::ptx {

/// Four numbers as e4m3fn, the first in the lowest byte: rounded to nearest even, saturated to the largest finite
/// number, every NaN as 0x7f.
__device__ __forceinline__ uint32_t f32_to_e4m3(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

/// As `f32_to_e4m3`, for e5m2.
__device__ __forceinline__ uint32_t f32_to_e5m2(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

}  // namespace xa::ptx
