// Products of the backward kernels whose operand A lies in shared memory; the others are in warp_products.cuh.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"
#include "warp_products.cuh"

namespace xa {

/// scores = A B^T with kTiles x 16 rows of A at shared address `a` and 8 kBlocks rows of B at `b`, each `kSteps`
/// k-blocks of 32 bytes wide; with kAdds, scores += A B^T. The function of that name in warp_products.cuh takes A's
/// fragments from an object; used here, it makes ptxas allocate registers differently, and one variant spills.
template <typename T, typename Rows, int kSteps, bool kAdds = false, int kTiles, int kBlocks>
__device__ __forceinline__ void multiply_rows(float (&scores)[kTiles][kBlocks][4], uint32_t a, uint32_t b) {
  // ldmatrix_x4 gives, of 16 rows of B: the k-block's first and second half of rows 0-7, then of rows 8-15.
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t from_a = a + Rows::offset(lane % 16, lane / 16);
  const uint32_t from_b = b + Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  float corrections[kTiles][kBlocks][4];
  if constexpr (!kAdds) clear(scores);
  if constexpr (!Element<T>::kIs16Bit) clear(corrections);
  // f32 is unrolled less, because ptxas would otherwise load more fragments ahead than there are registers for.
#pragma unroll(Element<T>::kIs16Bit ? 16 : 2)
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a_fragments[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      ptx::ldmatrix_x4(a_fragments[tile], Rows::moved(from_a, 16 * tile, 2 * step));
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

/// Operand A of `accumulate` (P or dS) in shared memory, where the warps that share its rows have stored their columns
/// with `store_operand`: rows of kColumns elements, kPitch bytes apart.
template <int kColumns, int kPitch>
struct SharedOperand {
  uint32_t address;

  static constexpr int kRows = kColumns;
  static constexpr int kFirst = 1, kSecond = 4;

  /// `rows` is the shared address of the warp's first row.
  __device__ __forceinline__ explicit SharedOperand(uint32_t rows)
      : address(rows + threadIdx.x % 16 * kPitch + threadIdx.x % 32 / 16 * 16) {}
  __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
    ptx::ldmatrix_x4(fragment, address + 16 * tile * kPitch + 32 * step);
  }
};

/// Stores a warp's block of P or dS as T to shared memory for the warps that share its rows: `to` is the address of the
/// block's first row and column.
template <typename T, int kPitch, int kTiles, int kBlocks>
__device__ __forceinline__ void store_operand(uint8_t* to, const float (&block)[kTiles][kBlocks][4]) {
  const int32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const row = reinterpret_cast<T*>(to + (16 * tile + 8 * half + g) * kPitch);
#pragma unroll
      for (int column = 0; column < kBlocks; ++column) {
        const float (&x)[4] = block[tile][column];
        store_columns(row + 8 * column + 2 * t, make_float2(x[2 * half], x[2 * half + 1]));
      }
    }
  }
}

}  // namespace xa
