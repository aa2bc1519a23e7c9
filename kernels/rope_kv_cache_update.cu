// Rotates the queries and keys of new tokens by their positions and writes K and V into their slots of a paged cache.
//
// Pair i of a head, (a, b), becomes (a cos_i - b sin_i, b cos_i + a sin_i). A position outside the table is clamped;
// without a table rows pass unrotated. Queries of every row are written, keys and values only where their slot is.
//
// Compiled once for each XA_DTYPE of the rows: f16, bf16, f32. The cache has the same type, or fp8.
// Launch: kRowThreads threads at most; a thread takes one share of a row of queries, keys or values.

#include <cstdint>

#include "cache_rows.cuh"
#include "chunk.cuh"
#include "params/rope_kv_cache_update.cuh"

namespace xa {

/// CTAs that an SM is to hold: 40 registers a thread. Angles are two dependent loads away, which only threads hide.
constexpr int kCtas = 8;

/// kCount neighbouring f32, four at a time, aligned to as many.
template <int kCount>
__device__ __forceinline__ void load_angles(float (&angles)[kCount], const float* from) {
  constexpr int kStep = kCount < 4 ? kCount : 4;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const auto chunk = load_chunk<float, kStep>(from + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) angles[i + j] = chunk.elements[j];
  }
}

/// The pair (a, b) turned by an angle; the CPU computes the same, bit by bit.
__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = turned;
}

/// One head of one token of the rotated queries.
template <typename T>
class QueryHead {
 public:
  __device__ __forceinline__ explicit QueryHead(T* first) : first_(first) {}

  template <int kCount>
  __device__ __forceinline__ void copy(int32_t element, const Chunk<T, kCount>& chunk) const {
    store_chunk(first_ + element, chunk);
  }

  template <int kCount>
  __device__ __forceinline__ void store(int32_t element, const float (&numbers)[kCount]) const {
    store_chunk(first_ + element, rounded<T>(numbers));
  }

 private:
  T* first_;
};

/// Where the heads of a row of rotated queries go.
template <typename T>
class QueryPlace {
 public:
  __device__ __forceinline__ QueryPlace(const QueryRows& query, int64_t row)
      : first_(static_cast<T*>(query.out) + row * query.num_heads * query.head_dim), head_dim_(query.head_dim) {}

  __device__ __forceinline__ bool inside() const { return true; }

  __device__ __forceinline__ QueryHead<T> head(int32_t head) const {
    return QueryHead<T>(first_ + int64_t{head} * head_dim_);
  }

 private:
  T* first_;
  int64_t head_dim_;
};

/// A share of a row [heads, D] of queries or keys at `from`, rotated, to its place, which `place_of` tells once all
/// loads are on their way. A piece has kCount elements, of kHeads heads, or where pairs are apart, as many pairs, of
/// one.
template <int kHeads, int kCount, typename T, typename PlaceOf>
__device__ __forceinline__ void rotate_share(const T* from, int64_t head_stride, int32_t num_heads,
                                             const HeadSharing& sharing, const Rotation& rotation,
                                             const RowShare& share, const PlaceOf& place_of) {
  const int32_t half = rotation.half, turned_pieces = sharing.turned;
  from += share.first_head * head_stride;
  const auto in_row = [&](int i) { return i == 0 || share.head(i) < num_heads; };
  if (share.piece >= turned_pieces) {
    const int32_t element = 2 * half + (share.piece - turned_pieces) * kCount;
    const auto place = place_of();
    if (!place.inside()) return;
#pragma unroll 1
    for (int i = 0; i < kHeads && in_row(i); ++i) {
      const auto chunk = load_chunk<T, kCount>(from + i * share.step * head_stride + element);
      place.head(share.head(i)).copy(element, chunk);
    }
    return;
  }
  const int64_t position = min(max(__ldg(rotation.positions + share.row), 0), rotation.max_positions - 1);
  const float* const cosines = rotation.cos_sin + position * rotation.row_stride;
  // One element at a time, pairs are taken whole.
  if (kCount == 1 || rotation.interleaved == 0) {
    const int32_t angle = share.piece * kCount;
    const int32_t first = rotation.interleaved != 0 ? 2 * angle : angle;
    const int32_t second = rotation.interleaved != 0 ? first + 1 : first + half;
    const auto first_chunk = load_chunk<T, kCount>(from + first), second_chunk = load_chunk<T, kCount>(from + second);
    const auto place = place_of();
    if (!place.inside()) return;
    float a[kCount], b[kCount], cos[kCount], sin[kCount];
    load_angles(cos, cosines + angle);
    load_angles(sin, cosines + half + angle);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      a[i] = Element<T>::to_f32(first_chunk.elements[i]);
      b[i] = Element<T>::to_f32(second_chunk.elements[i]);
      turn(a[i], b[i], cos[i], sin[i]);
    }
    const auto head = place.head(share.first_head);
    head.store(first, a);
    head.store(second, b);
  } else if constexpr (kCount > 1) {
    const int32_t first = share.piece * kCount;
    Chunk<T, kCount> chunks[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      // Any head in place of one that there is not.
      chunks[i] = load_chunk<T, kCount>(from + (in_row(i) ? i * share.step : 0) * head_stride + first);
    }
    const auto place = place_of();
    if (!place.inside()) return;
    float cos[kCount / 2], sin[kCount / 2];
    load_angles(cos, cosines + first / 2);
    load_angles(sin, cosines + half + first / 2);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (!in_row(i)) break;
      float numbers[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) numbers[j] = Element<T>::to_f32(chunks[i].elements[j]);
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) turn(numbers[2 * j], numbers[2 * j + 1], cos[j], sin[j]);
      place.head(share.head(i)).store(first, numbers);
    }
  }
}

template <int kCount, typename T>
__device__ __forceinline__ void rotate_queries(const RopeParams& params, const RowShare& share) {
  const QueryRows& query = params.query;
  const T* const from = static_cast<const T*>(query.rows) + share.row * query.row_token_stride;
  rotate_share<kRopeHeads, kCount>(from, query.row_head_stride, query.num_heads, query.sharing, params.rotation, share,
                                   [&] { return QueryPlace<T>(query, share.row); });
}

template <int kCount, typename T, CacheType kType>
__device__ __forceinline__ void rotate_keys(const RopeParams& params, const RowSlots& slots, const RowShare& share) {
  const NewRows& key = params.key;
  const T* const from = static_cast<const T*>(key.rows) + share.row * key.row_token_stride;
  const RowSlot slot = slots.load(share.row);
  // One head: with another and its division, registers would not do.
  rotate_share<1, kCount>(from, key.row_head_stride, key.num_heads, key.sharing, params.rotation, share,
                          [&] { return CachePlace<T, kType>(key, slots, share, slot); });
}

template <typename T, CacheType kType>
__device__ __forceinline__ void update_cache(const RopeParams& params, int32_t row, uint32_t index) {
  const RowSlots slots(params.slot_mapping, params.sharing);
  const uint32_t keys = shares(params.key.sharing);
  if (index >= keys) return write_share<T, kType, kRopeHeads>(params.value, slots, row, index - keys);
  const RowShare share(params.key.sharing, row, index);
  if (params.key.aligned != 0) {
    rotate_keys<16 / sizeof(T), T, kType>(params, slots, share);
  } else {
    rotate_keys<1, T, kType>(params, slots, share);
  }
}

template <typename T>
__device__ __forceinline__ void update(const RopeParams& params, int32_t row, uint32_t index) {
  const uint32_t queries = shares(params.query.sharing);
  if (index < queries) {
    const RowShare share(params.query.sharing, row, index);
    if (params.query.aligned != 0) {
      rotate_queries<16 / sizeof(T), T>(params, share);
    } else {
      rotate_queries<1, T>(params, share);
    }
    return;
  }
  switch (params.key.cache_type) {
    case CacheType::AsRows:
      return update_cache<T, CacheType::AsRows>(params, row, index - queries);
    case CacheType::F8E4M3Fn:
      return update_cache<T, CacheType::F8E4M3Fn>(params, row, index - queries);
    case CacheType::F8E5M2:
      return update_cache<T, CacheType::F8E5M2>(params, row, index - queries);
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kRowThreads, xa::kCtas)
    XA_ENTRY(const __grid_constant__ xa::RopeParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  xa::for_share(params.sharing, [&](int32_t row, uint32_t index) { xa::update<T>(params, row, index); });
}
