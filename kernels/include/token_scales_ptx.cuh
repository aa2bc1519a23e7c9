// PTX for caches with a scale per token and KV head. It is kept out of ptx.cuh because every kernel includes that.
#pragma once

#include <cstdint>

namespace xa::ptx {

/// Copies 4 bytes from global to shared memory. If `predicate` is false it reads nothing and writes zeros.
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source, bool predicate) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(predicate ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ float2 load_shared_f32x2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

/// Differences of two pairs of f16.
__device__ __forceinline__ uint32_t subtract_f16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

}  // namespace xa::ptx
