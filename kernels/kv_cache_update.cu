// Writes the K and V rows of new tokens into their slots of a paged cache, in place.
//
// Slot page * page_size + offset names a token of the cache; a slot outside [0, num_pages * page_size) is skipped. Of
// rows with the same slot one is stored last, in no particular order; a row is left out if one of the next has its
// slot.
//
// Compiled once for each XA_DTYPE of the rows: f16, bf16, f32. The cache has the same type, or fp8.
// Launch: kRowThreads threads at most; a thread takes one share of a row of keys or values.

#include <cstdint>

#include "cache_rows.cuh"

namespace xa {

/// CTAs that an SM is to hold: 56 registers a thread.
constexpr int kCtas = 6;

template <typename T, CacheType kType>
__device__ __forceinline__ void update(const CacheUpdateParams& params) {
  for_share(params.sharing, [&](int32_t row, uint32_t share) {
    const RowSlots slots(params.slot_mapping, params.sharing);
    const uint32_t of_keys = shares(params.key.sharing);
    if (share < of_keys) {
      write_share<T, kType, kUpdateHeads>(params.key, slots, row, share);
    } else {
      write_share<T, kType, kUpdateHeads>(params.value, slots, row, share - of_keys);
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
