// Rows of K and V on their way into a paged cache: which slot a token has, and what a cache makes of a number.
#pragma once

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "fp8_rounding.cuh"

namespace xa {

/// The element type of a cache.
enum class CacheType : int32_t { kAsRows = 0, kF8E4M3Fn = 1, kF8E5M2 = 2 };

/// New rows [T, Hkv, D] of K or V and where they go. Strides are in elements; the D elements of a head are contiguous.
/// src/cuda/cache_rows.rs holds the same structs as this file.
struct NewRows {
  const void* rows;
  int64_t row_token_stride;
  int64_t row_head_stride;
  void* cache;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  const float* scale;    // what is stored is the row divided by it; null for 1
  int64_t scale_stride;  // 0 for one scale, 1 for one a head
  CacheType cache_type;
  int32_t num_heads;
  int32_t head_dim;
  int32_t aligned;  // whether chunks of 16 bytes of the rows, and what a cache makes of them, are aligned to their size
};

/// Slot page * page_size + offset names a token of the cache.
struct SlotMapping {
  const void* slots;  // [T], i64 if are_64_bit, else i32
  int64_t count;      // slots of the cache
  int64_t page_size;
  int64_t are_64_bit;
};

// src/cuda/cache_rows.rs asserts the same numbers.
static_assert(sizeof(NewRows) == 88 && sizeof(SlotMapping) == 32);

/// A token of the cache; a row whose slot lies outside goes nowhere.
struct CachePlace {
  bool inside;
  int64_t page;
  int64_t offset;
};

__device__ __forceinline__ CachePlace find_place(const SlotMapping& mapping, int64_t row) {
  const int64_t slot = mapping.are_64_bit != 0 ? __ldg(static_cast<const int64_t*>(mapping.slots) + row)
                                               : __ldg(static_cast<const int32_t*>(mapping.slots) + row);
  if (slot < 0 || slot >= mapping.count) return {false, 0, 0};
  const int64_t page = slot / mapping.page_size;
  return {true, page, slot - page * mapping.page_size};
}

/// One head of one token in a cache whose keys have the type T.
template <typename T>
class CacheRow {
 public:
  __device__ __forceinline__ CacheRow(const NewRows& target, const CachePlace& place, int32_t head)
      : type_(target.cache_type),
        scale_(target.scale == nullptr ? 1.0f : __ldg(target.scale + head * target.scale_stride)),
        is_scaled_(target.scale != nullptr) {
    const int64_t element =
        place.page * target.page_stride + place.offset * target.token_stride + head * target.head_stride;
    const int64_t size = type_ == CacheType::kAsRows ? sizeof(T) : 1;
    first_ = static_cast<uint8_t*>(target.cache) + element * size;
  }

  /// A chunk of the new row; bit by bit where the cache has its type and no scale.
  template <int kCount>
  __device__ __forceinline__ void copy(int32_t element, const Chunk<T, kCount>& chunk) const {
    if (type_ == CacheType::kAsRows && !is_scaled_) {
      store_chunk(reinterpret_cast<T*>(first_) + element, chunk);
      return;
    }
    float numbers[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = Element<T>::to_f32(chunk.elements[i]);
    store(element, numbers);
  }

  /// Numbers, divided by the scale and rounded.
  template <int kCount>
  __device__ __forceinline__ void store(int32_t element, float (&numbers)[kCount]) const {
    if (is_scaled_) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers[i] /= scale_;
    }
    if (type_ == CacheType::kAsRows) {
      Chunk<T, kCount> chunk;
#pragma unroll
      for (int i = 0; i < kCount; ++i) chunk.elements[i] = rounded<T>(numbers[i]);
      store_chunk(reinterpret_cast<T*>(first_) + element, chunk);
      return;
    }
    Chunk<uint8_t, kCount> codes;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is_e4m3 = type_ == CacheType::kF8E4M3Fn;
      codes.elements[i] = static_cast<uint8_t>(is_e4m3 ? F8E4M3Fn::encode(numbers[i]) : F8E5M2::encode(numbers[i]));
    }
    store_chunk(first_ + element, codes);
  }

 private:
  CacheType type_;
  float scale_;
  bool is_scaled_;
  uint8_t* first_;
};

/// Heads of a token's new row, as they are, into its place; kCount elements at a time.
template <typename T, int kCount, int kThreads>
__device__ __forceinline__ void write_heads(const NewRows& target, int64_t row, const CachePlace& place) {
  const int32_t pieces = target.head_dim / kCount;
  const T* const from = static_cast<const T*>(target.rows) + row * target.row_token_stride;
  for (int32_t item = threadIdx.x; item < target.num_heads * pieces; item += kThreads) {
    const int32_t head = item / pieces, element = (item - head * pieces) * kCount;
    const auto chunk = load_chunk<T, kCount>(from + head * target.row_head_stride + element);
    CacheRow<T>(target, place, head).copy(element, chunk);
  }
}

/// The same, 16 bytes of the row at a time where everything is aligned to that.
template <typename T, int kThreads>
__device__ __forceinline__ void write_heads(const NewRows& target, int64_t row, const CachePlace& place) {
  if (target.aligned != 0) {
    write_heads<T, 16 / sizeof(T), kThreads>(target, row, place);
  } else {
    write_heads<T, 1, kThreads>(target, row, place);
  }
}

}  // namespace xa
