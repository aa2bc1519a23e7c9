// The softmax of a warp's rows, one block of keys after another, and the mask.
//
// A row's state is its largest score so far, the sum of 2^(log2_unit * (score - max)) and the output weighted alike. A
// block in which nothing of a row is visible leaves that row's state as it was, bit for bit; so a row's result does not
// depend on the rows beside it.
#pragma once

#include <cmath>
#include <cstdint>

#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// Two rows a lane in each 16-row tile: 4g + t holds rows g and g + 8.
template <int kRowTiles, int kColumnTiles>
struct SoftmaxState {
  float max[kRowTiles][2];
  float sum[kRowTiles][2];  // this lane's columns only, until `finish`
  float output[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ SoftmaxState() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      max[tile][0] = max[tile][1] = -INFINITY;
      sum[tile][0] = sum[tile][1] = 0.0f;
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][column][i] = 0.0f;
      }
    }
  }

  /// Takes up the scores of one 16-row tile and a block of keys, and turns them into the weights of V's rows. Without
  /// `both_halves`, the same for the warp, rows 8 to 15 are nobody's and what becomes of them does not matter.
  template <int kKeyTiles>
  __device__ __forceinline__ void absorb(int tile, float (&scores)[kKeyTiles][4], float log2_unit,
                                         bool both_halves = true) {
    float rescale[2] = {1.0f, 1.0f}, shift[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !both_halves) break;
      float block_max = scores[0][2 * half];
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        block_max = fmaxf(block_max, fmaxf(scores[block][2 * half], scores[block][2 * half + 1]));
      }
      block_max = fmaxf(block_max, __shfl_xor_sync(~0u, block_max, 1));
      block_max = fmaxf(block_max, __shfl_xor_sync(~0u, block_max, 2));
      const float row_max = fmaxf(max[tile][half], block_max);
      rescale[half] = weight(max[tile][half], row_max, log2_unit);
      shift[half] = is_large(row_max, log2_unit) ? row_max : 0.0f;
      max[tile][half] = row_max;
    }
    // Where no row's maximum rose the factors are exactly 1; a shift of 0 changes nothing either.
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f || shift[0] != 0.0f || shift[1] != 0.0f)) {
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][column][i] *= rescale[i / 2];
      }
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[block][i] -= shift[i / 2];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !both_halves) break;
      const float row_max = max[tile][half];
      const float base = row_max == -INFINITY || is_large(row_max, log2_unit) ? 0.0f : row_max * log2_unit;
      float block_sum = 0.0f;
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[block][i] = ptx::exp2_approx(scores[block][i] * log2_unit - base);
          block_sum += scores[block][i];
        }
      }
      sum[tile][half] = sum[tile][half] * rescale[half] + block_sum;
    }
  }

  /// Adds up the lanes' sums; call once, after the last block.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[tile][half] += __shfl_xor_sync(~0u, sum[tile][half], 1);
        sum[tile][half] += __shfl_xor_sync(~0u, sum[tile][half], 2);
      }
    }
  }

  /// What a state at `max` counts for beside one at `largest`; exactly 1 where they are equal. Where nothing has been
  /// seen yet both are -inf, whose difference would be NaN.
  static __device__ __forceinline__ float weight(float max, float largest, float log2_unit) {
    return largest == -INFINITY ? 1.0f : ptx::exp2_approx((max - largest) * log2_unit);
  }

 private:
  /// One multiply-add makes an exponent where rounding its addend is harmless: up to 128 it is off by 2^-18 at most.
  /// Past that the largest score is taken off first. A row that has seen nothing needs neither.
  static __device__ __forceinline__ bool is_large(float max, float log2_unit) {
    return max != -INFINITY && fabsf(max * log2_unit) > 128.0f;
  }
};

/// What a row's state comes to: `factor` times its output is the row of `out`.
struct RowResult {
  float factor;
  float lse;  // natural logarithm of the sum of exp(logit)
};

/// From a row's state, whether of one warp or merged from the states of disjoint keys. Logits to base 2 are `log2_unit`
/// times the scores that `max` is one of. `sink` is the logit of one more column, whose value is 0; -inf for none. A
/// row without a visible key has sum 0. A NaN stays one. The arithmetic is spelled out, so that every kernel gets the
/// same bits.
__device__ __forceinline__ RowResult finish_row(float max, float sum, float log2_unit, float sink, float v_scale) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
  if (sum == 0.0f) return RowResult{0.0f, sink};
  const float row_max = __fmul_rn(max, log2_unit), sink_log2 = __fmul_rn(sink, kLog2E);
  const float largest = fmaxf(row_max, sink_log2);
  // Exactly 1 and `sum` without a sink.
  const float weight = ptx::exp2_approx(row_max - largest);
  const float total = __fmaf_rn(sum, weight, ptx::exp2_approx(sink_log2 - largest));
  return RowResult{v_scale * weight / total, __fmaf_rn(largest, kLn2, logf(total))};
}

/// Hides from each row of a 16-row tile the keys that it does not see, in a block that starts at key `first_key`. The
/// 16-row tile starts at row `first_row` of `tile`.
template <int kKeyTiles>
__device__ __forceinline__ void apply_mask(float (&scores)[kKeyTiles][4], const AttentionParams& params,
                                           const QoTile& tile, int32_t first_row, int32_t first_key) {
  // Few blocks need a mask: what each row sees is derived here again, not kept in registers for all of them.
  const Visibility visibility(params, tile);
  const PackedRows rows(params, tile.first_row);
  const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t query = rows.query(first_row + 8 * half + threadIdx.x % 32 / 4);
    const int32_t begin = visibility.begin(query), end = visibility.end(query);
    const uint32_t length = max(end - begin, 0);
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t from_begin = first_column + 8 * block + i - begin;
        if (from_begin >= length) scores[block][2 * half + i] = -INFINITY;
      }
    }
  }
}

}  // namespace xa
