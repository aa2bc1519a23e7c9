// kernels/include/hopper_bwd/ptx.cuh on the host. Copies from shared to global memory are performed immediately.
#pragma once
#include "hopper/ptx.cuh"

namespace xa::hopper::ptx {

inline uint4 load_no_allocate(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("a misaligned load");
  uint4 x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline void cp_async_4_zfill(uint32_t destination, const void* source, bool is_copied) {
  if (destination % 4 != 0 || reinterpret_cast<uintptr_t>(source) % 4 != 0) emulator::fail("a misaligned cp.async");
  const uint32_t zero = 0;
  std::memcpy(::shared + destination, is_copied ? source : &zero, 4);
}
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  if (from % 16 != 0 || bytes % 16 != 0) emulator::fail("a misaligned bulk copy");
  std::memcpy(to, ::shared + from, bytes);
}
inline void bulk_reduce_add_f32(void* to, uint32_t from, uint32_t bytes) {
  if (from % 16 != 0 || bytes % 16 != 0) emulator::fail("a misaligned bulk copy");
  for (uint32_t i = 0; i < bytes / 4; ++i) static_cast<float*>(to)[i] += reinterpret_cast<float*>(::shared + from)[i];
}
inline void named_barrier_arrive(int id, int threads) { emulator::barrier_arrive(id, threads); }
inline void fence_proxy_async() {}
/// Yields to the other threads of the CTA, because callers poll.
inline int32_t load_acquire(const int32_t* from) {
  const int32_t value = *from;
  emulator::yield_thread();
  return value;
}
inline void store_release(int32_t* to, int32_t value) { *to = value; }
inline float load_shared_f32(uint32_t address) {
  float value;
  std::memcpy(&value, ::shared + address, sizeof(value));
  return value;
}
inline float2 load_shared_f32x2(uint32_t address) {
  float2 value;
  std::memcpy(&value, ::shared + address, sizeof(value));
  return value;
}
inline void store_shared_f32_if(uint32_t address, float value, bool stores) {
  if (address % 4 != 0) emulator::fail("a misaligned store");
  if (stores) std::memcpy(::shared + address, &value, sizeof(value));
}
inline float2 unpack_f16(uint32_t pair) {
  return {xa::ptx::f16_to_f32(static_cast<uint16_t>(pair)), xa::ptx::f16_to_f32(static_cast<uint16_t>(pair >> 16))};
}

}  // namespace xa::hopper::ptx
