// Stores the K and V rows of new tokens in their slots of a paged cache, in place.
//
// Slot page * page_size + offset names a token of the cache; a row whose slot is outside of
// [0, num_pages * page_size) is skipped. Which of several rows with the same slot stays is unspecified; a row is not
// even stored if one of the rows right after it has its slot.
//
// Compiled once for each XA_DTYPE of the rows: f16, bf16, f32. The cache has the same type, or fp8.
// Launch: kRowThreads threads at most; a thread copies one vector of kUpdateHeadsPerThread heads of
// a row of keys or values.

#include <cstdint>

#include "cache_rows.cuh"

namespace xa {

/// CTAs per SM, which limits a thread to 56 registers.
constexpr int kCtas = 6;

template <typename T, CacheType kType>
__device__ __forceinline__ void update(const CacheUpdateParams& params) {
  for_row_of_thread(params.partition, [&](int32_t row, uint32_t thread) {
    const RowSlots slots(params.slot_mapping, params.partition);
    const uint32_t key_threads = threads_per_row(params.key.heads);
    if (thread < key_threads) {
      store_vectors<T, kType, kUpdateHeadsPerThread>(params.key, slots, row, thread);
    } else {
      store_vectors<T, kType, kUpdateHeadsPerThread>(params.value, slots, row, thread - key_threads);
    }
  });
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kRowThreads, xa::kCtas)
    XA_ENTRY(const __grid_constant__ xa::CacheUpdateParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  switch (params.key.cache_type) {
    case xa::CacheType::AsRows:
      return xa::update<T, xa::CacheType::AsRows>(params);
    case xa::CacheType::F8E4M3Fn:
      return xa::update<T, xa::CacheType::F8E4M3Fn>(params);
    case xa::CacheType::F8E5M2:
      return xa::update<T, xa::CacheType::F8E5M2>(params);
  }
}
