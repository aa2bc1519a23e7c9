// PTX instructions of compute.cuh, one thin wrapper each.
#pragma once

#include <cstdint>

namespace xa::hopper_mla_fp8::ptx {

/// Waits until `threads` threads have arrived at named barrier `id`. Returns whether `mine` is true for some of them.
__device__ __forceinline__ bool barrier_or(int id, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred mine, any;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any != 0;
}

#define XA_ROW_TILE(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
/// d = a b^T (+ d where `accumulates` is not 0) by m64n<rows>k16: a [64, 16] f16 in registers, b [rows, 16] f16 K-major
/// in shared memory. The descriptor of b comes as two halves, so that no 64-bit addition moves it on.
template <uint32_t kHigh>
__device__ __forceinline__ void multiply(float (&d)[2][4], const uint32_t (&a)[4], uint32_t low, int32_t accumulates) {
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %14, 0;\nmov.b64 b, {%12, %13};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, b, "
      "adds, 1, 1, 0;\n}"
      : XA_ROW_TILE(0), XA_ROW_TILE(1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "n"(kHigh), "r"(accumulates));
}
template <uint32_t kHigh>
__device__ __forceinline__ void multiply(float (&d)[4][4], const uint32_t (&a)[4], uint32_t low, int32_t accumulates) {
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %22, 0;\nmov.b64 b, {%20, %21};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15}, {%16, %17, %18, %19}, b, adds, 1, 1, 0;\n}"
      : XA_ROW_TILE(0), XA_ROW_TILE(1), XA_ROW_TILE(2), XA_ROW_TILE(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "n"(kHigh), "r"(accumulates));
}
template <uint32_t kHigh>
__device__ __forceinline__ void multiply(float (&d)[8][4], const uint32_t (&a)[4], uint32_t low, int32_t accumulates) {
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %38, 0;\nmov.b64 b, {%36, %37};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, "
      "%35}, "
      "b, adds, 1, 1, 0;\n}"
      : XA_ROW_TILE(0), XA_ROW_TILE(1), XA_ROW_TILE(2), XA_ROW_TILE(3), XA_ROW_TILE(4), XA_ROW_TILE(5), XA_ROW_TILE(6),
        XA_ROW_TILE(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "n"(kHigh), "r"(accumulates));
}
#undef XA_ROW_TILE

}  // namespace xa::hopper_mla_fp8::ptx
