// PTX instructions for stores to the shared memory of another CTA of the cluster, which count towards an mbarrier
// there.
#pragma once

#include <cstdint>

#include "hopper/cluster_ptx.cuh"

namespace xa::ptx {

/// Stores 16 bytes at shared address `address` of CTA `rank` of the cluster. They count towards its mbarrier at shared
/// address `barrier`.
__device__ __forceinline__ void store_async_16(uint32_t address, uint32_t rank, const float4& x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   map_shared_rank(address, rank)),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(map_shared_rank(barrier, rank))
               : "memory");
}
/// Likewise 8 bytes.
__device__ __forceinline__ void store_async_8(uint32_t address, uint32_t rank, const float2& x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   map_shared_rank(address, rank)),
               "f"(x.x), "f"(x.y), "r"(map_shared_rank(barrier, rank))
               : "memory");
}
/// Likewise 4 bytes.
__device__ __forceinline__ void store_async_4(uint32_t address, uint32_t rank, uint32_t x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   map_shared_rank(address, rank)),
               "r"(x), "r"(map_shared_rank(barrier, rank))
               : "memory");
}
/// Waits until the phase of this parity of an mbarrier has completed, that is by default the first one; what other CTAs
/// have stored for it is then visible.
__device__ __forceinline__ void wait_for_cluster_stores(uint32_t barrier, uint32_t parity = 0) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

}  // namespace xa::ptx
