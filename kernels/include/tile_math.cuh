// The two products of attention for a warp, S = Q K^T and O += P V, on rows in shared memory.
//
// Fragments are those of mma.sync. In an accumulator c of 16 x 8, lane 4g + t holds row g in c[0], c[1] (columns 2t and
// 2t + 1) and row g + 8 in c[2], c[3]. For 16-bit P the accumulators of two neighbouring blocks of 8 keys are the
// operand A of P V as they are, once packed.
//
// fp8 rows stay bytes in shared memory and become f16 operands B in registers. A lane's word of K is columns 4t to
// 4t + 3 of a k-block; it serves as columns 2t, 2t + 1, 2t + 8, 2t + 9 of the instruction, so Q's columns are stored in
// the order 4t, 4t + 1 | 4t + 2, 4t + 3 of each 16. Of V, the accumulators of two blocks of 8 columns hold the even and
// the odd columns of 16.
//
// f32 runs as three tf32 products, big*big + big*small + small*big, where x = big + small to 22 bits. A k-block of 8
// f32 has the bytes of one of 16 halves, so Q and K are read alike; V cannot be transposed by ldmatrix and is read by
// words.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "fp8.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"

namespace xa {

/// An f32 as the sum of two tf32.
struct SplitTf32 {
  uint32_t big;
  uint32_t small;
  __device__ __forceinline__ explicit SplitTf32(float x)
      : big(ptx::round_to_tf32(x)), small(ptx::round_to_tf32(x - __uint_as_float(big))) {}
};

/// Q of a warp's rows: in registers where they suffice, otherwise read again for each block of keys.
template <int kRowTiles, int kHeadDim, int kBytes, bool kInRegisters>
class QueryFragments {
  static constexpr int kPitch = kHeadDim * kBytes + 16;
  static constexpr int kSteps = kHeadDim * kBytes / 32;
  uint32_t address_;
  uint32_t held_[kInRegisters ? kSteps : 1][kInRegisters ? kRowTiles : 1][4];

 public:
  /// `rows` is the shared address of the warp's first row.
  __device__ __forceinline__ explicit QueryFragments(uint32_t rows) {
    const uint32_t lane = threadIdx.x % 32;
    address_ = rows + lane % 16 * kPitch + lane / 16 * 16;
  }

  /// Call once the rows are there.
  __device__ __forceinline__ void fill() {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          ptx::ldmatrix_x4(held_[step][tile], address_ + tile * 16 * kPitch + step * 32);
        }
      }
    }
  }

  __device__ __forceinline__ void get(uint32_t (&fragment)[4], int step, int tile) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[i] = held_[step][tile][i];
    } else {
      ptx::ldmatrix_x4(fragment, address_ + tile * 16 * kPitch + step * 32);
    }
  }
};

/// The products for kRowTiles x 16 rows of Q of type T, kKeys keys of type Stored and kHeadDim columns.
/// K and V lie in shared memory as `Rows` (shared_rows.cuh).
template <typename T, typename Stored, typename Rows, int kRowTiles, int kKeys, int kHeadDim>
struct TileMath {
  static constexpr bool kIsFp8 = sizeof(Stored) == 1;
  static constexpr int kSteps = kHeadDim * static_cast<int>(sizeof(T)) / 32;  // k-blocks of S: 16 halves or 8 floats
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kColumnTiles = kHeadDim / 8;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Output = float[kRowTiles][kColumnTiles][4];
  static_assert(kKeys % (kIsFp8 && kKeys > 16 ? 32 : 16) == 0 && kHeadDim % 32 == 0);

  /// scores = Q K^T, with K's first row at shared address `keys`.
  template <typename Query>
  static __device__ __forceinline__ void scores(Scores& scores, const Query& query, uint32_t keys,
                                                const AttentionParams& params) {
    if constexpr (kIsFp8) {
      if (params.kv_is_e5m2 != 0) return scores_of_fp8<true>(scores, query, keys);
      return scores_of_fp8<false>(scores, query, keys);
    }
    // ldmatrix_x4 gives, of 16 keys: the k-block's first and second half of keys 0-7, then of keys 8-15.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t address = keys + Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float corrections[kRowTiles][kKeyTiles][4];  // f32: the products of small parts, summed apart from the big ones
    clear(scores);
    if constexpr (!Element<T>::kIs16Bit) clear(corrections);
    // Long rows of f32 are unrolled less, or ptxas fetches more fragments ahead than there are registers for.
#pragma unroll(kSteps <= 16 ? 8 : 2)
    for (int step = 0; step < kSteps; ++step) {
      uint32_t q[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) query.get(q[tile], step, tile);
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, Rows::moved(address, 16 * pair, 2 * step));
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int block = 2 * pair + half;
            if constexpr (Element<T>::kIs16Bit) {
              Element<T>::mma(scores[tile][block], q[tile], k[2 * half], k[2 * half + 1]);
            } else {
              split_mma(scores[tile][block], corrections[tile][block], q[tile], k[2 * half], k[2 * half + 1]);
            }
          }
        }
      }
    }
    if constexpr (!Element<T>::kIs16Bit) add(scores, corrections);
  }

  /// output += P V, with V's first row at shared address `values`.
  static __device__ __forceinline__ void accumulate(Output& output, const Scores& p, uint32_t values,
                                                    const AttentionParams& params) {
    if constexpr (kIsFp8) {
      if (params.kv_is_e5m2 != 0) return accumulate_fp8<true>(output, p, values);
      accumulate_fp8<false>(output, p, values);
    } else if constexpr (Element<T>::kIs16Bit) {
      accumulate_16_bit(output, p, values);
    } else {
      accumulate_f32(output, p, values);
    }
  }

 private:
  template <int kTiles>
  static __device__ __forceinline__ void clear(float (&x)[kRowTiles][kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int block = 0; block < kTiles; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[tile][block][i] = 0.0f;
      }
    }
  }

  static __device__ __forceinline__ void add(Scores& to, const Scores& x) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[tile][block][i] += x[tile][block][i];
      }
    }
  }

  static __device__ __forceinline__ void split_mma(float (&big)[4], float (&small)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
    uint32_t a_big[4], a_small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitTf32 split(__uint_as_float(a[i]));
      a_big[i] = split.big;
      a_small[i] = split.small;
    }
    const SplitTf32 first(__uint_as_float(b0)), second(__uint_as_float(b1));
    ptx::mma_tf32(small, a_big, first.small, second.small);
    ptx::mma_tf32(small, a_small, first.big, second.big);
    ptx::mma_tf32(big, a_big, first.big, second.big);
  }

  template <bool kIsE5m2, typename Query>
  static __device__ __forceinline__ void scores_of_fp8(Scores& scores, const Query& query, uint32_t keys) {
    // A row of 16 bytes is a k-block; ldmatrix_x4 gives one k-block of 32 keys, or two of 16 keys where there are no
    // more.
    constexpr int kStepsAtOnce = kKeyTiles >= 4 ? 1 : 2, kTilesAtOnce = 4 / kStepsAtOnce;
    const uint32_t lane = threadIdx.x % 32, matrix = lane / 8;
    const uint32_t address = keys + Rows::offset(matrix / kStepsAtOnce * 8 + lane % 8, matrix % kStepsAtOnce);
    clear(scores);
#pragma unroll
    for (int first_step = 0; first_step < kSteps; first_step += kStepsAtOnce) {
      uint32_t q[kStepsAtOnce][kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int step = 0; step < kStepsAtOnce; ++step) query.get(q[step][tile], first_step + step, tile);
      }
#pragma unroll
      for (int block = 0; block < kKeyTiles; block += kTilesAtOnce) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, Rows::moved(address, 8 * block, first_step));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto [low, high] = decode_neighbours<Stored, kIsE5m2>(k[i]);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            Element<T>::mma(scores[tile][block + i / kStepsAtOnce], q[i % kStepsAtOnce][tile], low, high);
          }
        }
      }
    }
  }

  /// P's accumulators of keys [16 step, 16 step + 16) as an operand A.
  static __device__ __forceinline__ void pack_weights(uint32_t (&weights)[kRowTiles][4], const Scores& p, int step) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const float (&left)[4] = p[tile][2 * step], (&right)[4] = p[tile][2 * step + 1];
      weights[tile][0] = Element<T>::pack(left[0], left[1]);
      weights[tile][1] = Element<T>::pack(left[2], left[3]);
      weights[tile][2] = Element<T>::pack(right[0], right[1]);
      weights[tile][3] = Element<T>::pack(right[2], right[3]);
    }
  }

  template <bool kIsE5m2>
  static __device__ __forceinline__ void accumulate_fp8(Output& output, const Scores& p, uint32_t values) {
    // Transposing moves pairs of bytes: lane 4g + t gets columns 2g and 2g + 1 of keys 2t and 2t + 1. ldmatrix_x4_trans
    // gives, of 32 columns: keys 0-7 and 8-15 of columns 0-15, then of columns 16-31.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t address = values + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      uint32_t weights[kRowTiles][4];
      pack_weights(weights, p, step);
#pragma unroll
      for (int group = 0; group < kColumnTiles / 4; ++group) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, Rows::moved(address, 16 * step, 2 * group));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const TwoPairs first = decode_even_and_odd<Stored, kIsE5m2>(v[2 * half]);
          const TwoPairs last = decode_even_and_odd<Stored, kIsE5m2>(v[2 * half + 1]);
          const int column = 4 * group + 2 * half;
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            Element<T>::mma(output[tile][column], weights[tile], first.first, last.first);
            Element<T>::mma(output[tile][column + 1], weights[tile], first.second, last.second);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void accumulate_16_bit(Output& output, const Scores& p, uint32_t values) {
    // ldmatrix_x4_trans gives, of 16 columns: keys 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t address = values + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      uint32_t weights[kRowTiles][4];
      pack_weights(weights, p, step);
#pragma unroll
      for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, Rows::moved(address, 16 * step, 2 * pair));
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          Element<T>::mma(output[tile][2 * pair], weights[tile], v[0], v[1]);
          Element<T>::mma(output[tile][2 * pair + 1], weights[tile], v[2], v[3]);
        }
      }
    }
  }

  static __device__ __forceinline__ void accumulate_f32(Output& output, const Scores& p, uint32_t values) {
    // The sum over 8 keys may take them in any order: as column t of A counts key 2t, as column t + 4 key 2t + 1, which
    // are the columns of the accumulator that this lane holds. Tensor cores cut sums off where f32 would round them, so
    // each block of keys is summed from zero and added with rounding.
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t even = values + Rows::offset(2 * t, g / 4) + g % 4 * 4;
    const uint32_t odd = values + Rows::offset(2 * t + 1, g / 4) + g % 4 * 4;
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      float big[kRowTiles][4] = {}, small[kRowTiles][4] = {};
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        const uint32_t v0 = __float_as_uint(ptx::load_shared_f32(Rows::moved(even, 8 * block, 2 * column)));
        const uint32_t v1 = __float_as_uint(ptx::load_shared_f32(Rows::moved(odd, 8 * block, 2 * column)));
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          const float (&c)[4] = p[tile][block];
          const uint32_t weights[4] = {__float_as_uint(c[0]), __float_as_uint(c[2]), __float_as_uint(c[1]),
                                       __float_as_uint(c[3])};
          split_mma(big[tile], small[tile], weights, v0, v1);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][column][i] += big[tile][i] + small[tile][i];
      }
    }
  }
};

}  // namespace xa
