// PTX instructions for clusters of CTAs, one thin wrapper each.
#pragma once

#include <cstdint>

namespace xa::ptx {

// The cluster's barrier: a thread arrives, and later waits until every thread of the cluster has arrived or ended. All
// lanes of a warp call these together.

/// Arrives without ordering memory accesses. With that order this would be a fence of the whole GPU.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
/// Arrives after this thread's stores.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/// Waits; what was stored before `cluster_arrive` is then visible.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// The address of a location of the CTA's shared memory in that of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t map_shared_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

/// Stores 16 bytes at shared address `address` of CTA `rank` of the cluster.
__device__ __forceinline__ void store_cluster_16(uint32_t address, uint32_t rank, const float4& x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(map_shared_rank(address, rank)), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
/// Likewise 8 bytes.
__device__ __forceinline__ void store_cluster_8(uint32_t address, uint32_t rank, const float2& x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(map_shared_rank(address, rank)), "f"(x.x), "f"(x.y)
               : "memory");
}

}  // namespace xa::ptx
