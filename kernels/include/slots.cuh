// Where the tokens of a call go in a paged cache.
#pragma once

#include <cstdint>

namespace xa {

/// Slot page * page_size + offset names a token of the cache. src/cuda/cache_rows.rs holds the same struct.
struct SlotMapping {
  const void* slots;  // [T], i64 if are_64_bit, else i32
  int64_t count;      // slots of the cache
  int32_t page_size;
  int32_t page_shift;  // page_size is 2 to the power of it; -1 where it is no power of two
  int64_t are_64_bit;

  __device__ __forceinline__ int64_t load(int64_t row) const {
    return are_64_bit != 0 ? __ldg(static_cast<const int64_t*>(slots) + row)
                           : __ldg(static_cast<const int32_t*>(slots) + row);
  }
  /// A row with another slot goes nowhere.
  __device__ __forceinline__ bool holds(int64_t slot) const { return slot >= 0 && slot < count; }
  /// The page of a slot that it holds; a cache without slots may have pages of no size.
  __device__ __forceinline__ int64_t page(int64_t slot) const {
    return page_shift >= 0 ? slot >> page_shift : slot / page_size;
  }
};

// src/cuda/cache_rows.rs asserts the same number.
static_assert(sizeof(SlotMapping) == 32);

}  // namespace xa
