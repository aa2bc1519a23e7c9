// Replaces kernels/include/warp_tile_ptx.cuh on the host: the same functions without PTX.
#pragma once
#include "ptx.cuh"

namespace xa::ptx {

inline uint32_t transpose_8x8(uint32_t pair) {
  const int32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto element = [&](int32_t row) { return __shfl_sync(~0u, pair, 4 * row + g / 2) >> 16 * (g % 2) & 0xffff; };
  const uint32_t low = element(2 * t), high = element(2 * t + 1);
  return low | high << 16;
}

}  // namespace xa::ptx
