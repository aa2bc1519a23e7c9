// Products of f32 by bf16 tensor cores. x is the sum of three bf16, high + middle + low, exactly but for its last bit,
// and of the nine products of two such sums six are larger than 2^-24 of the whole. (Three tf32 products take as long,
// keep 22 bits, and need a transposed V.)
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace xa::hopper {

constexpr int kParts = 3;

/// The products of parts that count, the smallest first: a sum is rounded each time a product is added to it.
constexpr int kPartProducts = 6;
struct PartProduct {
  int a;
  int b;
  __device__ __forceinline__ explicit constexpr PartProduct(int index) : a(0), b(0) {
    constexpr int kA[] = {2, 0, 1, 1, 0, 0}, kB[] = {0, 2, 1, 0, 1, 0};
    a = kA[index];
    b = kB[index];
  }
};

/// The parts of two adjacent elements, as pairs of bf16. Infinity, and what bf16 rounds to it (above 3.396e38), has NaN
/// among its parts.
__device__ __forceinline__ void split(float x, float y, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    parts[part] = xa::ptx::pack_bf16(x, y);
    x -= __uint_as_float(parts[part] << 16);
    y -= __uint_as_float(parts[part] & 0xffff0000u);
  }
}

}  // namespace xa::hopper
