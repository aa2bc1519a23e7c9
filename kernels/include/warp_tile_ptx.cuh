// PTX of decode whose warps compute tiles alone. It is kept out of ptx.cuh because every kernel includes that.
#pragma once

#include <cstdint>

namespace xa::ptx {

/// Transposes an 8x8 matrix of 16-bit elements: lane 4g + t has columns 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace xa::ptx
