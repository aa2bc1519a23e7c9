// Copies of rows of 16-bit elements between places that differ in their alignment to chunks of 16 bytes.
#pragma once

#include <cstdint>

namespace xa {

/// Eight adjacent elements of two adjacent chunks, from element `shift` of the first one on.
struct ChunkWindow {
  uint4 first, second;

  __device__ __forceinline__ uint4 from(int32_t shift) const {
    uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 4 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 2 ? words[i + 1] : words[i];
    const int32_t bits = shift % 2 * 16;
    const auto word = [&](int i) {
      return static_cast<uint32_t>((static_cast<uint64_t>(words[i + 1]) << 32 | words[i]) >> bits);
    };
    return make_uint4(word(0), word(1), word(2), word(3));
  }
};

}  // namespace xa
