// Rotates the queries and keys of new tokens by their positions and writes K and V into their slots of a paged cache.
//
// Pair i of a head, (a, b), becomes (a cos_i - b sin_i, b cos_i + a sin_i). A position outside the table is clamped;
// without a table rows pass unrotated. Queries of every row are written, keys and values only where their slot is.
//
// Compiled once for each XA_DTYPE of the rows: f16, bf16, f32. The cache has the same type, or fp8.
// Launch: kThreads threads; CTA (t, 0) takes the queries of row t, CTA (t, 1) its keys, CTA (t, 2) its values.

#include <cstdint>

#include "cache_rows.cuh"
#include "chunk.cuh"

namespace xa {

/// Queries [T, Hq, D] and where they go. Strides are in elements; the D elements of a head are contiguous.
struct QueryRows {
  const void* rows;
  int64_t row_token_stride;
  int64_t row_head_stride;
  void* out;  // [T, Hq, D]
  int32_t num_heads;
  int32_t head_dim;
  int64_t aligned;  // whether both consist of chunks of 16 bytes, aligned to 16
};

/// Angles by position, and which elements they turn.
struct Rotation {
  const int32_t* positions;  // [T]
  const float* cos_sin;      // [max_positions, 2 * half]: cosines, then sines
  int64_t row_stride;
  int32_t max_positions;
  int32_t half;         // pairs of a head
  int32_t interleaved;  // whether pairs are neighbours, not `half` apart
  int32_t aligned;      // whether chunks hold whole pairs, or halves of them, and the table is aligned to 16 bytes
};

/// The one argument of the kernel. src/cuda/rope_kv_cache_update.rs holds the same structs.
struct RopeParams {
  NewRows key;
  NewRows value;
  SlotMapping slot_mapping;
  QueryRows query;
  Rotation rotation;
};

// src/cuda/rope_kv_cache_update.rs asserts the same numbers.
static_assert(sizeof(QueryRows) == 48 && sizeof(Rotation) == 40 && sizeof(RopeParams) == 296);

constexpr int kThreads = 128;

/// A row's angles; no pair where there is no table.
struct Angles {
  const float* cos;
  const float* sin;
  int32_t half;

  __device__ __forceinline__ Angles(const Rotation& rotation, int64_t row) : cos(nullptr), sin(nullptr), half(0) {
    if (rotation.max_positions == 0) return;
    const int64_t position = min(max(__ldg(rotation.positions + row), 0), rotation.max_positions - 1);
    half = rotation.half;
    cos = rotation.cos_sin + position * rotation.row_stride;
    sin = cos + half;
  }
};

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
  __device__ __forceinline__ void store(int32_t element, float (&numbers)[kCount]) const {
    Chunk<T, kCount> chunk;
#pragma unroll
    for (int i = 0; i < kCount; ++i) chunk.elements[i] = rounded<T>(numbers[i]);
    store_chunk(first_ + element, chunk);
  }

 private:
  T* first_;
};

/// Turns the pairs (first + i, second + i) of a head for i < kCount, by the angles from `angle` on.
template <int kCount, typename T, typename Head>
__device__ __forceinline__ void turn_pairs(const T* from, const Head& to, int32_t first, int32_t second,
                                           const Angles& angles, int32_t angle) {
  const auto chunk_a = load_chunk<T, kCount>(from + first), chunk_b = load_chunk<T, kCount>(from + second);
  float a[kCount], b[kCount], cos[kCount], sin[kCount];
  load_angles(cos, angles.cos + angle);
  load_angles(sin, angles.sin + angle);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    a[i] = Element<T>::to_f32(chunk_a.elements[i]);
    b[i] = Element<T>::to_f32(chunk_b.elements[i]);
    turn(a[i], b[i], cos[i], sin[i]);
  }
  to.store(first, a);
  to.store(second, b);
}

/// Turns the pairs of neighbours in kCount elements of a head from `first` on.
template <int kCount, typename T, typename Head>
__device__ __forceinline__ void turn_neighbours(const T* from, const Head& to, int32_t first, const Angles& angles) {
  const auto chunk = load_chunk<T, kCount>(from + first);
  float numbers[kCount], cos[kCount / 2], sin[kCount / 2];
  load_angles(cos, angles.cos + first / 2);
  load_angles(sin, angles.sin + first / 2);
#pragma unroll
  for (int i = 0; i < kCount; ++i) numbers[i] = Element<T>::to_f32(chunk.elements[i]);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) turn(numbers[2 * i], numbers[2 * i + 1], cos[i], sin[i]);
  to.store(first, numbers);
}

/// A token's heads [heads, D] at `from`, rotated, each into `head_at(head)`; kCount elements at a time.
template <int kCount, typename T, typename HeadAt>
__device__ __forceinline__ void rotate_heads(const T* from, int64_t head_stride, int32_t num_heads, int32_t head_dim,
                                             const Angles& angles, bool interleaved, const HeadAt& head_at) {
  // A piece is kCount elements, or where the elements of a pair are apart, kCount pairs.
  const bool neighbours = interleaved && kCount > 1;
  const int32_t turned = neighbours ? 2 * angles.half / kCount : angles.half / kCount;
  const int32_t pieces = turned + (head_dim - 2 * angles.half) / kCount;
  for (int32_t item = threadIdx.x; item < num_heads * pieces; item += kThreads) {
    const int32_t head = item / pieces, piece = item - head * pieces;
    const T* const head_from = from + head * head_stride;
    const auto to = head_at(head);
    if (piece >= turned) {
      const int32_t element = 2 * angles.half + (piece - turned) * kCount;
      to.copy(element, load_chunk<T, kCount>(head_from + element));
    } else if (!neighbours) {
      const int32_t first = interleaved ? 2 * piece : piece * kCount;
      turn_pairs<kCount>(head_from, to, first, interleaved ? first + 1 : first + angles.half, angles, piece * kCount);
    } else {
      // One element at a time, the branch above has them all.
      if constexpr (kCount > 1) turn_neighbours<kCount>(head_from, to, piece * kCount, angles);
    }
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void rotate_queries(const RopeParams& params, int64_t row) {
  const QueryRows& query = params.query;
  const T* const from = static_cast<const T*>(query.rows) + row * query.row_token_stride;
  T* const out = static_cast<T*>(query.out) + row * query.num_heads * query.head_dim;
  rotate_heads<kCount>(from, query.row_head_stride, query.num_heads, query.head_dim, Angles(params.rotation, row),
                       params.rotation.interleaved != 0,
                       [&](int32_t head) { return QueryHead<T>(out + int64_t{head} * query.head_dim); });
}

template <typename T, int kCount>
__device__ __forceinline__ void rotate_keys(const RopeParams& params, int64_t row, const CachePlace& place) {
  const NewRows& key = params.key;
  const T* const from = static_cast<const T*>(key.rows) + row * key.row_token_stride;
  rotate_heads<kCount>(from, key.row_head_stride, key.num_heads, key.head_dim, Angles(params.rotation, row),
                       params.rotation.interleaved != 0, [&](int32_t head) { return CacheRow<T>(key, place, head); });
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kThreads) XA_ENTRY(const __grid_constant__ xa::RopeParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  constexpr int kCount = 16 / sizeof(T);
  const int64_t row = blockIdx.x;
  if (blockIdx.y == 0) {
    if (params.query.aligned != 0 && params.rotation.aligned != 0) {
      xa::rotate_queries<T, kCount>(params, row);
    } else {
      xa::rotate_queries<T, 1>(params, row);
    }
    return;
  }
  const xa::CachePlace place = xa::find_place(params.slot_mapping, row);
  if (!place.inside) return;
  if (blockIdx.y == 2) {
    xa::write_heads<T, xa::kThreads>(params.value, row, place);
  } else if (params.key.aligned != 0 && params.rotation.aligned != 0) {
    xa::rotate_keys<T, kCount>(params, row, place);
  } else {
    xa::rotate_keys<T, 1>(params, row, place);
  }
}
