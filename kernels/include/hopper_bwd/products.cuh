// wgmma with the operand layouts that the backward needs besides those of hopper/wgmma.cuh, which also describes the
// layout of accumulators and of operands in registers.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/wgmma.cuh"

namespace xa::hopper {

/// The m64n<kColumns>k16 instructions. Without kAccumulate d is written and not read, so that no register has to hold
/// it before.
///   ss:          d (+)= a b^T, a [64, 16] and b [kColumns, 16] K-major in shared memory; ss_subtract: d -= a b^T
///   rs_k_major:  d (+)= a b^T, a [64, 16] in registers, b [kColumns, 16] K-major in shared memory
///   ss_mn_major: d (+)= a^T b, a [16, 64] and b [16, kColumns] MN-major in shared memory
///   rs:          d += a b, a [64, 16] in registers, b [16, kColumns] MN-major in shared memory
template <typename T, int kColumns>
struct BackwardWgmma;

#define XA_OUT(c, d, j) c(d[j][0]), c(d[j][1]), c(d[j][2]), c(d[j][3])
#define XA_OUT_8(c, d, j)                                                                                      \
  XA_OUT(c, d, j), XA_OUT(c, d, (j) + 1), XA_OUT(c, d, (j) + 2), XA_OUT(c, d, (j) + 3), XA_OUT(c, d, (j) + 4), \
      XA_OUT(c, d, (j) + 5), XA_OUT(c, d, (j) + 6), XA_OUT(c, d, (j) + 7)
#define XA_OUT_32(c, d) XA_OUT(c, d, 0), XA_OUT(c, d, 1), XA_OUT(c, d, 2), XA_OUT(c, d, 3)
#define XA_OUT_48(c, d) \
  XA_OUT(c, d, 0), XA_OUT(c, d, 1), XA_OUT(c, d, 2), XA_OUT(c, d, 3), XA_OUT(c, d, 4), XA_OUT(c, d, 5)
#define XA_OUT_64(c, d) XA_OUT_8(c, d, 0)
#define XA_OUT_80(c, d) XA_OUT_8(c, d, 0), XA_OUT(c, d, 8), XA_OUT(c, d, 9)
#define XA_OUT_96(c, d) XA_OUT_8(c, d, 0), XA_OUT(c, d, 8), XA_OUT(c, d, 9), XA_OUT(c, d, 10), XA_OUT(c, d, 11)
#define XA_OUT_128(c, d) XA_OUT_8(c, d, 0), XA_OUT_8(c, d, 8)
#define XA_OUT_192(c, d) XA_OUT_128(c, d), XA_OUT_8(c, d, 16)
#define XA_OUT_256(c, d) XA_OUT_128(c, d), XA_OUT_8(c, d, 16), XA_OUT_8(c, d, 24)
#define XA_NUMBERS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define XA_NUMBERS_48 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define XA_NUMBERS_64 XA_NUMBERS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define XA_NUMBERS_80 XA_NUMBERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define XA_NUMBERS_96 XA_NUMBERS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define XA_NUMBERS_128 XA_NUMBERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define XA_NUMBERS_192                                                                                \
  XA_NUMBERS_128                                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define XA_NUMBERS_256                                                                                               \
  XA_NUMBERS_192                                                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `c` is the accumulators' asm constraint; a, b and so on are the numbers of the asm operands after them.
#define XA_SHARED_PRODUCT(name, c, adds, type, columns, a, b, sign, lie)                                         \
  static __device__ __forceinline__ void name(float (&d)[columns / 8][4], uint64_t x, uint64_t y) {              \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds                                                  \
                 ", 0;\n"                                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" XA_NUMBERS_##columns \
                 "}, %" #a ", %" #b ", adds, " sign ", 1, " lie ";\n}"                                           \
                 : XA_OUT_##columns(c, d)                                                                        \
                 : "l"(x), "l"(y));                                                                              \
  }
// `b_is_transposed`: b is MN-major, [16, kColumns].
#define XA_REGISTER_PRODUCT(name, c, adds, type, columns, a, a1, a2, a3, b, b_is_transposed)                     \
  static __device__ __forceinline__ void name(float (&d)[columns / 8][4], const uint32_t (&x)[4], uint64_t y) {  \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds                                                  \
                 ", 0;\n"                                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" XA_NUMBERS_##columns \
                 "}, {%" #a ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", adds, 1, 1, " b_is_transposed ";\n}"      \
                 : XA_OUT_##columns(c, d)                                                                        \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));                                          \
  }
#define XA_BACKWARD_PRODUCT(T, type, columns, a, a1, a2, a3, b)                                              \
  template <>                                                                                                \
  struct BackwardWgmma<T, columns> {                                                                         \
    template <bool kAccumulate>                                                                              \
    static __device__ __forceinline__ void ss(float (&d)[columns / 8][4], uint64_t x, uint64_t y) {          \
      kAccumulate ? ss_accumulated(d, x, y) : ss_zeroed(d, x, y);                                            \
    }                                                                                                        \
    template <bool kAccumulate>                                                                              \
    static __device__ __forceinline__ void ss_mn_major(float (&d)[columns / 8][4], uint64_t x, uint64_t y) { \
      kAccumulate ? ss_mn_major_accumulated(d, x, y) : ss_mn_major_zeroed(d, x, y);                          \
    }                                                                                                        \
    template <bool kAccumulate>                                                                              \
    static __device__ __forceinline__ void rs_k_major(float (&d)[columns / 8][4], const uint32_t (&x)[4],    \
                                                      uint64_t y) {                                          \
      kAccumulate ? rs_k_major_accumulated(d, x, y) : rs_k_major_zeroed(d, x, y);                            \
    }                                                                                                        \
    XA_REGISTER_PRODUCT(rs, "+f", "1", type, columns, a, a1, a2, a3, b, "1")                                 \
    XA_SHARED_PRODUCT(ss_subtract, "+f", "1", type, columns, a, a1, "-1", "0, 0")                            \
                                                                                                             \
   private:                                                                                                  \
    XA_REGISTER_PRODUCT(rs_k_major_zeroed, "=f", "0", type, columns, a, a1, a2, a3, b, "0")                  \
    XA_REGISTER_PRODUCT(rs_k_major_accumulated, "+f", "1", type, columns, a, a1, a2, a3, b, "0")             \
    XA_SHARED_PRODUCT(ss_zeroed, "=f", "0", type, columns, a, a1, "1", "0, 0")                               \
    XA_SHARED_PRODUCT(ss_accumulated, "+f", "1", type, columns, a, a1, "1", "0, 0")                          \
    XA_SHARED_PRODUCT(ss_mn_major_zeroed, "=f", "0", type, columns, a, a1, "1", "1, 1")                      \
    XA_SHARED_PRODUCT(ss_mn_major_accumulated, "+f", "1", type, columns, a, a1, "1", "1, 1")                 \
  };
#define XA_BACKWARD_PRODUCTS(columns, ...)              \
  XA_BACKWARD_PRODUCT(F16, "f16", columns, __VA_ARGS__) \
  XA_BACKWARD_PRODUCT(Bf16, "bf16", columns, __VA_ARGS__)
XA_BACKWARD_PRODUCTS(32, 16, 17, 18, 19, 20)
XA_BACKWARD_PRODUCTS(48, 24, 25, 26, 27, 28)
XA_BACKWARD_PRODUCTS(64, 32, 33, 34, 35, 36)
XA_BACKWARD_PRODUCTS(80, 40, 41, 42, 43, 44)
XA_BACKWARD_PRODUCTS(96, 48, 49, 50, 51, 52)
XA_BACKWARD_PRODUCTS(128, 64, 65, 66, 67, 68)
XA_BACKWARD_PRODUCTS(192, 96, 97, 98, 99, 100)
XA_BACKWARD_PRODUCTS(256, 128, 129, 130, 131, 132)
#undef XA_BACKWARD_PRODUCTS
#undef XA_BACKWARD_PRODUCT
#undef XA_REGISTER_PRODUCT
#undef XA_SHARED_PRODUCT
#undef XA_NUMBERS_256
#undef XA_NUMBERS_192
#undef XA_NUMBERS_128
#undef XA_NUMBERS_96
#undef XA_NUMBERS_80
#undef XA_NUMBERS_64
#undef XA_NUMBERS_48
#undef XA_NUMBERS_32
#undef XA_OUT_256
#undef XA_OUT_192
#undef XA_OUT_128
#undef XA_OUT_96
#undef XA_OUT_80
#undef XA_OUT_64
#undef XA_OUT_48
#undef XA_OUT_32
#undef XA_OUT_8
#undef XA_OUT

}  // namespace xa::hopper
