// wgmma: asynchronous products of tiles in shared memory (swizzle_atom.cuh), issued by a warpgroup.
//
// A warp holds 16 of the 64 rows. An accumulator is [columns / 8][4]: element [j][e] of a lane is row
// lane / 4 + 8 (e / 2), column 8j + 2 (lane % 4) + e % 2. A 16-column operand in registers has the same layout, two
// elements per register.
#pragma once

#include <cstdint>

#include "element.cuh"

namespace xa::hopper {

namespace ptx {

/// Orders earlier register writes before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Makes the wgmma since the last call a group.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most the newest `kPending` groups are pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx

/// The e4m3fn operand type.
struct E4m3 {
  uint8_t bits;
};

/// The m64n<kColumns>k16 (k32 for e4m3) instructions with f32 accumulators, named as CUTLASS's atoms: SS and RS.
///   ss: d = a b^T (+ d where kAccumulate): Q K^T. a [64, 16] and b [kColumns, 16], both K-major in shared memory.
///   rs: d = a b (+ d where `accumulates` is not 0): P V. a [64, 16] in registers, b [16, kColumns] in shared memory,
///       MN-major as V is loaded. 8-bit operands are K-major only: b is V^T [kColumns, 32].
template <typename T, int kColumns>
struct Wgmma;

// asm operands are numbered: `a` is the number of the first one after the accumulators.
#define XA_ACCUMULATOR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define XA_ACCUMULATORS_2(d, j) XA_ACCUMULATOR(d, j), XA_ACCUMULATOR(d, (j) + 1)
#define XA_ACCUMULATORS_8(d, j) \
  XA_ACCUMULATORS_2(d, j), XA_ACCUMULATORS_2(d, (j) + 2), XA_ACCUMULATORS_2(d, (j) + 4), XA_ACCUMULATORS_2(d, (j) + 6)
#define XA_OPERANDS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define XA_OPERANDS_24                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23"
#define XA_OPERANDS_32                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define XA_OPERANDS_40 XA_OPERANDS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define XA_OPERANDS_48 XA_OPERANDS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define XA_OPERANDS_56 XA_OPERANDS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define XA_OPERANDS_64 XA_OPERANDS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define XA_OPERANDS_96                                                               \
  XA_OPERANDS_64                                                                     \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define XA_OPERANDS_128                                                                          \
  XA_OPERANDS_96                                                                                 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define XA_ACCUMULATORS_32(d) XA_ACCUMULATORS_2(d, 0), XA_ACCUMULATORS_2(d, 2)
#define XA_ACCUMULATORS_48(d) XA_ACCUMULATORS_2(d, 0), XA_ACCUMULATORS_2(d, 2), XA_ACCUMULATORS_2(d, 4)
#define XA_ACCUMULATORS_64(d) XA_ACCUMULATORS_8(d, 0)
#define XA_ACCUMULATORS_80(d) XA_ACCUMULATORS_8(d, 0), XA_ACCUMULATORS_2(d, 8)
#define XA_ACCUMULATORS_96(d) XA_ACCUMULATORS_8(d, 0), XA_ACCUMULATORS_2(d, 8), XA_ACCUMULATORS_2(d, 10)
#define XA_ACCUMULATORS_112(d) \
  XA_ACCUMULATORS_8(d, 0), XA_ACCUMULATORS_2(d, 8), XA_ACCUMULATORS_2(d, 10), XA_ACCUMULATORS_2(d, 12)
#define XA_ACCUMULATORS_128(d) XA_ACCUMULATORS_8(d, 0), XA_ACCUMULATORS_8(d, 8)
#define XA_ACCUMULATORS_192(d) XA_ACCUMULATORS_128(d), XA_ACCUMULATORS_8(d, 16)
#define XA_ACCUMULATORS_256(d) XA_ACCUMULATORS_128(d), XA_ACCUMULATORS_8(d, 16), XA_ACCUMULATORS_8(d, 24)

// `depth` is the instruction's k. `ss_transposes` and `rs_transposes` are its transpose bits, which 8-bit types do not
// have.
#define XA_WGMMA(T, type, depth, ss_transposes, rs_transposes, columns, numbers, a, b, scale, a1, a2, a3, rs_b,        \
                 rs_scale)                                                                                             \
  template <>                                                                                                          \
  struct Wgmma<T, columns> {                                                                                           \
    template <bool kAccumulate>                                                                                        \
    static __device__ __forceinline__ void ss(float (&d)[columns / 8][4], uint64_t x, uint64_t y) {                    \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #scale                                                   \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #columns depth ".f32." type "." type " {" XA_OPERANDS_##numbers \
                   "}, %" #a ", %" #b ", adds, 1, 1" ss_transposes ";\n}"                                              \
                   : XA_ACCUMULATORS_##columns(d)                                                                      \
                   : "l"(x), "l"(y), "n"(kAccumulate ? 1 : 0));                                                        \
    }                                                                                                                  \
    static __device__ __forceinline__ void rs(float (&d)[columns / 8][4], const uint32_t (&x)[4], uint64_t y,          \
                                              int32_t accumulates = 1) {                                               \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #rs_scale                                                \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #columns depth ".f32." type "." type " {" XA_OPERANDS_##numbers \
                   "}, {%" #a ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #rs_b ", adds, 1, 1" rs_transposes ";\n}"           \
                   : XA_ACCUMULATORS_##columns(d)                                                                      \
                   : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(accumulates));                            \
    }                                                                                                                  \
  };
#define XA_WGMMAS(columns, ...)                                        \
  XA_WGMMA(F16, "f16", "k16", ", 0, 0", ", 1", columns, __VA_ARGS__)   \
  XA_WGMMA(Bf16, "bf16", "k16", ", 0, 0", ", 1", columns, __VA_ARGS__) \
  XA_WGMMA(E4m3, "e4m3", "k32", "", "", columns, __VA_ARGS__)
XA_WGMMAS(32, 16, 16, 17, 18, 17, 18, 19, 20, 21)
XA_WGMMAS(48, 24, 24, 25, 26, 25, 26, 27, 28, 29)
XA_WGMMAS(64, 32, 32, 33, 34, 33, 34, 35, 36, 37)
XA_WGMMAS(80, 40, 40, 41, 42, 41, 42, 43, 44, 45)
XA_WGMMAS(96, 48, 48, 49, 50, 49, 50, 51, 52, 53)
XA_WGMMAS(112, 56, 56, 57, 58, 57, 58, 59, 60, 61)
XA_WGMMAS(128, 64, 64, 65, 66, 65, 66, 67, 68, 69)
XA_WGMMAS(192, 96, 96, 97, 98, 97, 98, 99, 100, 101)
XA_WGMMAS(256, 128, 128, 129, 130, 129, 130, 131, 132, 133)
#undef XA_WGMMAS
#undef XA_WGMMA
#undef XA_ACCUMULATORS_256
#undef XA_ACCUMULATORS_192
#undef XA_ACCUMULATORS_128
#undef XA_ACCUMULATORS_112
#undef XA_ACCUMULATORS_96
#undef XA_ACCUMULATORS_80
#undef XA_ACCUMULATORS_64
#undef XA_ACCUMULATORS_48
#undef XA_ACCUMULATORS_32
#undef XA_OPERANDS_128
#undef XA_OPERANDS_96
#undef XA_OPERANDS_64
#undef XA_OPERANDS_56
#undef XA_OPERANDS_48
#undef XA_OPERANDS_40
#undef XA_OPERANDS_32
#undef XA_OPERANDS_24
#undef XA_OPERANDS_16
#undef XA_ACCUMULATORS_8
#undef XA_ACCUMULATORS_2
#undef XA_ACCUMULATOR

}  // namespace xa::hopper
