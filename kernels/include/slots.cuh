// The slot mapping: where the new tokens of a call go in a paged cache.
#pragma once

#include <cstdint>

#include "params/slots.cuh"

namespace xa {

__device__ __forceinline__ int64_t load_slot(const SlotMapping& mapping, int64_t row) {
  return mapping.are_64_bit != 0 ? __ldg(static_cast<const int64_t*>(mapping.slots) + row)
                                 : __ldg(static_cast<const int32_t*>(mapping.slots) + row);
}

/// Whether the cache has this slot; a row with another slot is not stored.
__device__ __forceinline__ bool is_in_cache(const SlotMapping& mapping, int64_t slot) {
  return slot >= 0 && slot < mapping.count;
}

/// The page of a slot that is in the cache. Check `is_in_cache` first: an empty cache may have page_size 0.
__device__ __forceinline__ int64_t page_of(const SlotMapping& mapping, int64_t slot) {
  return mapping.page_shift >= 0 ? slot >> mapping.page_shift : slot / mapping.page_size;
}

}  // namespace xa
