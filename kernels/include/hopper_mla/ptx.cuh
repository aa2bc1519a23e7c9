// PTX instructions of fp8_load.cuh, one thin wrapper each.
#pragma once

#include <cstdint>

namespace xa::hopper_mla::ptx {

/// Loads 16 bytes that this kernel does not write, past L1. If `predicate` is false it reads nothing and returns zeros.
__device__ __forceinline__ uint4 load_global_16(const void* source, bool predicate) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred loads;\n"
      "setp.ne.b32 loads, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@loads ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(source), "r"(static_cast<int32_t>(predicate)));
  return x;
}
/// Starts to load a line to L2.
__device__ __forceinline__ void prefetch_l2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace xa::hopper_mla::ptx
