// Applies rotary position embedding to the queries and keys of new tokens and stores K and V in their slots of a paged
// cache.
//
// Pair i of a head, (a, b), becomes (a cos_i - b sin_i, b cos_i + a sin_i). A position outside of the table is clamped;
// without a table rows are copied. Queries of every row are written, keys and values only of rows whose slot is in the
// cache.
//
// Compiled once for each XA_DTYPE of the rows: f16, bf16, f32. The cache has the same type, or fp8.
// Launch: kRowThreads threads at most; a thread takes one vector of a few heads of a row of queries,
// keys or values (include/cache_rows.cuh).

#include <cstdint>

#include "cache_rows.cuh"
#include "chunk.cuh"
#include "params/rope_kv_cache_update.cuh"

namespace xa {

/// CTAs per SM, which limits a thread to 40 registers. Loading angles means two dependent loads (position, table row),
/// whose latency only more threads hide.
constexpr int kCtas = 8;

/// Loads kCount adjacent cosines or sines, up to four at a time; `from` is aligned to that.
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

/// Rotates the pair (a, b). The CPU backend computes the same bits.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cos, float sin) {
  const float rotated_a = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = rotated_a;
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

/// One token of the rotated queries: the counterpart of CacheRow.
template <typename T>
class QueryRow {
 public:
  __device__ __forceinline__ QueryRow(const QueryRows& query, int64_t row)
      : first_(static_cast<T*>(query.out) + row * query.num_heads * query.head_dim), head_dim_(query.head_dim) {}

  __device__ __forceinline__ bool is_stored() const { return true; }

  __device__ __forceinline__ QueryHead<T> head(int32_t head) const {
    return QueryHead<T>(first_ + int64_t{head} * head_dim_);
  }

 private:
  T* first_;
  int64_t head_dim_;
};

/// Rotates this thread's vectors of a row [heads, D] of queries or keys at `from` and stores them. `make_row` makes the
/// QueryRow or CacheRow; it is called when all loads have been issued, because it waits for the slot. A vector has
/// kCount elements of each of kHeads heads; of pairs whose elements are apart, kCount pairs of one head.
template <int kHeads, int kCount, typename T, typename MakeRow>
__device__ __forceinline__ void rotate_vectors(const T* from, int64_t head_stride, int32_t num_heads,
                                               const HeadPartition& heads, const Rotation& rotation,
                                               const ThreadVectors& vectors, const MakeRow& make_row) {
  const int32_t half = rotation.half, rotated_vectors = heads.rotated;
  from += vectors.first_head * head_stride;
  const auto in_row = [&](int i) { return i == 0 || vectors.head(i) < num_heads; };
  if (vectors.vector >= rotated_vectors) {
    const int32_t element = 2 * half + (vectors.vector - rotated_vectors) * kCount;
    const auto row = make_row();
    if (!row.is_stored()) return;
#pragma unroll 1
    for (int i = 0; i < kHeads && in_row(i); ++i) {
      const auto chunk = load_chunk<T, kCount>(from + i * vectors.step * head_stride + element);
      row.head(vectors.head(i)).copy(element, chunk);
    }
    return;
  }
  const int64_t position = min(max(__ldg(rotation.positions + vectors.row), 0), rotation.max_positions - 1);
  const float* const cosines = rotation.cos_sin + position * rotation.row_stride;
  // With one element per vector, the two elements of a pair are loaded separately in both layouts.
  if (kCount == 1 || rotation.interleaved == 0) {
    const int32_t angle = vectors.vector * kCount;
    const int32_t first = rotation.interleaved != 0 ? 2 * angle : angle;
    const int32_t second = rotation.interleaved != 0 ? first + 1 : first + half;
    const auto first_chunk = load_chunk<T, kCount>(from + first), second_chunk = load_chunk<T, kCount>(from + second);
    const auto row = make_row();
    if (!row.is_stored()) return;
    float a[kCount], b[kCount], cos[kCount], sin[kCount];
    load_angles(cos, cosines + angle);
    load_angles(sin, cosines + half + angle);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      a[i] = Element<T>::to_f32(first_chunk.elements[i]);
      b[i] = Element<T>::to_f32(second_chunk.elements[i]);
      rotate_pair(a[i], b[i], cos[i], sin[i]);
    }
    const auto head = row.head(vectors.first_head);
    head.store(first, a);
    head.store(second, b);
  } else if constexpr (kCount > 1) {
    const int32_t first = vectors.vector * kCount;
    Chunk<T, kCount> chunks[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      // The first head stands in for heads past the last one.
      chunks[i] = load_chunk<T, kCount>(from + (in_row(i) ? i * vectors.step : 0) * head_stride + first);
    }
    const auto row = make_row();
    if (!row.is_stored()) return;
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
      for (int j = 0; j < kCount / 2; ++j) rotate_pair(numbers[2 * j], numbers[2 * j + 1], cos[j], sin[j]);
      row.head(vectors.head(i)).store(first, numbers);
    }
  }
}

template <int kCount, typename T>
__device__ __forceinline__ void rotate_queries(const RopeParams& params, const ThreadVectors& vectors) {
  const QueryRows& query = params.query;
  const T* const from = static_cast<const T*>(query.rows) + vectors.row * query.row_token_stride;
  rotate_vectors<kRopeHeadsPerThread, kCount>(from, query.row_head_stride, query.num_heads, query.heads,
                                              params.rotation, vectors,
                                              [&] { return QueryRow<T>(query, vectors.row); });
}

template <int kCount, typename T, CacheType kType>
__device__ __forceinline__ void rotate_keys(const RopeParams& params, const RowSlots& slots,
                                            const ThreadVectors& vectors) {
  const NewRows& key = params.key;
  const T* const from = static_cast<const T*>(key.rows) + vectors.row * key.row_token_stride;
  const RowSlot slot = slots.load(vectors.row);
  // One head per thread: the division by the scale leaves no registers for a second one.
  rotate_vectors<1, kCount>(from, key.row_head_stride, key.num_heads, key.heads, params.rotation, vectors,
                            [&] { return CacheRow<T, kType>(key, slots, vectors, slot); });
}

template <typename T, CacheType kType>
__device__ __forceinline__ void update_cache(const RopeParams& params, int32_t row, uint32_t thread) {
  const RowSlots slots(params.slot_mapping, params.partition);
  const uint32_t key_threads = threads_per_row(params.key.heads);
  if (thread >= key_threads)
    return store_vectors<T, kType, kRopeHeadsPerThread>(params.value, slots, row, thread - key_threads);
  const ThreadVectors vectors(params.key.heads, row, thread);
  if (params.key.aligned != 0) {
    rotate_keys<16 / sizeof(T), T, kType>(params, slots, vectors);
  } else {
    rotate_keys<1, T, kType>(params, slots, vectors);
  }
}

template <typename T>
__device__ __forceinline__ void update(const RopeParams& params, int32_t row, uint32_t thread) {
  const uint32_t query_threads = threads_per_row(params.query.heads);
  if (thread < query_threads) {
    const ThreadVectors vectors(params.query.heads, row, thread);
    if (params.query.aligned != 0) {
      rotate_queries<16 / sizeof(T), T>(params, vectors);
    } else {
      rotate_queries<1, T>(params, vectors);
    }
    return;
  }
  switch (params.key.cache_type) {
    case CacheType::AsRows:
      return update_cache<T, CacheType::AsRows>(params, row, thread - query_threads);
    case CacheType::F8E4M3Fn:
      return update_cache<T, CacheType::F8E4M3Fn>(params, row, thread - query_threads);
    case CacheType::F8E5M2:
      return update_cache<T, CacheType::F8E5M2>(params, row, thread - query_threads);
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kRowThreads, xa::kCtas)
    XA_ENTRY(const __grid_constant__ xa::RopeParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  xa::for_row_of_thread(params.partition, [&](int32_t row, uint32_t thread) { xa::update<T>(params, row, thread); });
}
