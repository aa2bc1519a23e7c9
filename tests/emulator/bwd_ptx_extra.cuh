// Replaces kernels/include/bwd/ptx_extra.cuh on the host.
#pragma once
#include "device.h"

namespace xa::ptx {

inline int32_t thread() { return static_cast<int32_t>(threadIdx.x); }
template <typename T>
inline T* opaque(T* x) {
  return x;
}
inline uint16_t load_shared_2(uint32_t address) {
  uint16_t x;
  std::memcpy(&x, ::shared + address, 2);
  return x;
}
inline void store_shared_4(uint32_t address, uint32_t x) { std::memcpy(::shared + address, &x, 4); }
inline void cp_async_4(uint32_t destination, const void* source) { emulator::cp_async(destination, source, 4, 4); }
inline void cp_async_16_of_256(uint32_t destination, const void* source, bool predicate) {
  emulator::cp_async(destination, source, 16, predicate ? 16 : 0);
}
inline void cp_async_16_of(uint32_t destination, const void* source, int32_t bytes) {
  emulator::cp_async(destination, source, 16, bytes);
}
inline uint4 load_global_16_of_256(const void* from) { return *static_cast<const uint4*>(from); }
inline void store_global_2(void* to, uint16_t x) { std::memcpy(to, &x, 2); }
inline void store_global_4(void* to, uint32_t x) { std::memcpy(to, &x, 4); }
inline void store_global_16(void* to, uint4 x) { *static_cast<uint4*>(to) = x; }
inline void store_global_8(float* to, float2 x) { *reinterpret_cast<float2*>(to) = x; }

}  // namespace xa::ptx
