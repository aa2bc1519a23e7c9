// Replaces kernels/include/token_scales_ptx.cuh on the host: the same functions without PTX.
#pragma once
#include "ptx.cuh"

namespace xa::ptx {

inline void cp_async_4(uint32_t destination, const void* source, bool predicate) {
  emulator::cp_async(destination, source, 4, predicate ? 4 : 0);
}
inline float2 load_shared_f32x2(uint32_t address) {
  float2 x;
  std::memcpy(&x, ::shared + address, 8);
  return x;
}
inline uint32_t subtract_f16x2(uint32_t a, uint32_t b) {
  const auto half = [&](int shift) {
    return host::F16::to_f32(static_cast<uint16_t>(a >> shift)) - host::F16::to_f32(static_cast<uint16_t>(b >> shift));
  };
  return host::pack<host::F16>(half(0), half(16));
}

}  // namespace xa::ptx
