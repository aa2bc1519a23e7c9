// Rows of K and V on their way into a paged cache: which slot a token has, and what a cache makes of a number.
#pragma once

#include <cstdint>

#include "chunk.cuh"
#include "element.cuh"
#include "fp8_rounding.cuh"
#include "params/cache_rows.cuh"
#include "slots.cuh"

namespace xa {

/// Shares of a row.
__device__ __forceinline__ uint32_t shares(const HeadSharing& sharing) { return sharing.pieces.divisor * sharing.step; }

/// One piece of every `step`-th head of a row.
struct RowShare {
  int32_t row;
  int32_t piece;
  int32_t first_head;
  int32_t step;
  uint32_t lanes;  // of the warp, which have shares of the same heads of the row: a mask

  __device__ __forceinline__ RowShare(const HeadSharing& sharing, int32_t row, uint32_t share)
      : row(row), first_head(divided(share, sharing.pieces)), step(sharing.step) {
    piece = share - first_head * sharing.pieces.divisor;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t before = min(share, lane), after = min(shares(sharing) - 1 - share, 31 - lane);
    lanes = ~0u >> (31 - before - after) << (lane - before);
  }

  __device__ __forceinline__ int32_t head(int i) const { return first_head + i * step; }
};

/// Calls `body(row, share)` for the one share of this thread. There is no loop: a compiler that keeps all that does not
/// change in one has no registers left for what is on its way from memory.
template <typename Body>
__device__ __forceinline__ void for_share(const RowSharing& sharing, const Body& body) {
  const uint32_t index = blockIdx.y * blockDim.x + threadIdx.x, num_shares = sharing.shares.divisor;
  const int32_t row_in_cta = sharing.cta_rows == 1 ? 0 : divided(index, sharing.shares);
  const uint32_t share = index - row_in_cta * num_shares;
  const int64_t row = int64_t{blockIdx.x} * sharing.cta_rows + row_in_cta;
  if (row_in_cta < sharing.cta_rows && row < sharing.num_rows && share < num_shares)
    body(static_cast<int32_t>(row), share);
}

/// The slot of a row, and that of one of the next rows, which differs from lane to lane.
struct RowSlot {
  int64_t own;
  int64_t ahead;  // -1 past the last row
};

/// The slots of a call's rows.
class RowSlots {
 public:
  __device__ __forceinline__ RowSlots(const SlotMapping& mapping, const RowSharing& sharing)
      : mapping_(mapping), num_rows_(sharing.num_rows) {}

  __device__ __forceinline__ const SlotMapping& mapping() const { return mapping_; }

  __device__ __forceinline__ RowSlot load(int32_t row) const {
    return mapping_.are_64_bit != 0 ? load_from<int64_t>(row) : load_from<int32_t>(row);
  }

  /// Whether one of the next kAhead rows has the same slot, which is in the cache. Then this row need not be stored,
  /// because one of those is: thousands of stores to one address take turns in L2 and cost seven times as much as rows
  /// apart. The lanes that store the row look at a row each; fewer than kAhead lanes look at as many rows.
  __device__ __forceinline__ bool is_overwritten(const RowShare& share, const RowSlot& slot) const {
    const bool same = slot.own == slot.ahead;
    return (__ballot_sync(__activemask(), same) & share.lanes) != 0;
  }

 private:
  static constexpr int32_t kAhead = 8;

  template <typename Index>
  __device__ __forceinline__ RowSlot load_from(int32_t row) const {
    const Index* const slot = static_cast<const Index*>(mapping_.slots) + row;
    const int32_t ahead = 1 + threadIdx.x % kAhead;
    return {__ldg(slot), row < num_rows_ - ahead ? __ldg(slot + ahead) : -1};
  }

  const SlotMapping& mapping_;
  int32_t num_rows_;
};

/// What the numbers of a head are divided by before they are stored.
class Scale {
 public:
  __device__ __forceinline__ Scale(const NewRows& target, int32_t head)
      : is_given_(target.scale != nullptr),
        value_(is_given_ ? __ldg(target.scale + head * target.scale_stride) : 1.0f) {}

  __device__ __forceinline__ bool is_given() const { return is_given_; }

  /// Quotients, rounded as f32; with kToFp8 only so that fp8 makes the same of them, with kOf16Bits of numbers that f16
  /// or bf16 holds.
  template <bool kToFp8, bool kOf16Bits, int kCount>
  __device__ __forceinline__ void divide(float (&numbers)[kCount]) const {
    const uint32_t bits = __float_as_uint(value_);
    if ((bits & 0x7fffffu) == 0 && bits - (87u << 23) < 80u << 23) {
      // A power of two, whose inverse is one as well: the product is the quotient.
      const float inverse = __uint_as_float((254u << 23) - bits);
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers[i] *= inverse;
    } else if (kToFp8 && kOf16Bits && ((bits + 1) & 0x7fffffu) != 0 && fabsf(value_) > 0x1p-40f &&
               fabsf(value_) < 0x1p40f) {
      // The inverse as a sum, good to 2^-43. That is enough for quotients of 11 bits by 24 to lie on their side of
      // every number in the middle between two of fp8, but for a scale that is all ones. The first part is a bit too
      // small, so that both have one sign, and infinities and zeros keep theirs.
      const float guess = ptx::reciprocal_approx(value_), first = fmaf(guess, -0x1p-22f, guess);
      const float second = fmaf(-first, value_, 1.0f) * guess;
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers[i] = fmaf(numbers[i], first, numbers[i] * second);
    } else if constexpr (kToFp8) {
      // One reciprocal for all. A scale that f32 has no reciprocal or no remainders for is moved by a power of two,
      // with the numbers: what they lose by that is past the ends of fp8. It takes its sign along, so that a zero keeps
      // its own.
      const float size = fabsf(value_);
      const float power = size < 0x1p-40f ? 0x1p100f : size > 0x1p100f ? 0x1p-100f : 1.0f;
      const float unit = copysignf(power, value_), scale = size * power;
      const float guess = ptx::reciprocal_approx(scale);
      // Minus the inverse, for what is too much: the other way round corrections would take a zero's sign.
      const float back = fmaf(fmaf(guess, scale, -1.0f), guess, -guess);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        // Each correction squares the error.
        const float x = numbers[i] * unit, first = x * guess;
        const float second = fmaf(fmaf(first, scale, -x), back, first);
        const float third = fmaf(fmaf(second, scale, -x), back, second);
        // Infinities have no remainder, and scales of 0 and infinity no inverse.
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

/// How a cache of 8-bit floats rounds.
template <CacheType kType>
struct Fp8;
template <>
struct Fp8<CacheType::F8E4M3Fn> : F8E4M3Fn {};
template <>
struct Fp8<CacheType::F8E5M2> : F8E5M2 {};

/// The head of a token in a cache of this type, under rows of T.
template <typename T, CacheType kType>
class CacheHead {
 public:
  __device__ __forceinline__ CacheHead(uint8_t* first, const Scale& scale) : first_(first), scale_(scale) {}

  /// A chunk of the new row; bit by bit where the cache has its type and no scale.
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

  /// Numbers, divided by the scale and rounded; `kOf16Bits`: they are of f16 or bf16.
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

/// The place of a row in the cache; a row whose slot lies outside, or that another overwrites, goes nowhere.
template <typename T, CacheType kType>
class CachePlace {
 public:
  __device__ __forceinline__ CachePlace(const NewRows& target, const RowSlots& slots, const RowShare& share,
                                        const RowSlot& slot)
      : target_(target),
        inside_(!slots.is_overwritten(share, slot) && holds(slots.mapping(), slot.own)),
        first_(nullptr) {
    if (!inside_) return;
    const SlotMapping& mapping = slots.mapping();
    const int64_t page = page_of(mapping, slot.own);
    const int64_t offset = slot.own - page * mapping.page_size;
    first_ = static_cast<uint8_t*>(target.cache) + (page * target.page_stride + offset * target.token_stride) * kSize;
  }

  __device__ __forceinline__ bool inside() const { return inside_; }

  __device__ __forceinline__ CacheHead<T, kType> head(int32_t head) const {
    return {first_ + head * target_.head_stride * kSize, Scale(target_, head)};
  }

 private:
  static constexpr int64_t kSize = kType == CacheType::AsRows ? sizeof(T) : 1;
  const NewRows& target_;
  bool inside_;
  uint8_t* first_;
};

/// A share of a row of K or V, as it is, into its place: pieces of kCount elements of kHeads heads.
template <typename T, CacheType kType, int kHeads, int kCount>
__device__ __forceinline__ void write_share(const NewRows& target, const RowSlots& slots, const RowShare& share) {
  // The row's numbers do not wait for its slot.
  const RowSlot slot = slots.load(share.row);
  const int32_t element = share.piece * kCount;
  const T* const from = static_cast<const T*>(target.rows) + share.row * target.row_token_stride + element;
  const auto in_row = [&](int i) { return i == 0 || share.head(i) < target.num_heads; };
  Chunk<T, kCount> chunks[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    // The first once more in place of one that there is not: so there is no branch, which takes registers.
    chunks[i] = load_chunk<T, kCount>(from + share.head(in_row(i) ? i : 0) * target.row_head_stride);
  }
  const CachePlace<T, kType> place(target, slots, share, slot);
  if (!place.inside()) return;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (in_row(i)) place.head(share.head(i)).copy(element, chunks[i]);
  }
}

template <typename T, CacheType kType, int kHeads>
__device__ __forceinline__ void write_share(const NewRows& target, const RowSlots& slots, int32_t row, uint32_t index) {
  const RowShare share(target.sharing, row, index);
  if (target.aligned != 0) {
    write_share<T, kType, kHeads, 16 / sizeof(T)>(target, slots, share);
  } else {
    write_share<T, kType, kHeads, 1>(target, slots, share);
  }
}

}  // namespace xa
