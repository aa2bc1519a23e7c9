// kernels/include/hopper/cluster_ptx.cuh on the host.
#pragma once
#include "device.h"

namespace xa::ptx {

inline void cluster_arrive_relaxed() { emulator::cluster_arrive(); }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }

inline void store_cluster_16(uint32_t address, uint32_t rank, const float4& x) {
  emulator::store_cluster(address, rank, &x, sizeof(x));
}
inline void store_cluster_8(uint32_t address, uint32_t rank, const float2& x) {
  emulator::store_cluster(address, rank, &x, sizeof(x));
}

}  // namespace xa::ptx
