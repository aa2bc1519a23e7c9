// out[i] = a[i] + b[i] for i < n, 16 bytes a thread where all three are aligned to that.
#include <type_traits>

#include "dtype.cuh"
#include "params/simple_add.cuh"

using T = xa::XA_DTYPE;
constexpr int kPerThread = 16 / sizeof(T);

struct alignas(16) Pack {
  T element[kPerThread];
};

// Integers wrap, which only unsigned arithmetic promises.
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
  for (int64_t pack = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; pack * kPerThread < p.n; pack += stride) {
    const int64_t first = pack * kPerThread;
    if (aligned && first + kPerThread <= p.n) {
      const Pack x = reinterpret_cast<const Pack*>(a)[pack];
      const Pack y = reinterpret_cast<const Pack*>(b)[pack];
      Pack z;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) z.element[i] = sum(x.element[i], y.element[i]);
      reinterpret_cast<Pack*>(out)[pack] = z;
    } else {
      for (int64_t i = first; i < min(first + kPerThread, p.n); ++i) out[i] = sum(a[i], b[i]);
    }
  }
}
