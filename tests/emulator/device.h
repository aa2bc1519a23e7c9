// CUDA C++ on the host: keywords, vector types and the intrinsics that our kernels use.
//
// Every thread of a block is a fiber (device.cc). A collective operation of a warp or block is executed by the last
// fiber that arrives at it. Blocks run one after the other; those of a cluster take turns, where all threads wait.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static  // one copy suffices: blocks run one after the other
#define __align__(n) alignas(n)

using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern "C" uint8_t shared[];  // the block's dynamic shared memory

namespace emulator {

constexpr int kWarp = 32;

/// A collective operation of a warp: each lane passes its operands, and the last lane runs `operation` on those of all.
void warp_collective(void (*operation)(void* const* lanes), void* mine);
/// Waits for all threads of the block; returns whether `mine` was true for all of them.
bool barrier_and(bool mine);
/// bar.sync, bar.red.and: waits until `threads` threads have arrived at the numbered barrier; returns whether `mine`
/// was true for all of them.
bool barrier(int number, int threads, bool mine = true);
/// bar.arrive: arrives at the numbered barrier without waiting.
void barrier_arrive(int number, int threads);
/// An mbarrier at an address of shared memory. A phase completes when `arrivals` threads have arrived and the bytes
/// that they expect have been copied.
void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_inval(uint32_t address);
void mbarrier_arrive(uint32_t address, uint32_t expected_bytes);
void mbarrier_complete_tx(uint32_t address, uint32_t bytes);
/// Likewise at block `rank` of the cluster, which must have started.
void mbarrier_arrive_at_rank(uint32_t address, uint32_t rank);
void mbarrier_complete_tx_at_rank(uint32_t address, uint32_t rank, uint32_t bytes);
/// Waits until the phase of this parity has completed.
void mbarrier_wait(uint32_t address, uint32_t parity);
/// Likewise, while blocks of the cluster that run meanwhile may complete it.
void mbarrier_wait_in_cluster(uint32_t address, uint32_t parity);
/// barrier.cluster: arrives, and waits until all threads of the cluster have arrived or ended.
void cluster_arrive();
void cluster_wait();
/// The shared memory of block `rank` of the cluster, which must have started.
uint8_t* shared_of_rank(uint32_t rank);
/// Stores bytes there.
void store_cluster(uint32_t address, uint32_t rank, const void* from, int bytes);
/// The same, and the bytes count towards that block's mbarrier.
void store_cluster_async(uint32_t address, uint32_t rank, const void* from, int bytes, uint32_t barrier);
[[noreturn]] void fail(const char* why);
/// Switches to other threads of the block, if any. A thread that polls a number in memory calls it.
void yield_thread();
/// A copy to `bytes` bytes of shared memory that is visible after `cp_async_wait`: the first `copied` ones of the
/// source, then zeros.
void cp_async(uint32_t destination, const void* source, int bytes, int copied);
void cp_async_commit();
void cp_async_wait(int pending);
/// A bulk copy from shared memory, which is not read before the thread's `bulk_wait_group`, so that writing it too
/// early is noticed. All but the last `pending` copies are waited for.
void bulk_store(std::function<void()> copy);
void bulk_wait_group(size_t pending = 0);

/// The value that lane `pick(own lane)` passes.
template <typename T, typename Pick>
T exchange(T mine, Pick pick) {
  struct Lane {
    T given, got;
    int source;
  } lane{mine, mine, pick(static_cast<int>(threadIdx.x) % kWarp)};
  warp_collective(
      [](void* const* lanes) {
        for (int i = 0; i < kWarp; ++i) {
          Lane* const to = static_cast<Lane*>(lanes[i]);
          to->got = static_cast<const Lane*>(lanes[to->source])->given;
        }
      },
      &lane);
  return lane.got;
}

/// Bit i is the value that lane i passes.
inline uint32_t ballot(bool mine) {
  struct Lane {
    bool given;
    uint32_t got;
  } lane{mine, 0};
  warp_collective(
      [](void* const* lanes) {
        uint32_t all = 0;
        for (int i = 0; i < kWarp; ++i) all |= static_cast<uint32_t>(static_cast<Lane*>(lanes[i])->given) << i;
        for (int i = 0; i < kWarp; ++i) static_cast<Lane*>(lanes[i])->got = all;
      },
      &lane);
  return lane.got;
}

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned, T x, int source, int width = emulator::kWarp) {
  return emulator::exchange(x, [=](int lane) { return (lane & -width) | (source & (width - 1)); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::exchange(x, [=](int lane) { return lane ^ mask; });
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int distance) {
  return emulator::exchange(x, [=](int lane) { return lane >= distance ? lane - distance : lane; });
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int distance) {
  return emulator::exchange(x, [=](int lane) { return lane + distance < emulator::kWarp ? lane + distance : lane; });
}
/// Lanes that diverge run one at a time, so the mask holds the calling lane alone.
inline unsigned __activemask() { return 1u << threadIdx.x % emulator::kWarp; }
inline unsigned __ballot_sync(unsigned lanes, bool x) { return lanes == ~0u ? emulator::ballot(x) : x ? lanes : 0; }
inline bool __any_sync(unsigned, bool x) { return emulator::ballot(x) != 0; }
inline bool __all_sync(unsigned, bool x) { return emulator::ballot(x) == ~0u; }
inline void __syncwarp() { emulator::ballot(false); }
inline void __syncthreads() { emulator::barrier_and(true); }
inline int __syncthreads_and(int x) { return emulator::barrier_and(x != 0); }
inline int __syncthreads_or(int x) { return !emulator::barrier_and(x == 0); }
inline int __syncthreads_count(int x) {
  static thread_local int count;  // the threads of a CTA run one at a time
  __syncthreads();
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  count += x != 0;
  __syncthreads();
  return count;
}

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcg(T* to, T x) {
  *to = x;
}
inline float __uint_as_float(uint32_t x) { return emulator::bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulator::bits_as<uint32_t>(x); }
inline float __int_as_float(int32_t x) { return emulator::bits_as<float>(x); }
inline int32_t __float_as_int(float x) { return emulator::bits_as<int32_t>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
/// Saturated; 0 for a NaN.
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  return x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : static_cast<int>(std::nearbyint(x));
}
inline unsigned __float2uint_rd(float x) { return static_cast<unsigned>(std::floor(x)); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
// `volatile` keeps the compiler from contracting a product and a sum into one rounding.
inline float __fmul_rn(float x, float y) {
  const volatile float product = x * y;
  return product;
}
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) {
  const volatile float sum = x + y;
  return sum;
}
inline int __reduce_max_sync(unsigned, int x) {
  for (int distance = 1; distance < emulator::kWarp; distance *= 2) x = std::max(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
inline int __reduce_add_sync(unsigned, int x) {
  for (int distance = 1; distance < emulator::kWarp; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
  for (int distance = 1; distance < emulator::kWarp; distance *= 2) x |= __shfl_xor_sync(~0u, x, distance);
  return x;
}
inline float __fdividef(float x, float y) { return x / y; }
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long x) {
  const unsigned long long before = *to;
  *to += x;
  return before;
}
inline unsigned atomicOr(unsigned* to, unsigned x) {
  const unsigned before = *to;
  *to |= x;
  return before;
}
inline void __threadfence() {}
inline int atomicMin(int* to, int x) {
  const int before = *to;
  if (x < before) *to = x;
  return before;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<uint64_t>(x) * y >> 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned chosen = selector >> 4 * i & 15;
    uint8_t byte = static_cast<uint8_t>(bytes >> 8 * (chosen & 7));
    if (chosen & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= static_cast<unsigned>(byte) << 8 * i;
  }
  return result;
}
