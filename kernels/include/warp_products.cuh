// Matrix products of one warp with mma.sync on rows in shared memory, for 16-bit elements and f32.
//
// Fragments are those of mma.sync. In an accumulator c of 16 x 8, lane 4g + t holds row g in c[0], c[1] (columns 2t and
// 2t + 1) and row g + 8 in c[2], c[3]. For 16-bit elements, the packed accumulators of two adjacent blocks of 8 columns
// are operand A of the next product (FlashAttention's register layout of P).
//
// f32 is computed as three tf32 products, big*big + big*small + small*big, where x = big + small to 22 bits. A k-block
// of 8 floats has the bytes of one of 16 halves, so ldmatrix reads both alike; but ldmatrix cannot transpose floats, so
// B of `accumulate` is read with 32-bit loads. Tensor cores truncate their sums where f32 would round, so `accumulate`
// sums each block of P V from zero and adds it to the output with rounding.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"

namespace xa {

/// An f32 as the sum of two tf32 numbers.
struct SplitTf32 {
  uint32_t big;
  uint32_t small;
  __device__ __forceinline__ explicit SplitTf32(float x)
      : big(ptx::round_to_tf32(x)), small(ptx::round_to_tf32(x - __uint_as_float(big))) {}
};

template <int kTiles, int kBlocks>
__device__ __forceinline__ void clear(float (&x)[kTiles][kBlocks][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[tile][block][i] = 0.0f;
    }
  }
}

__device__ __forceinline__ void split_mma(float (&big)[4], float (&small)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
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

/// scores = A B^T with kTiles x 16 rows of A, whose fragments `a.get` returns, and 8 kBlocks rows of B at shared
/// address `b`, each `kSteps` k-blocks of 32 bytes wide. `kUnroll` is small for long rows of f32, because ptxas would
/// otherwise load more fragments ahead than there are registers for.
template <typename T, typename Rows, int kSteps, int kUnroll, typename Fragments, int kTiles, int kBlocks>
__device__ __forceinline__ void multiply_rows(float (&scores)[kTiles][kBlocks][4], const Fragments& a, uint32_t b) {
  // ldmatrix_x4 gives, of 16 rows of B: the k-block's first and second half of rows 0-7, then of rows 8-15.
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t from_b = b + Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  float corrections[kTiles][kBlocks][4];  // f32: sums of the products with small parts
  clear(scores);
  if constexpr (!Element<T>::kIs16Bit) clear(corrections);
#pragma unroll(kUnroll)
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a_fragments[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) a.get(a_fragments[tile], step, tile);
#pragma unroll
    for (int pair = 0; pair < kBlocks / 2; ++pair) {
      uint32_t b_fragments[4];
      ptx::ldmatrix_x4(b_fragments, Rows::moved(from_b, 16 * pair, 2 * step));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int block = 2 * pair + half;
          if constexpr (Element<T>::kIs16Bit) {
            Element<T>::mma(scores[tile][block], a_fragments[tile], b_fragments[2 * half], b_fragments[2 * half + 1]);
          } else {
            split_mma(scores[tile][block], corrections[tile][block], a_fragments[tile], b_fragments[2 * half],
                      b_fragments[2 * half + 1]);
          }
        }
      }
    }
  }
  if constexpr (!Element<T>::kIs16Bit) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][block][i] += corrections[tile][block][i];
      }
    }
  }
}

/// Operand A of `accumulate` (P or dS) from the accumulators of the warp that has computed it. SharedOperand
/// (bwd/products.cuh) is the same in shared memory.
template <typename T, int kTiles, int kBlocks>
struct RegisterOperand {
  const float (&accumulators)[kTiles][kBlocks][4];

  /// Columns of A, and so rows of B.
  static constexpr int kRows = 8 * kBlocks;
  /// f32: columns t and t + 4 of the instruction's A are rows kFirst t and kFirst t + kSecond of B's k-block. The order
  /// within a k-block does not matter, and these are the columns that a lane's accumulators hold.
  static constexpr int kFirst = 2, kSecond = 1;

  __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
    if constexpr (Element<T>::kIs16Bit) {
      const float (&left)[4] = accumulators[tile][2 * step], (&right)[4] = accumulators[tile][2 * step + 1];
      fragment[0] = Element<T>::pack(left[0], left[1]);
      fragment[1] = Element<T>::pack(left[2], left[3]);
      fragment[2] = Element<T>::pack(right[0], right[1]);
      fragment[3] = Element<T>::pack(right[2], right[3]);
    } else {
      const float (&c)[4] = accumulators[tile][step];
      fragment[0] = __float_as_uint(c[0]);
      fragment[1] = __float_as_uint(c[2]);
      fragment[2] = __float_as_uint(c[1]);
      fragment[3] = __float_as_uint(c[3]);
    }
  }
};

/// The same of 16 bits, packed: half as many registers.
template <typename T, int kTiles, int kBlocks>
struct PackedOperand {
  uint32_t pairs[kTiles][kBlocks][2];

  static constexpr int kRows = 8 * kBlocks;

  __device__ __forceinline__ void set(int tile, const float (&accumulators)[kBlocks][4]) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float (&c)[4] = accumulators[block];
      pairs[tile][block][0] = Element<T>::pack(c[0], c[1]);
      pairs[tile][block][1] = Element<T>::pack(c[2], c[3]);
    }
  }
  __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = pairs[tile][2 * step + i / 2][i % 2];
  }
};

/// What `accumulate` does between its parts unless told otherwise.
struct DoNothing {
  __device__ __forceinline__ void operator()(int, int) const {}
};

/// output += A B, with B's rows at shared address `b`, from byte 16 `first_chunk` of each row on. Calls `between(i, n)`
/// after part i of n.
template <typename T, typename Rows, typename OperandA, int kTiles, int kColumnTiles, typename Between = DoNothing>
__device__ __forceinline__ void accumulate(float (&output)[kTiles][kColumnTiles][4], const OperandA& a, uint32_t b,
                                           int32_t first_chunk, const Between& between = {}) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (Element<T>::kIs16Bit) {
    // ldmatrix_x4_trans gives, of 16 columns: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    const uint32_t from = b + Rows::offset(lane % 16, first_chunk + lane / 16);
#pragma unroll
    for (int step = 0; step < OperandA::kRows / 16; ++step) {
      uint32_t a_fragments[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) a.get(a_fragments[tile], tile, step);
#pragma unroll
      for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
        uint32_t b_fragments[4];
        ptx::ldmatrix_x4_trans(b_fragments, Rows::moved(from, 16 * step, 2 * pair));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          Element<T>::mma(output[tile][2 * pair], a_fragments[tile], b_fragments[0], b_fragments[1]);
          Element<T>::mma(output[tile][2 * pair + 1], a_fragments[tile], b_fragments[2], b_fragments[3]);
        }
      }
      between(step, OperandA::kRows / 16);
    }
  } else {
    const uint32_t g = lane / 4, t = lane % 4;
    const uint32_t first = b + Rows::offset(OperandA::kFirst * t, first_chunk + g / 4) + g % 4 * 4;
    const uint32_t second = b + Rows::offset(OperandA::kFirst * t + OperandA::kSecond, first_chunk + g / 4) + g % 4 * 4;
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      float big[kTiles][1][4], small[kTiles][1][4];
      clear(big);
      clear(small);
#pragma unroll
      for (int step = 0; step < OperandA::kRows / 8; ++step) {
        const uint32_t b0 = __float_as_uint(ptx::load_shared_f32(Rows::moved(first, 8 * step, 2 * column)));
        const uint32_t b1 = __float_as_uint(ptx::load_shared_f32(Rows::moved(second, 8 * step, 2 * column)));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t a_fragments[4];
          a.get(a_fragments, tile, step);
          split_mma(big[tile][0], small[tile][0], a_fragments, b0, b1);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][column][i] += big[tile][0][i] + small[tile][0][i];
      }
      between(column, kColumnTiles);
    }
  }
}

}  // namespace xa
