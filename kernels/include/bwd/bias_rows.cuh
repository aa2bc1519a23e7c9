// The bias of scores in the gradients. In dQ, dK and dV it is the first summand of the scores' products: a warp loads
// the bias of a chunk of scores into their accumulators, and computes a product that does not need them while the loads
// are under way. Under a soft cap, and in dbias, the bias is added to the logits instead (it is late).
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/ptx_extra.cuh"
#include "element.cuh"
#include "log2_units.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "score_bias.cuh"
#include "warp_products.cuh"

namespace xa {

/// What the bias is multiplied by before the products of scores are added to it.
__device__ __forceinline__ float bias_factor(const AttentionParams& params) {
  return kLog2E / params.softmax_scale_log2;
}

/// No bias.
struct NoBias {
  static constexpr bool kExists = false, kIsLate = false;
};

/// The bias of the query rows of a warp's scores: `Find` gives the index of a row by its index among them. Rows of
/// the scores are keys (kHoldsKeys) or query rows, and their first key is `first_key`, any number. A late bias is never
/// loaded before the product.
template <typename T, bool kHoldsKeys, bool kIsLate_, typename Find>
class RowBias {
 public:
  static constexpr bool kExists = true, kIsLate = kIsLate_;

  __device__ __forceinline__ RowBias(const BiasSource& source, int32_t first_key, const Find& find)
      : source_(source), first_key_(first_key), find_(find) {}

  /// Starts to load the bias of the warp's scores, unless there is a soft cap. What the accumulators hold until
  /// `convert` is not a number.
  template <int kTiles, int kBlocks>
  __device__ __forceinline__ void load(float (&scores)[kTiles][kBlocks][4], const AttentionParams& params) const {
    if (has_softcap(params)) return;
    with_bias_type<T>(source_, [&](auto type) {
      using E = decltype(type);
      if constexpr (kHoldsKeys) {
        visit_columns<E>(scores, [](float& to, float bits) { to = bits; });
      } else if (has_pairs()) {
        visit_pairs<E>(scores, [](float& first, float& second, float2 bits) {
          first = bits.x;
          if constexpr (!Element<E>::kIs16Bit) second = bits.y;
        });
      } else {
        visit_rows<E>(scores, [](float& to, float bits) { to = bits; });
      }
    });
  }
  /// Turns what `load` has loaded into what the product is added to: the bias divided by the factor of the scores, or 0
  /// under a soft cap.
  template <int kTiles, int kBlocks>
  __device__ __forceinline__ void convert(float (&scores)[kTiles][kBlocks][4], const AttentionParams& params) const {
    if (has_softcap(params)) return clear(scores);
    const float factor = bias_factor(params);
    const bool splits = !kHoldsKeys && has_pairs();
    with_bias_type<T>(source_, [&](auto type) {
      using E = decltype(type);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            float &first = scores[tile][block][i], &second = scores[tile][block][i + 1];
            if constexpr (Element<E>::kIs16Bit) {
              const uint32_t pair = __float_as_uint(first), other = splits ? pair >> 16 : __float_as_uint(second);
              second = number<E>(__uint_as_float(other));
              first = number<E>(first);
            }
            first *= factor;
            second *= factor;
          }
        }
      }
    });
  }
  /// Adds the bias in base 2 to logits.
  template <int kTiles, int kBlocks>
  __device__ __forceinline__ void add(float (&logits)[kTiles][kBlocks][4]) const {
    with_bias_type<T>(source_, [&](auto type) {
      using E = decltype(type);
      const auto add_one = [](float& to, float bits) { to = __fmaf_rn(kLog2E, number<E>(bits), to); };
      if constexpr (kHoldsKeys) {
        visit_columns<E>(logits, add_one);
      } else if (kIsLate && has_pairs()) {
        visit_pairs<E>(logits, [&](float& first, float& second, float2 bits) {
          if constexpr (Element<E>::kIs16Bit) bits.y = __uint_as_float(__float_as_uint(bits.x) >> 16);
          add_one(first, bits.x);
          add_one(second, bits.y);
        });
      } else {
        visit_rows<E>(logits, add_one);
      }
    });
  }

 private:
  static __device__ __forceinline__ bool has_softcap(const AttentionParams& params) {
    return params.softcap_log2 > 0.0f;
  }
  /// Whether pairs of adjacent keys are aligned, and both or none of them are within the bias.
  __device__ __forceinline__ bool has_pairs() const { return ((source_.keys | first_key_) & 1) == 0; }
  /// The element of key `key`, any number, of a row. It must not be read unless the key is one of `num_keys`.
  template <typename E>
  __device__ __forceinline__ const E* element(BiasRowIndex row, int32_t key) const {
    const int64_t index = static_cast<int64_t>(row) * static_cast<uint32_t>(source_.keys) + key;
    return static_cast<const E*>(source_.data) + (row != kNoBiasRow ? index : 0);
  }
  __device__ __forceinline__ uint32_t num_keys(BiasRowIndex row) const { return row != kNoBiasRow ? source_.keys : 0; }
  /// The bits of an element, 0 if it does not exist.
  template <typename E>
  static __device__ __forceinline__ float load_bits(const E* from, bool exists) {
    using Bits = std::conditional_t<Element<E>::kIs16Bit, uint16_t, uint32_t>;
    return __uint_as_float(exists ? __ldg(reinterpret_cast<const Bits*>(from)) : Bits{0});
  }
  /// The number whose bits are the lower ones of `bits`.
  template <typename E>
  static __device__ __forceinline__ float number(float bits) {
    if constexpr (Element<E>::kIs16Bit) return Element<E>::to_f32(E{static_cast<uint16_t>(__float_as_uint(bits))});
    return bits;
  }

  /// Calls `visit(score, bits of its bias)` for scores whose columns are query rows.
  template <typename E, int kTiles, int kBlocks, typename Visit>
  __device__ __forceinline__ void visit_columns(float (&scores)[kTiles][kBlocks][4], const Visit& visit) const {
    const int32_t lane = ptx::thread() % 32, own_key = first_key_ + lane / 4;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const BiasRowIndex row = find_(8 * block + lane % 4 * 2 + side);
        const uint32_t keys = num_keys(row);
        const E* const from = element<E>(row, own_key);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t offset = 16 * tile + 8 * half;
            const bool exists = static_cast<uint32_t>(own_key + offset) < keys;
            visit(scores[tile][block][2 * half + side], load_bits(from + offset, exists));
          }
        }
      }
    }
  }
  /// Calls `visit(tile, half, row, first key of the lane)` for the lane's rows of scores whose rows are query rows.
  template <int kTiles, typename Visit>
  __device__ __forceinline__ void for_rows(const Visit& visit) const {
    const int32_t lane = ptx::thread() % 32;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(tile, half, find_(16 * tile + 8 * half + lane / 4), first_key_ + lane % 4 * 2);
      }
    }
  }
  /// Calls `visit(score, bits of its bias)` for such scores.
  template <typename E, int kTiles, int kBlocks, typename Visit>
  __device__ __forceinline__ void visit_rows(float (&scores)[kTiles][kBlocks][4], const Visit& visit) const {
    for_rows<kTiles>([&](int tile, int half, BiasRowIndex row, int32_t own_key) {
      const uint32_t keys = num_keys(row);
      const E* const from = element<E>(row, own_key);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int32_t offset = 8 * block + side;
          const bool exists = static_cast<uint32_t>(own_key + offset) < keys;
          visit(scores[tile][block][2 * half + side], load_bits(from + offset, exists));
        }
      }
    });
  }
  /// Calls `visit(score, next score, bits of their bias)` for such scores, two keys at a time; the bits of two numbers
  /// of 16 bits are both in the first one.
  template <typename E, int kTiles, int kBlocks, typename Visit>
  __device__ __forceinline__ void visit_pairs(float (&scores)[kTiles][kBlocks][4], const Visit& visit) const {
    for_rows<kTiles>([&](int tile, int half, BiasRowIndex row, int32_t own_key) {
      const uint32_t keys = num_keys(row);
      const E* const from = element<E>(row, own_key);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const bool exist = static_cast<uint32_t>(own_key + 8 * block) < keys;
        float2 bits = make_float2(0.0f, 0.0f);
        if constexpr (Element<E>::kIs16Bit) {
          bits.x = load_bits(reinterpret_cast<const float*>(from + 8 * block), exist);
        } else if (exist) {
          bits = __ldg(reinterpret_cast<const float2*>(from + 8 * block));
        }
        visit(scores[tile][block][2 * half], scores[tile][block][2 * half + 1], bits);
      }
    });
  }

  const BiasSource& source_;
  const int32_t first_key_;
  const Find find_;
};

template <typename T, bool kHoldsKeys, bool kIsLate = false, typename Find>
__device__ __forceinline__ RowBias<T, kHoldsKeys, kIsLate, Find> row_bias(const BiasSource& source, int32_t first_key,
                                                                          const Find& find) {
  return {source, first_key, find};
}

}  // namespace xa
