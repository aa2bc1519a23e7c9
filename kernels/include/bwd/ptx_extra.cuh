// PTX instructions that only the portable backward kernels use, one thin wrapper each.
#pragma once

#include <cstdint>

namespace xa::ptx {

/// threadIdx.x, read from its special register at each use, so that no general register is kept for it.
__device__ __forceinline__ int32_t thread() {
  int32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

/// As `opaque` of a number.
template <typename T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ uint16_t load_shared_2(uint32_t address) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

/// Copies 4 bytes from global to shared memory.
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}

/// As cp_async_16. L2 loads the 256 bytes that they are in.
__device__ __forceinline__ void cp_async_16_of_256(uint32_t destination, const void* source, bool predicate) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(predicate ? 16 : 0)
               : "memory");
}

/// Copies the first `bytes` of 16 bytes from global to shared memory, and writes zeros for the others.
__device__ __forceinline__ void cp_async_16_of(uint32_t destination, const void* source, int32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

/// Loads 16 bytes that nothing stores to meanwhile. L2 loads the 256 bytes that they are in.
__device__ __forceinline__ uint4 load_global_16_of_256(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

/// Stores of 2, 4 and 16 bytes to global memory. A pointer from shared memory is not known to point there.
__device__ __forceinline__ void store_global_2(void* to, uint16_t x) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(x) : "memory");
}
__device__ __forceinline__ void store_global_4(void* to, uint32_t x) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_global_16(void* to, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

/// Stores two f32 to global memory. With a C++ store instead, which needs the address in another form, ptxas spills in
/// the loop before it.
__device__ __forceinline__ void store_global_8(float* to, float2 x) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x.x), "f"(x.y) : "memory");
}

}  // namespace xa::ptx
