// The PTX instructions that only the backward kernels of sm_90a use, one thin wrapper each; the others are in
// hopper/ptx.cuh.
#pragma once

#include <cstdint>

#include "hopper/ptx.cuh"

namespace xa::hopper::ptx {

/// Loads 16 bytes that no thread writes while the kernel runs, without keeping them in L1.
__device__ __forceinline__ uint4 load_no_allocate(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}
/// Copies 4 bytes to shared memory, or writes zeros if `is_copied` is false.
__device__ __forceinline__ void cp_async_4_zfill(uint32_t destination, const void* source, bool is_copied) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(is_copied ? 4 : 0)
               : "memory");
}

/// Copies `bytes` contiguous bytes from shared to global memory.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
/// Adds `bytes` bytes of f32 in shared memory to those in global memory.
__device__ __forceinline__ void bulk_reduce_add_f32(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

/// Arrives at named barrier `id` without waiting; `threads` includes the threads that wait at it.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Orders this thread's own memory accesses against the async proxy (bulk copies), in both directions.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(int32_t* to, int32_t value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ float load_shared_f32(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_shared_f32x2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}
/// A store under a predicate, across which the compiler moves other instructions.
__device__ __forceinline__ void store_shared_f32_if(uint32_t address, float value, bool stores) {
  asm volatile("{\n.reg .pred stores;\nsetp.ne.b32 stores, %2, 0;\n@stores st.shared.f32 [%0], %1;\n}" ::"r"(address),
               "f"(value), "r"(static_cast<int32_t>(stores))
               : "memory");
}

/// The two f16 values packed in a register.
__device__ __forceinline__ float2 unpack_f16(uint32_t pair) {
  float2 value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(pair));
  return value;
}

}  // namespace xa::hopper::ptx
