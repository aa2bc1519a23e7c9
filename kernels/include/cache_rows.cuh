// Stores new rows of K and V in a paged cache: the slot of a row, the scale and the rounding of its elements.
//
// A thread copies one vector of a few heads of one row. A vector is 16 bytes, or one element without that alignment.
#pragma once

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "fp8_rounding.cuh"
#include "params/cache_rows.cuh"
#include "slots.cuh"

namespace xa {

/// Threads that copy a row.
__device__ __forceinline__ uint32_t threads_per_row(const HeadPartition& heads) {
  return heads.vectors.divisor * heads.step;
}

/// The vectors of one thread: vector `vector` of heads first_head, first_head + step, and so on.
struct ThreadVectors {
  int32_t row;
  int32_t vector;
  int32_t first_head;
  int32_t step;
  uint32_t lanes;  // mask of the lanes of the warp that copy this row of this tensor

  /// `thread` is the thread's index within the row.
  __device__ __forceinline__ ThreadVectors(const HeadPartition& heads, int32_t row, uint32_t thread)
      : row(row), first_head(divided(thread, heads.vectors)), step(heads.step) {
    vector = thread - first_head * heads.vectors.divisor;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t before = min(thread, lane), after = min(threads_per_row(heads) - 1 - thread, 31 - lane);
    lanes = ~0u >> (31 - before - after) << (lane - before);
  }

  __device__ __forceinline__ int32_t head(int i) const { return first_head + i * step; }
};

/// Calls `body(row, thread)`, `thread` being this thread's index within its row. There is no loop over rows: the
/// compiler would keep every loop-invariant stride and scale in registers, which leaves too few for loads in flight.
template <typename Body>
__device__ __forceinline__ void for_row_of_thread(const RowPartition& partition, const Body& body) {
  const uint32_t index = blockIdx.y * blockDim.x + threadIdx.x, num_threads = partition.threads.divisor;
  const int32_t row_in_cta = partition.cta_rows == 1 ? 0 : divided(index, partition.threads);
  const uint32_t thread = index - row_in_cta * num_threads;
  const int64_t row = int64_t{blockIdx.x} * partition.cta_rows + row_in_cta;
  if (row_in_cta < partition.cta_rows && row < partition.num_rows && thread < num_threads)
    body(static_cast<int32_t>(row), thread);
}

/// The slot of a row, and the slot of one of the kLookAhead rows after it, a different one in each lane.
struct RowSlot {
  int64_t own;
  int64_t later;  // -1 past the last row
};

/// The slots of a call's rows.
class RowSlots {
 public:
  __device__ __forceinline__ RowSlots(const SlotMapping& mapping, const RowPartition& partition)
      : mapping_(mapping), num_rows_(partition.num_rows) {}

  __device__ __forceinline__ const SlotMapping& mapping() const { return mapping_; }

  __device__ __forceinline__ RowSlot load(int32_t row) const {
    return mapping_.are_64_bit != 0 ? load_from<int64_t>(row) : load_from<int32_t>(row);
  }

  /// Whether one of the next kLookAhead rows has the same slot. Then this row need not be stored, because one of those
  /// is. Thousands of stores to one address serialize in L2 and take seven times as long as stores to distinct rows.
  /// Each lane that copies the row compares one later row, so fewer than kLookAhead lanes compare fewer rows.
  __device__ __forceinline__ bool is_overwritten(const ThreadVectors& vectors, const RowSlot& slot) const {
    const bool same = slot.own == slot.later;
    return (__ballot_sync(__activemask(), same) & vectors.lanes) != 0;
  }

 private:
  static constexpr int32_t kLookAhead = 8;

  template <typename Index>
  __device__ __forceinline__ RowSlot load_from(int32_t row) const {
    const Index* const slot = static_cast<const Index*>(mapping_.slots) + row;
    const int32_t later = 1 + threadIdx.x % kLookAhead;
    return {__ldg(slot), row < num_rows_ - later ? __ldg(slot + later) : -1};
  }

  const SlotMapping& mapping_;
  int32_t num_rows_;
};

/// The scale of a head: elements are divided by it before they are stored.
class Scale {
 public:
  __device__ __forceinline__ Scale(const NewRows& target, int32_t head)
      : is_given_(target.scale != nullptr),
        value_(is_given_ ? __ldg(target.scale + head * target.scale_stride) : 1.0f) {}

  __device__ __forceinline__ bool is_given() const { return is_given_; }

  /// Replaces `numbers` by their quotients. These are rounded as IEEE f32 division does; with kToFp8 only as exactly as
  /// rounding them to fp8 can tell. kOf16Bits promises that f16 or bf16 holds the numbers.
  template <bool kToFp8, bool kOf16Bits, int kCount>
  __device__ __forceinline__ void divide(float (&numbers)[kCount]) const {
    const uint32_t bits = __float_as_uint(value_);
    if ((bits & 0x7fffffu) == 0 && bits - (87u << 23) < 80u << 23) {
      // The scale is a power of two. So is its inverse, and the product is the exact quotient.
      const float inverse = __uint_as_float((254u << 23) - bits);
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers[i] *= inverse;
    } else if (kToFp8 && kOf16Bits && ((bits + 1) & 0x7fffffu) != 0 && fabsf(value_) > 0x1p-40f &&
               fabsf(value_) < 0x1p40f) {
      // The inverse as a sum of two floats, accurate to 2^-43. The quotient of an 11-bit by a 24-bit significand then
      // lies on the correct side of every midpoint between two fp8 numbers, except for a scale whose significand is
      // all ones. The first float is slightly too small, so that both have the same sign and products of infinities
      // and zeros keep theirs.
      const float guess = ptx::reciprocal_approx(value_), first = fmaf(guess, -0x1p-22f, guess);
      const float second = fmaf(-first, value_, 1.0f) * guess;
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers[i] = fmaf(numbers[i], first, numbers[i] * second);
    } else if constexpr (kToFp8) {
      // One reciprocal for all numbers. A scale so small or large that its reciprocal or the remainders leave the range
      // of f32 is multiplied by a power of two, and so are the numbers; what over- or underflows by that is outside of
      // fp8's range. `unit` also carries the scale's sign, so that a zero gets the right one.
      const float size = fabsf(value_);
      const float power = size < 0x1p-40f ? 0x1p100f : size > 0x1p100f ? 0x1p-100f : 1.0f;
      const float unit = copysignf(power, value_), scale = size * power;
      const float guess = ptx::reciprocal_approx(scale);
      // The negated inverse, multiplied by negated remainders: with both signs reversed, a correction would turn -0
      // into +0.
      const float back = fmaf(fmaf(guess, scale, -1.0f), guess, -guess);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        // Each correction squares the relative error.
        const float x = numbers[i] * unit, first = x * guess;
        const float second = fmaf(fmaf(first, scale, -x), back, first);
        const float third = fmaf(fmaf(second, scale, -x), back, second);
        // The correction is NaN where the remainder is (infinities) or the inverse (scales of 0 and infinity).
        numbers[i] = third == third ? third : first;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers[i] /= value_;
    }
  }

 private:
  bool is_given_;
  float value_;
};

/// The encoding of an fp8 cache.
template <CacheType kType>
struct Fp8;
template <>
struct Fp8<CacheType::F8E4M3Fn> : F8E4M3Fn {};
template <>
struct Fp8<CacheType::F8E5M2> : F8E5M2 {};

/// One head of one token in a cache of this type; the new rows are of type T.
template <typename T, CacheType kType>
class CacheHead {
 public:
  __device__ __forceinline__ CacheHead(uint8_t* first, const Scale& scale) : first_(first), scale_(scale) {}

  /// Stores a chunk of the new row; a bitwise copy if the cache has the rows' type and no scale.
  template <int kCount>
  __device__ __forceinline__ void copy(int32_t element, const Chunk<T, kCount>& chunk) const {
    if (kType == CacheType::AsRows && !scale_.is_given()) {
      store_chunk(reinterpret_cast<T*>(first_) + element, chunk);
      return;
    }
    float numbers[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = Element<T>::to_f32(chunk.elements[i]);
    store<Element<T>::kIs16Bit>(element, numbers);
  }

  /// Stores numbers, divided by the scale and rounded. `kOf16Bits` promises that f16 or bf16 holds them.
  template <bool kOf16Bits = false, int kCount>
  __device__ __forceinline__ void store(int32_t element, float (&numbers)[kCount]) const {
    if (scale_.is_given()) scale_.template divide<kType != CacheType::AsRows, kOf16Bits>(numbers);
    if constexpr (kType == CacheType::AsRows) {
      store_chunk(reinterpret_cast<T*>(first_) + element, rounded<T>(numbers));
    } else {
      using Rounding = Fp8<kType>;
      if constexpr (kCount == 1) {
        first_[element] = static_cast<uint8_t>(Rounding::encode(numbers[0], 0.0f, 0.0f, 0.0f));
      } else {
        Chunk<uint32_t, kCount / 4> codes;
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
          codes.elements[i / 4] = Rounding::encode(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
        }
        store_chunk(reinterpret_cast<uint32_t*>(first_ + element), codes);
      }
    }
  }

 private:
  uint8_t* first_;
  Scale scale_;
};

/// The row of the cache that a new row is stored in. A row whose slot is outside of the cache, or that a later row
/// overwrites, is not stored.
template <typename T, CacheType kType>
class CacheRow {
 public:
  __device__ __forceinline__ CacheRow(const NewRows& target, const RowSlots& slots, const ThreadVectors& vectors,
                                      const RowSlot& slot)
      : target_(target),
        is_stored_(!slots.is_overwritten(vectors, slot) && is_in_cache(slots.mapping(), slot.own)),
        first_(nullptr) {
    if (!is_stored_) return;
    const SlotMapping& mapping = slots.mapping();
    const int64_t page = page_of(mapping, slot.own);
    const int64_t offset = slot.own - page * mapping.page_size;
    first_ = static_cast<uint8_t*>(target.cache) + (page * target.page_stride + offset * target.token_stride) * kSize;
  }

  __device__ __forceinline__ bool is_stored() const { return is_stored_; }

  __device__ __forceinline__ CacheHead<T, kType> head(int32_t head) const {
    return {first_ + head * target_.head_stride * kSize, Scale(target_, head)};
  }

 private:
  static constexpr int64_t kSize = kType == CacheType::AsRows ? sizeof(T) : 1;
  const NewRows& target_;
  bool is_stored_;
  uint8_t* first_;
};

/// Copies this thread's vectors, of kCount elements each of up to kHeads heads, from a row of K or V into the cache.
template <typename T, CacheType kType, int kHeads, int kCount>
__device__ __forceinline__ void store_vectors(const NewRows& target, const RowSlots& slots,
                                              const ThreadVectors& vectors) {
  // The slot is used only after the row's loads have been issued, so that they do not wait for it.
  const RowSlot slot = slots.load(vectors.row);
  const int32_t element = vectors.vector * kCount;
  const T* const from = static_cast<const T*>(target.rows) + vectors.row * target.row_token_stride + element;
  const auto in_row = [&](int i) { return i == 0 || vectors.head(i) < target.num_heads; };
  Chunk<T, kCount> chunks[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    // The first head stands in for heads past the last one: a branch would take registers.
    chunks[i] = load_chunk<T, kCount>(from + vectors.head(in_row(i) ? i : 0) * target.row_head_stride);
  }
  const CacheRow<T, kType> cache(target, slots, vectors, slot);
  if (!cache.is_stored()) return;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (in_row(i)) cache.head(vectors.head(i)).copy(element, chunks[i]);
  }
}

template <typename T, CacheType kType, int kHeads>
__device__ __forceinline__ void store_vectors(const NewRows& target, const RowSlots& slots, int32_t row,
                                              uint32_t thread) {
  const ThreadVectors vectors(target.heads, row, thread);
  if (target.aligned != 0) {
    store_vectors<T, kType, kHeads, 16 / sizeof(T)>(target, slots, vectors);
  } else {
    store_vectors<T, kType, kHeads, 1>(target, slots, vectors);
  }
}

}  // namespace xa
