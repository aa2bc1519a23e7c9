// PTX for pairs of 16-bit numbers, from sm_90 on. It is kept out of hopper/ptx.cuh, which more kernels include.
#pragma once

#include <cstdint>

namespace xa::hopper::ptx {

/// The larger ones of two pairs of unsigned integers.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t x, uint32_t y) {
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}

/// The products of two pairs of bf16.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t x, uint32_t y) {
  uint32_t products;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(x), "r"(y));
  return products;
}

}  // namespace xa::hopper::ptx
