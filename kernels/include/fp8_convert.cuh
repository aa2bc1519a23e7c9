// The PTX that makes 8-bit floats of f32, from sm_89 on. It is not in ptx.cuh because most attention kernels, which all
// include that, make none: they would be compiled anew for a change here.
#pragma once

#include <cstdint>

namespace xa::ptx {

/// The codes of four numbers in e4m3fn, the first in the lowest byte: to nearest even, what is too large becomes the
/// largest finite number, every NaN 0x7f.
__device__ __forceinline__ uint32_t f32_to_e4m3(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

/// The same in e5m2.
__device__ __forceinline__ uint32_t f32_to_e5m2(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

}  // namespace xa::ptx
