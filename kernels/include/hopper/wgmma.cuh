// The tensor cores of sm_90a: products of tiles in shared memory (panel.cuh), started by a warpgroup, finished in the
// background.
//
// An accumulator is [columns / 8][4]: element [j][e] of a thread is row lane / 4 (+ 8 for e >= 2) of its warp's 16,
// column 8j + 2 (lane % 4) + e % 2. So are the elements of a 16-column operand in registers, in pairs.
#pragma once

#include <cstdint>

#include "element.cuh"

namespace xa::hopper {

namespace ptx {

/// Before products are started: registers they use have been written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Makes the products started since the last call a group.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most the `kPending` newest groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx

/// An 8-bit float, as the tensor cores take it.
struct E4m3 {
  uint8_t bits;
};

/// Products of 64 rows with kColumns columns, 32 bytes deep.
///   scores: d = a b^T (+ d where kAccumulate), a [64, 16] and b [kColumns, 16] in shared memory
///   values: d += a b, a [64, 16] in registers, b [16, kColumns] in shared memory; of 8-bit tiles b^T [kColumns, 32],
///           there is no other way
template <typename T, int kColumns>
struct Wgmma;

// Operands are numbered: `a` is the number of the first one after the accumulator's.
#define XA_TILE(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define XA_TILES_2(d, j) XA_TILE(d, j), XA_TILE(d, (j) + 1)
#define XA_TILES_8(d, j) XA_TILES_2(d, j), XA_TILES_2(d, (j) + 2), XA_TILES_2(d, (j) + 4), XA_TILES_2(d, (j) + 6)
#define XA_NUMBERS_24                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23"
#define XA_NUMBERS_32                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define XA_NUMBERS_40 XA_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define XA_NUMBERS_48 XA_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define XA_NUMBERS_56 XA_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define XA_NUMBERS_64 XA_NUMBERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define XA_NUMBERS_96                                                                \
  XA_NUMBERS_64                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define XA_NUMBERS_128                                                                           \
  XA_NUMBERS_96                                                                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define XA_TILES_64(d) XA_TILES_8(d, 0)
#define XA_TILES_80(d) XA_TILES_8(d, 0), XA_TILES_2(d, 8)
#define XA_TILES_96(d) XA_TILES_8(d, 0), XA_TILES_2(d, 8), XA_TILES_2(d, 10)
#define XA_TILES_112(d) XA_TILES_8(d, 0), XA_TILES_2(d, 8), XA_TILES_2(d, 10), XA_TILES_2(d, 12)
#define XA_TILES_128(d) XA_TILES_8(d, 0), XA_TILES_8(d, 8)
#define XA_TILES_192(d) XA_TILES_128(d), XA_TILES_8(d, 16)
#define XA_TILES_256(d) XA_TILES_128(d), XA_TILES_8(d, 16), XA_TILES_8(d, 24)

// `depth` is as the instruction writes it; 16-bit tiles say besides how they lie: along their rows, or V across.
#define XA_PRODUCT(T, type, depth, scores_lie, values_lie, columns, numbers, a, b, scale, a1, a2, a3, values_b,       \
                   values_scale)                                                                                      \
  template <>                                                                                                         \
  struct Wgmma<T, columns> {                                                                                          \
    template <bool kAccumulate>                                                                                       \
    static __device__ __forceinline__ void ss(float (&d)[columns / 8][4], uint64_t x, uint64_t y) {                   \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #scale                                                  \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #columns depth ".f32." type "." type " {" XA_NUMBERS_##numbers \
                   "}, %" #a ", %" #b ", adds, 1, 1" scores_lie ";\n}"                                                \
                   : XA_TILES_##columns(d)                                                                            \
                   : "l"(x), "l"(y), "n"(kAccumulate ? 1 : 0));                                                       \
    }                                                                                                                 \
    static __device__ __forceinline__ void rs(float (&d)[columns / 8][4], const uint32_t (&x)[4], uint64_t y) {       \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #values_scale                                           \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #columns depth ".f32." type "." type " {" XA_NUMBERS_##numbers \
                   "}, {%" #a ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #values_b ", adds, 1, 1" values_lie ";\n}"         \
                   : XA_TILES_##columns(d)                                                                            \
                   : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "n"(1));                                     \
    }                                                                                                                 \
  };
#define XA_PRODUCTS(columns, ...)                                        \
  XA_PRODUCT(F16, "f16", "k16", ", 0, 0", ", 1", columns, __VA_ARGS__)   \
  XA_PRODUCT(Bf16, "bf16", "k16", ", 0, 0", ", 1", columns, __VA_ARGS__) \
  XA_PRODUCT(E4m3, "e4m3", "k32", "", "", columns, __VA_ARGS__)
XA_PRODUCTS(64, 32, 32, 33, 34, 33, 34, 35, 36, 37)
XA_PRODUCTS(80, 40, 40, 41, 42, 41, 42, 43, 44, 45)
XA_PRODUCTS(96, 48, 48, 49, 50, 49, 50, 51, 52, 53)
XA_PRODUCTS(112, 56, 56, 57, 58, 57, 58, 59, 60, 61)
XA_PRODUCTS(128, 64, 64, 65, 66, 65, 66, 67, 68, 69)
XA_PRODUCTS(192, 96, 96, 97, 98, 97, 98, 99, 100, 101)
XA_PRODUCTS(256, 128, 128, 129, 130, 129, 130, 131, 132, 133)
#undef XA_PRODUCTS
#undef XA_PRODUCT
#undef XA_TILES_256
#undef XA_TILES_192
#undef XA_TILES_128
#undef XA_TILES_112
#undef XA_TILES_96
#undef XA_TILES_80
#undef XA_TILES_64
#undef XA_NUMBERS_128
#undef XA_NUMBERS_96
#undef XA_NUMBERS_64
#undef XA_NUMBERS_56
#undef XA_NUMBERS_48
#undef XA_NUMBERS_40
#undef XA_NUMBERS_32
#undef XA_TILES_8
#undef XA_TILES_2
#undef XA_TILE

}  // namespace xa::hopper
