// Writes the K and V rows of new tokens into their slots of a paged cache, in place.
//
// Slot page * page_size + offset names a token of the cache; a slot outside [0, num_pages * page_size) is skipped. Rows
// with the same slot overwrite each other in no particular order.
//
// Compiled once for each XA_DTYPE: f16, bf16, f32.
// Launch: kThreads threads; CTA (t, 0) writes the keys of row t, CTA (t, 1) its values.

#include <cstdint>

#include "element.cuh"

namespace xa {

/// New rows [T, Hkv, D] and where they go. Strides are in elements; the D elements of a head are contiguous.
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
  int32_t head_dim;
  int32_t aligned;  // whether rows and cache consist of chunks of 16 bytes, aligned to 16
};

/// The one argument of the kernel. src/cuda/kv_cache_update.rs holds the same struct.
struct CacheUpdateParams {
  NewRows key;
  NewRows value;
  const void* slot_mapping;  // [T], i64 if slots_are_64_bit, else i32
  int64_t num_slots;         // of the cache
  int64_t page_size;
  int32_t slots_are_64_bit;
  int32_t num_heads;
};

// src/cuda/kv_cache_update.rs asserts the same numbers.
static_assert(sizeof(NewRows) == 80 && sizeof(CacheUpdateParams) == 192);

constexpr int kThreads = 128;

/// `T`s that are read and written at once: 16 bytes of them, or one.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Chunk {
  T elements[kCount];
};

template <typename T>
__device__ __forceinline__ T divided(T x, float scale) {
  const float quotient = Element<T>::to_f32(x) / scale;
  if constexpr (Element<T>::kIs16Bit) {
    return T{static_cast<uint16_t>(Element<T>::pack(quotient, 0.0f))};
  } else {
    return quotient;
  }
}

/// Copies one token's heads, kCount elements at a time.
template <typename T, int kCount>
__device__ __forceinline__ void write_token(const NewRows& target, int32_t num_heads, int64_t row, int64_t page,
                                            int64_t offset) {
  using Piece = Chunk<T, kCount>;
  const int32_t pieces = target.head_dim / kCount;
  const T* const from = static_cast<const T*>(target.rows) + row * target.row_token_stride;
  T* const to = static_cast<T*>(target.cache) + page * target.page_stride + offset * target.token_stride;
  for (int32_t item = threadIdx.x; item < num_heads * pieces; item += kThreads) {
    const int32_t head = item / pieces, element = (item - head * pieces) * kCount;
    Piece piece = *reinterpret_cast<const Piece*>(from + head * target.row_head_stride + element);
    if (target.scale != nullptr) {
      const float scale = __ldg(target.scale + head * target.scale_stride);
#pragma unroll
      for (int i = 0; i < kCount; ++i) piece.elements[i] = divided(piece.elements[i], scale);
    }
    *reinterpret_cast<Piece*>(to + head * target.head_stride + element) = piece;
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kThreads)
    XA_ENTRY(const __grid_constant__ xa::CacheUpdateParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  const xa::NewRows& target = blockIdx.y == 0 ? params.key : params.value;
  const int64_t row = blockIdx.x;
  const int64_t slot = params.slots_are_64_bit != 0 ? __ldg(static_cast<const int64_t*>(params.slot_mapping) + row)
                                                    : __ldg(static_cast<const int32_t*>(params.slot_mapping) + row);
  if (slot < 0 || slot >= params.num_slots) return;
  const int64_t page = slot / params.page_size, offset = slot - page * params.page_size;
  if (target.aligned != 0) {
    xa::write_token<T, 16 / sizeof(T)>(target, params.num_heads, row, page, offset);
  } else {
    xa::write_token<T, 1>(target, params.num_heads, row, page, offset);
  }
}
