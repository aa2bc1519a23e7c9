// Thin wrappers of PTX that only sm_90a has: mbarriers with a transaction count, TMA, setmaxnreg. wgmma is in
// wgmma.cuh.
#pragma once

#include <cstdint>

#include "params/tensor_map.cuh"

namespace xa::hopper {

namespace ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/// Ends the mbarrier; its 8 bytes may hold anything else afterwards.
__device__ __forceinline__ void mbarrier_inval(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Makes initialised mbarriers visible to all threads and to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and keeps the phase pending until TMA has written `bytes` more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives at an mbarrier of CTA `rank` of the cluster. Not `.release.cluster`, which would be a fence of the whole
/// GPU: what the CTA has read of a stage it has read when the products are there.
__device__ __forceinline__ void mbarrier_arrive_at_rank(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// Waits until the phase of this parity has completed. The loop must contain nothing else: with any exit from it, even
/// to a trap, ptxas ignores setmaxnreg.
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

/// Loads a box to shared memory; `barrier` counts its bytes. Elements outside the tensor become 0 and count too.
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1,
                                         int32_t x2, int32_t x3, int32_t x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
/// The same with an L2 cache policy (../ptx.cuh).
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1,
                                         int32_t x2, int32_t x3, int32_t x4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "l"(policy)
      : "memory");
}
/// Loads a box to the same address of both CTAs of a cluster of two; in each the mbarrier at `barrier` counts its
/// bytes.
__device__ __forceinline__ void tma_load_pair(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0,
                                              int32_t x1, int32_t x2, int32_t x3, int32_t x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "h"(static_cast<uint16_t>(3))
      : "memory");
}
/// Stores a box from shared memory asynchronously, in the bulk group that `bulk_commit_group` closes. The thread must
/// call `bulk_wait_group_read` before that memory is written again.
__device__ __forceinline__ void tma_store(uint32_t from, const TensorMap& map, int32_t x0, int32_t x1, int32_t x2,
                                          int32_t x3, int32_t x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%1, {%2, %3, %4, %5, %6}], [%0];" ::"r"(from),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
/// The same with an L2 cache policy.
__device__ __forceinline__ void tma_store(uint32_t from, const TensorMap& map, int32_t x0, int32_t x1, int32_t x2,
                                          int32_t x3, int32_t x4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint [%1, {%2, %3, %4, %5, %6}], [%0], "
      "%7;" ::"r"(from),
      "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "l"(policy)
      : "memory");
}
/// Makes this thread's bulk copies since the last call a bulk group.
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until this thread's bulk groups, except the last kPending, have read their shared memory.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until this thread's bulk groups have completed.
__device__ __forceinline__ void bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// Stores four 8x8 matrices of 16-bit elements; lane i holds the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}
/// `stmatrix_x4` with each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ float4 load_shared_f32x4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
/// Arrives at `barrier` when all cp.async of this thread so far are complete; one of the barrier's arrivals.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// The largest of three values whose bits are compared as signed integers, which is one instruction. (With
/// `__vimax3_s32` of a float's bits the compiler reads accumulators before wgmma_wait_group.)
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
/// A copy of `x` in another register, which the compiler may not move up past a preceding wgmma_wait_group.
__device__ __forceinline__ uint32_t mov_volatile(uint32_t x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Whether this is the one lane of a converged warp that the hardware chooses.
__device__ __forceinline__ bool elect_one() {
  uint32_t is_chosen;
  asm volatile("{\n.reg .pred chosen;\nelect.sync _|chosen, -1;\nselp.u32 %0, 1, 0, chosen;\n}" : "=r"(is_chosen));
  return is_chosen != 0;
}

/// Programmatic dependent launch: lets the next kernel of the stream start before this one is complete, as soon as
/// every CTA has executed this or has ended. Without effect if that kernel was launched without the attribute.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
/// Programmatic dependent launch: waits until the previous kernel of the stream is complete and what it has written is
/// visible. Without effect if this kernel was launched without the attribute.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Makes this thread's stores to shared memory visible to TMA and wgmma (the async proxy). A barrier must follow.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Waits until `threads` threads have arrived at named barrier `id`.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// `x` in a register. ptxas would otherwise reload a kernel parameter where it is used, which is on the critical path.
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

/// setmaxnreg: every thread of this warpgroup has `kCount` registers from here on, a multiple of 8.
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Read anew each time to save a register.

/// The bits of the lanes below this one.
__device__ __forceinline__ uint32_t lower_lanes() {
  uint32_t mask;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}
/// The bit of this lane.
__device__ __forceinline__ uint32_t this_lane() {
  uint32_t mask;
  asm volatile("mov.u32 %0, %%lanemask_eq;" : "=r"(mask));
  return mask;
}
/// The number of CTAs.
__device__ __forceinline__ int32_t num_ctas() {
  int32_t count;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
  return count;
}

}  // namespace ptx

/// `x`, which must be the same in all lanes, such that the compiler knows it is: values derived from it then stay in
/// uniform registers. Otherwise each descriptor of wgmma is moved there by an R2UR.
__device__ __forceinline__ int32_t uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }

}  // namespace xa::hopper
