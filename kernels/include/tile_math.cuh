// The two products of attention for one warp, S = Q K^T and O += P V, on rows in shared memory.
//
// fp8 and int8 rows stay bytes in shared memory and are converted to f16 operands B in registers. ldmatrix gives lane t
// of a row a 32-bit register with columns 4t to 4t + 3 of a k-block of 16. The instruction expects columns 2t, 2t + 1,
// 2t + 8 and 2t + 9 there. The sum over columns may take them in any order, so Q is stored with its columns permuted to
// match:
//
//     instruction's columns   0 1 | 2 3 | 4 5 | 6 7  ||  8 9 | 10 11 | 12 13 | 14 15
//     columns of Q and K      0 1 | 4 5 | 8 9 |12 13 ||  2 3 |  6  7 | 10 11 | 14 15
//
// In the product with V, of each two adjacent accumulators of 8 columns the first holds the even and the second the odd
// ones of 16 columns of O.
//
// Row tiles of 8 rows are for 8-bit V. Q K^T leaves row g of P in lanes 4g to 4g + 3, which is where operand B of
// O^T = V^T P^T has column g. So half as many instructions accumulate O, in half of the registers. Operand A of Q K^T
// has these rows twice.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "fp8.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "warp_products.cuh"

namespace xa {

/// Fragments of kColumns columns of a warp's rows of Q: kept in registers (kInRegisters), or read from shared memory
/// for each block of keys. Row tiles of 8 rows fill fragments by having each row twice.
template <int kRowTiles, int kHeadDim, int kBytes, bool kInRegisters, int kColumns = kHeadDim, int kTileRows = 16>
class QueryFragments {
  static constexpr int kPitch = kHeadDim * kBytes + 16;
  static constexpr int kSteps = kColumns * kBytes / 32;
  uint32_t address_;
  uint32_t held_[kInRegisters ? kSteps : 1][kInRegisters ? kRowTiles : 1][4];

 public:
  /// `rows` is the shared address of the warp's first row, at its first column.
  __device__ __forceinline__ explicit QueryFragments(uint32_t rows, uint32_t lane = threadIdx.x % 32) {
    address_ = rows + lane % kTileRows * kPitch + lane / 16 * 16;
  }

  /// Reads the fragments to keep. Call it when the rows are in shared memory.
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

/// The products for kRowTiles x kTileRows rows of Q of type T, kKeys keys of type Stored and kHeadDim columns. K and V
/// lie in shared memory in the layout `Rows` (shared_rows.cuh).
template <typename T, typename Stored, typename Rows, int kRowTiles, int kKeys, int kHeadDim, int kTileRows = 16>
struct TileMath {
  static constexpr bool kIsFp8 = sizeof(Stored) == 1;
  static constexpr int kSteps = kHeadDim * static_cast<int>(sizeof(T)) / 32;  // k-blocks of 16 halves or 8 floats
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kColumnTiles = kHeadDim / 8;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Output = float[kRowTiles][kColumnTiles * kTileRows / 16][4];
  static_assert(kKeys % (kIsFp8 && kKeys > 16 ? 32 : 16) == 0 && kHeadDim % 32 == 0);
  static_assert(kTileRows == 16 || (kTileRows == 8 && kRowTiles == 1 && kIsFp8));

  /// scores = Q K^T, with K's first row at shared address `keys`.
  template <typename Query>
  static __device__ __forceinline__ void scores(Scores& scores, const Query& query, uint32_t keys,
                                                const AttentionParams& params) {
    if constexpr (kIsFp8) {
      if (!kHasTokenScales<Stored> && params.kv_is_e5m2 != 0) return scores_of_fp8<true>(scores, query, keys);
      return scores_of_fp8<false>(scores, query, keys);
    }
    multiply_rows<T, Rows, kSteps, kSteps <= 16 ? 8 : 2>(scores, query, keys);
  }

  /// output += P V, with P in accumulators and V's first row at shared address `values`. `between` is for 16 bits and
  /// f32 (warp_products.cuh).
  template <typename Between = DoNothing>
  static __device__ __forceinline__ void accumulate(Output& output, const Scores& p, uint32_t values,
                                                    const AttentionParams& params, const Between& between = {}) {
    const RegisterOperand<T, kRowTiles, kKeyTiles> operand{p};
    if constexpr (kIsFp8) {
      accumulate_8_bits(output, operand, values, params);
    } else {
      xa::accumulate<T, Rows>(output, operand, values, 0, between);
    }
  }
  /// The same of 16 bits, with P as an operand A.
  template <typename Between = DoNothing>
  static __device__ __forceinline__ void accumulate(Output& output, const PackedOperand<T, kRowTiles, kKeyTiles>& p,
                                                    uint32_t values, const AttentionParams&,
                                                    const Between& between = {}) {
    xa::accumulate<T, Rows>(output, p, values, 0, between);
  }
  /// The same of 8-bit V, with P as an operand A of `accumulate` (warp_products.cuh).
  template <typename OperandA>
  static __device__ __forceinline__ void accumulate_8_bits(Output& output, const OperandA& p, uint32_t values,
                                                           const AttentionParams& params) {
    if (!kHasTokenScales<Stored> && params.kv_is_e5m2 != 0) return accumulate_fp8<true>(output, p, values);
    accumulate_fp8<false>(output, p, values);
  }

 private:
  template <bool kIsE5m2, typename Query>
  static __device__ __forceinline__ void scores_of_fp8(Scores& scores, const Query& query, uint32_t keys) {
    // 16 bytes of a row are a k-block. One ldmatrix_x4 reads a k-block of 32 keys, or two k-blocks if kKeys is 16.
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

  template <bool kIsE5m2, typename OperandA>
  static __device__ __forceinline__ void accumulate_fp8(Output& output, const OperandA& p, uint32_t values) {
    // ldmatrix transposes 16-bit elements, here pairs of bytes: lane 4g + t gets columns 2g and 2g + 1 of keys 2t and
    // 2t + 1. The four matrices are keys 0-7 and 8-15 of columns 0-15, then of columns 16-31.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t address = values + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      uint32_t probabilities[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) p.get(probabilities[tile], tile, step);
#pragma unroll
      for (int group = 0; group < kColumnTiles / 4; ++group) {
        uint32_t v[4];
        ptx::ldmatrix_x4_trans(v, Rows::moved(address, 16 * step, 2 * group));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const TwoPairs first = decode_even_and_odd<Stored, kIsE5m2>(v[2 * half]);
          const TwoPairs last = decode_even_and_odd<Stored, kIsE5m2>(v[2 * half + 1]);
          const int column = 4 * group + 2 * half;
          if constexpr (kTileRows == 8) {
            const uint32_t columns[4] = {first.first, first.second, last.first, last.second};
            Element<T>::mma(output[0][column / 2], columns, probabilities[0][0], probabilities[0][2]);
          } else {
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
              Element<T>::mma(output[tile][column], probabilities[tile], first.first, last.first);
              Element<T>::mma(output[tile][column + 1], probabilities[tile], first.second, last.second);
            }
          }
        }
      }
    }
  }
};

}  // namespace xa
