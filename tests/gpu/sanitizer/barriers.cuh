// The mbarrier instructions of the programs in this folder, as in kernels/include/hopper/ptx.cuh, and their launch.
#pragma once

#include <cstdint>
#include <cstdio>

__device__ inline uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_end(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Whether the phase with this parity has completed.
__device__ inline bool is_complete(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n.reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!is_complete(barrier, parity)) {
  }
}

/// Runs the kernel on zeroed results and prints them, or the error.
template <int kResults>
int print(void (*kernel)(int*), int threads) {
  int *device = nullptr, host[kResults] = {};
  cudaMalloc(&device, sizeof(host));
  cudaMemset(device, 0, sizeof(host));
  kernel<<<1, threads>>>(device);
  const cudaError_t error = cudaMemcpy(host, device, sizeof(host), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::printf("failed: %s\n", cudaGetErrorString(error));
    return 1;
  }
  std::printf("results:");
  for (int x : host) std::printf(" %d", x);
  std::printf("\n");
  return 0;
}
