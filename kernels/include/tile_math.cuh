// The two products of attention for a warp, S = Q K^T and O += P V, on rows in shared memory.
//
// Fragments are those of mma.sync. In an accumulator c of 16 x 8, lane 4g + t holds row g in c[0], c[1] (columns 2t and
// 2t + 1) and row g + 8 in c[2], c[3]. For 16-bit P the accumulators of two neighbouring blocks of 8 keys are the
// operand A of P V as they are, once packed.
//
// f32 runs as three tf32 products, big*big + big*small + small*big, where x = big + small to 22 bits. A k-block of 8
// f32 has the bytes of one of 16 halves, so Q and K are read alike; V cannot be transposed by ldmatrix and is read by
// words.
#pragma once

#include <cstdint>

#include "element.cuh"
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

/// The products for kRowTiles x 16 rows of Q, kKeys keys and kHeadDim columns.
template <typename T, int kRowTiles, int kKeys, int kHeadDim>
struct TileMath {
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static constexpr int kPitch = kHeadDim * kBytes + 16;
  static constexpr int kSteps = kHeadDim * kBytes / 32;  // k-blocks of S: 16 halves or 8 floats
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kColumnTiles = kHeadDim / 8;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Output = float[kRowTiles][kColumnTiles][4];
  static_assert(kKeys % 16 == 0 && kHeadDim % 16 == 0);

  /// scores = Q K^T, with K's first row at shared address `keys`.
  template <typename Query>
  static __device__ __forceinline__ void scores(Scores& scores, const Query& query, uint32_t keys) {
    // ldmatrix_x4 gives, of 16 keys: the k-block's first and second half of keys 0-7, then of keys 8-15.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t address = keys + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
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
        ptx::ldmatrix_x4(k, address + pair * 16 * kPitch + step * 32);
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
  static __device__ __forceinline__ void accumulate(Output& output, const Scores& p, uint32_t values) {
    if constexpr (Element<T>::kIs16Bit) {
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

  static __device__ __forceinline__ void accumulate_16_bit(Output& output, const Scores& p, uint32_t values) {
    // ldmatrix_x4_trans gives, of 16 columns: keys 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t address = values + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      uint32_t weights[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const float (&left)[4] = p[tile][2 * step], (&right)[4] = p[tile][2 * step + 1];
        weights[tile][0] = Element<T>::pack(left[0], left[1]);
        weights[tile][1] = Element<T>::pack(left[2], left[3]);
        weights[tile][2] = Element<T>::pack(right[0], right[1]);
        weights[tile][3] = Element<T>::pack(right[2], right[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, address + step * 16 * kPitch + pair * 32);
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
    const uint32_t address = values + 2 * t * kPitch + g * 4;
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      float big[kRowTiles][4] = {}, small[kRowTiles][4] = {};
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        const uint32_t row = address + block * 8 * kPitch + column * 32;
        const uint32_t v0 = __float_as_uint(ptx::load_shared_f32(row));
        const uint32_t v1 = __float_as_uint(ptx::load_shared_f32(row + kPitch));
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
