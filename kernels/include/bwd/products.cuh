// The products of the gradients for a warp, on rows in shared memory. Fragments are as in tile_math.cuh, which explains
// them: weights are the operand A of the next product as they come out of the last one.
//
// f32 runs as three tf32 products. What a block of them adds to a gradient is summed from zero, because tensor cores
// cut sums off where f32 would round them.
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "element.cuh"
#include "ptx.cuh"
#include "tile_math.cuh"

namespace xa {

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

/// scores = A B^T, both `kSteps` k-blocks of 32 bytes wide: of kTiles x 16 rows at shared address `a` and 8 kBlocks
/// rows at `b`.
template <typename T, typename Rows, int kSteps, int kTiles, int kBlocks>
__device__ __forceinline__ void multiply_rows(float (&scores)[kTiles][kBlocks][4], uint32_t a, uint32_t b) {
  // ldmatrix_x4 gives, of 16 rows of B: the k-block's first and second half of rows 0-7, then of rows 8-15.
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t from_a = a + Rows::offset(lane % 16, lane / 16);
  const uint32_t from_b = b + Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  float corrections[kTiles][kBlocks][4];
  clear(scores);
  if constexpr (!Element<T>::kIs16Bit) clear(corrections);
  // Long rows of f32 are unrolled less, or ptxas fetches more fragments ahead than there are registers for.
#pragma unroll(Element<T>::kIs16Bit ? 16 : 2)
  for (int step = 0; step < kSteps; ++step) {
    uint32_t of_a[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) ptx::ldmatrix_x4(of_a[tile], Rows::moved(from_a, 16 * tile, 2 * step));
#pragma unroll
    for (int pair = 0; pair < kBlocks / 2; ++pair) {
      uint32_t of_b[4];
      ptx::ldmatrix_x4(of_b, Rows::moved(from_b, 16 * pair, 2 * step));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int block = 2 * pair + half;
          if constexpr (Element<T>::kIs16Bit) {
            Element<T>::mma(scores[tile][block], of_a[tile], of_b[2 * half], of_b[2 * half + 1]);
          } else {
            split_mma(scores[tile][block], corrections[tile][block], of_a[tile], of_b[2 * half], of_b[2 * half + 1]);
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

/// Weights of a warp's rows as operands A: where they were made.
template <typename T, int kTiles, int kBlocks>
struct OwnWeights {
  const float (&weights)[kTiles][kBlocks][4];

  /// Streamed rows that they are for.
  static constexpr int kRows = 8 * kBlocks;
  /// f32: the rows of a k-block that columns t and t + 4 of A count; the sum may take them in any order, and these are
  /// the ones that a lane's accumulators hold.
  static constexpr int kFirst = 2, kSecond = 1;
  /// Whether addresses may be kept from one product to the next.
  static constexpr bool kHasRegisters = true;

  __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
    if constexpr (Element<T>::kIs16Bit) {
      const float (&left)[4] = weights[tile][2 * step], (&right)[4] = weights[tile][2 * step + 1];
      fragment[0] = Element<T>::pack(left[0], left[1]);
      fragment[1] = Element<T>::pack(left[2], left[3]);
      fragment[2] = Element<T>::pack(right[0], right[1]);
      fragment[3] = Element<T>::pack(right[2], right[3]);
    } else {
      const float (&c)[4] = weights[tile][step];
      fragment[0] = __float_as_uint(c[0]);
      fragment[1] = __float_as_uint(c[2]);
      fragment[2] = __float_as_uint(c[1]);
      fragment[3] = __float_as_uint(c[3]);
    }
  }
};

/// Likewise out of shared memory, where the warps that share the rows have put them.
template <int kColumns, int kPitch>
struct SharedWeights {
  uint32_t address;

  static constexpr int kRows = kColumns;
  static constexpr int kFirst = 1, kSecond = 4;
  static constexpr bool kHasRegisters = false;

  /// `rows` is the shared address of the warp's first row.
  __device__ __forceinline__ explicit SharedWeights(uint32_t rows)
      : address(rows + threadIdx.x % 16 * kPitch + threadIdx.x % 32 / 16 * 16) {}
  __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
    ptx::ldmatrix_x4(fragment, address + 16 * tile * kPitch + 32 * step);
  }
};

/// Puts a warp's weights where the warps that share its rows find them: `to` is the warp's first row and column.
template <typename T, int kPitch, int kTiles, int kBlocks>
__device__ __forceinline__ void hand_over(uint8_t* to, const float (&weights)[kTiles][kBlocks][4]) {
  const int32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const row = reinterpret_cast<T*>(to + (16 * tile + 8 * half + g) * kPitch);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float (&x)[4] = weights[tile][block];
        store_columns(row + 8 * block + 2 * t, make_float2(x[2 * half], x[2 * half + 1]));
      }
    }
  }
}

/// gradient += weights B: B's rows at shared address `b`, from column `first_chunk` * 16 bytes on.
template <typename T, typename Rows, typename Weights, int kTiles, int kColumnTiles>
__device__ __forceinline__ void accumulate(float (&gradient)[kTiles][kColumnTiles][4], const Weights& weights,
                                           uint32_t b, int32_t first_chunk) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (Element<T>::kIs16Bit) {
    // ldmatrix_x4_trans gives, of 16 columns: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    const uint32_t from = b + Rows::offset(lane % 16, first_chunk + lane / 16);
#pragma unroll
    for (int step = 0; step < Weights::kRows / 16; ++step) {
      uint32_t of_a[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) weights.get(of_a[tile], tile, step);
#pragma unroll
      for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
        uint32_t of_b[4];
        ptx::ldmatrix_x4_trans(of_b, Rows::moved(from, 16 * step, 2 * pair));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          Element<T>::mma(gradient[tile][2 * pair], of_a[tile], of_b[0], of_b[1]);
          Element<T>::mma(gradient[tile][2 * pair + 1], of_a[tile], of_b[2], of_b[3]);
        }
      }
    }
  } else {
    const uint32_t g = lane / 4, t = lane % 4;
    const uint32_t first = b + Rows::offset(Weights::kFirst * t, first_chunk + g / 4) + g % 4 * 4;
    const uint32_t second = b + Rows::offset(Weights::kFirst * t + Weights::kSecond, first_chunk + g / 4) + g % 4 * 4;
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      float big[kTiles][1][4], small[kTiles][1][4];
      clear(big);
      clear(small);
#pragma unroll
      for (int step = 0; step < Weights::kRows / 8; ++step) {
        const uint32_t b0 = __float_as_uint(ptx::load_shared_f32(Rows::moved(first, 8 * step, 2 * column)));
        const uint32_t b1 = __float_as_uint(ptx::load_shared_f32(Rows::moved(second, 8 * step, 2 * column)));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t of_a[4];
          weights.get(of_a, tile, step);
          split_mma(big[tile][0], small[tile][0], of_a, b0, b1);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) gradient[tile][column][i] += big[tile][0][i] + small[tile][0][i];
      }
    }
  }
}

}  // namespace xa
