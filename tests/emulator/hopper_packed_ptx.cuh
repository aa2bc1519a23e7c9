// kernels/include/hopper/packed_ptx.cuh on the host.
#pragma once
#include "element.cuh"

namespace xa::hopper::ptx {

inline uint32_t max_u16x2(uint32_t x, uint32_t y) {
  return std::max(x & 0xffff, y & 0xffff) | std::max(x >> 16, y >> 16) << 16;
}
inline uint32_t multiply_bf16x2(uint32_t x, uint32_t y) {
  const auto product = [](uint32_t a, uint32_t b) { return __uint_as_float(a) * __uint_as_float(b); };
  return Element<Bf16>::pack(product(x << 16, y << 16), product(x & 0xffff0000, y & 0xffff0000));
}

}  // namespace xa::hopper::ptx
