// kernels/include/cluster_async.cuh on the host.
#pragma once
#include "device.h"

namespace xa::ptx {

inline void store_async_16(uint32_t address, uint32_t rank, const float4& x, uint32_t barrier) {
  emulator::store_cluster_async(address, rank, &x, sizeof(x), barrier);
}
inline void store_async_8(uint32_t address, uint32_t rank, const float2& x, uint32_t barrier) {
  emulator::store_cluster_async(address, rank, &x, sizeof(x), barrier);
}
inline void store_async_4(uint32_t address, uint32_t rank, uint32_t x, uint32_t barrier) {
  emulator::store_cluster_async(address, rank, &x, sizeof(x), barrier);
}
inline void wait_for_cluster_stores(uint32_t barrier, uint32_t parity = 0) {
  emulator::mbarrier_wait_in_cluster(barrier, parity);
}

}  // namespace xa::ptx
