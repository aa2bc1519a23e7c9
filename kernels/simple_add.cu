// out[i] = a[i] + b[i] for i < n. A thread adds 16 bytes at a time if all three arrays are aligned to that.
//
// Compiled once for each XA_DTYPE: f16, bf16, f32, f64, i8, u8, i32, i64.
// Launch: any grid and block, no dynamic shared memory.
#include <type_traits>

#include "dtype.cuh"
#include "params/simple_add.cuh"

using T = xa::XA_DTYPE;
constexpr int kPerThread = 16 / sizeof(T);

struct alignas(16) Vector {
  T element[kPerThread];
};

// Integers wrap around. Only unsigned arithmetic guarantees that in C++.
__device__ T sum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

extern "C" __global__ void XA_ENTRY(const __grid_constant__ xa::SimpleAddParams p) {
  const T* a = static_cast<const T*>(p.a);
  const T* b = static_cast<const T*>(p.b);
  T* out = static_cast<T*>(p.out);
  const bool aligned =
      (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t vector = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; vector * kPerThread < p.n; vector += stride) {
    const int64_t first = vector * kPerThread;
    if (aligned && first + kPerThread <= p.n) {
      const Vector x = reinterpret_cast<const Vector*>(a)[vector];
      const Vector y = reinterpret_cast<const Vector*>(b)[vector];
      Vector z;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) z.element[i] = sum(x.element[i], y.element[i]);
      reinterpret_cast<Vector*>(out)[vector] = z;
    } else {
      for (int64_t i = first; i < min(first + kPerThread, p.n); ++i) out[i] = sum(a[i], b[i]);
    }
  }
}
