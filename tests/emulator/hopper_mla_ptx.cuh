// kernels/include/hopper_mla/ptx.cuh on the host.
#pragma once
#include "ptx.cuh"

namespace xa::hopper_mla::ptx {

inline uint4 load_global_16(const void* source, bool predicate) {
  uint4 x = {0, 0, 0, 0};
  if (!predicate) return x;
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0) emulator::fail("a misaligned load");
  std::memcpy(&x, source, sizeof(x));
  return x;
}
inline void prefetch_l2(const void*) {}
inline uint4 load_shared_16(uint32_t address) {
  if (address % 16 != 0) emulator::fail("a misaligned load");
  uint4 x;
  std::memcpy(&x, ::shared + address, sizeof(x));
  return x;
}

}  // namespace xa::hopper_mla::ptx
