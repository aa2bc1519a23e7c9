// The PTX that only sm_90a has, one thin wrapper each: barriers with a transaction count, copies of boxes of a tensor,
// registers that move between warpgroups. The tensor cores' instructions are in wgmma.cuh.
#pragma once

#include <cstdint>

#include "params/tensor_map.cuh"

namespace xa::hopper {

namespace ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/// Its place is free for anything else.
__device__ __forceinline__ void mbarrier_inval(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// What barriers have been initialised to is seen by all, the copy engine included.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and makes the phase last until `bytes` bytes more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Waits for the end of the phase of this parity. Nothing but the wait may stand in the loop: a way out of it, even to
/// a trap, and ptxas gives up dividing registers between warpgroups.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

/// Copies a box to shared memory; `barrier` counts its bytes, those outside of the tensor, which become 0, included.
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1,
                                         int32_t x2, int32_t x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1,
                                         int32_t x2, int32_t x3, int32_t x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
/// As above, with an L2 policy (../ptx.cuh).
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1,
                                         int32_t x2, int32_t x3, int32_t x4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "l"(policy)
      : "memory");
}
/// Copies a box out of shared memory, in the background: the thread waits by `bulk_wait_group_read` until it has been
/// read.
__device__ __forceinline__ void tma_store(uint32_t from, const TensorMap& map, int32_t x0, int32_t x1, int32_t x2,
                                          int32_t x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%1, {%2, %3, %4, %5}], [%0];\n"
      "cp.async.bulk.commit_group;" ::"r"(from),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
/// The boxes that this thread stores have left shared memory.
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// They have arrived.
__device__ __forceinline__ void bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}
/// Copies 4 bytes, of the group that `cp_async_commit` ends (../ptx.cuh).
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
/// The largest of three numbers as signed integers, which is one instruction. (`__vimax3_s32` of a float's bits lets
/// the compiler look at a product's result before it is there.)
__device__ __forceinline__ int32_t max3_as_int(int32_t x, float y, float z) {
  int32_t largest;
  asm("{\n.reg .s32 y, z;\n"
      "mov.b32 y, %2;\n"
      "mov.b32 z, %3;\n"
      "max.s32 y, y, z;\n"
      "max.s32 %0, %1, y;\n}"
      : "=r"(largest)
      : "r"(x), "f"(y), "f"(z));
  return largest;
}
/// `x` in another register, from here on: what waits for products before this does so before the register is written.
__device__ __forceinline__ uint32_t mov_volatile(uint32_t x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// What this thread has stored to shared memory is seen by the copy engine and the tensor cores, after a barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Waits until `threads` threads have come to the numbered barrier.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same number in a register: ptxas would otherwise read a parameter again, just where everything waits for it.
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

/// Registers a thread of this warpgroup has from now on; `kCount` is a multiple of 8.
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace ptx

/// The same number in all lanes, which is what lets the compiler keep what follows from it in uniform registers:
/// without it each address of the tensor cores is moved there one by one.
__device__ __forceinline__ int32_t uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }

}  // namespace xa::hopper
