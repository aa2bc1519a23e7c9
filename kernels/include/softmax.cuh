// The online softmax of a warp's rows, one block of keys after another, and the mask.
//
// A row's state is its maximum score so far, the sum of 2^(log2_unit * (score - max)) and the output O with the same
// weights. A block in which a row has no visible key leaves the row's state bitwise unchanged, so a row's result does
// not depend on the other rows of its tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "log2_units.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// Factor that rescales a state from maximum `max` to `largest`; exactly 1 if they are equal. Before the first visible
/// key both are -inf, whose difference would be NaN.
__device__ __forceinline__ float rescale_factor(float max, float largest, float log2_unit) {
  return largest == -INFINITY ? 1.0f : ptx::exp2_approx((max - largest) * log2_unit);
}

/// Whether a row's maximum has to be subtracted from its scores before they are scaled. Otherwise one multiply-add
/// computes the exponent, and its addend max * log2_unit is rounded: by 2^-18 at most up to 128. A maximum of -inf
/// needs neither.
__device__ __forceinline__ bool is_large_maximum(float max, float log2_unit) {
  return max != -INFINITY && fabsf(max * log2_unit) > 128.0f;
}

/// What a score, times log2_unit, is diminished by before the exponential.
__device__ __forceinline__ float exponent_base(float max, float log2_unit) {
  return max == -INFINITY || is_large_maximum(max, log2_unit) ? 0.0f : max * log2_unit;
}

/// The state of kRowTiles x kTileRows rows. Of each row tile lane 4g + t holds rows g and g + 8. Row tiles of 8 rows
/// have no row g + 8, and their output is transposed: of each 16 columns the lane holds columns 2g and 2g + 1 of rows
/// 2t and 2t + 1 (tile_math.cuh).
template <int kRowTiles, int kColumnTiles, int kTileRows_ = 16>
struct SoftmaxState {
  static constexpr int kTileRows = kTileRows_, kHalves = kTileRows / 8;
  float max[kRowTiles][kHalves];
  float sum[kRowTiles][kHalves];  // of this lane's columns; `finish` adds up the lanes
  float output[kRowTiles][kColumnTiles * kHalves / 2][4];

  __device__ __forceinline__ SoftmaxState() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      max[tile][0] = max[tile][kHalves - 1] = -INFINITY;
      sum[tile][0] = sum[tile][kHalves - 1] = 0.0f;
#pragma unroll
      for (int column = 0; column < kColumnTiles * kHalves / 2; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][column][i] = 0.0f;
      }
    }
  }

  /// Multiplies the output of the rows of each half by its factor.
  __device__ __forceinline__ void scale_output(int tile, const float (&factors)[2]) {
    constexpr int kColumns = kColumnTiles * kHalves / 2;
    if constexpr (kTileRows == 8) {
      const int32_t row = threadIdx.x % 4 * 2;
      const float of_rows[2] = {__shfl_sync(~0u, factors[0], 4 * row), __shfl_sync(~0u, factors[0], 4 * row + 4)};
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][column][i] *= of_rows[i % 2];
      }
    } else {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[tile][column][i] *= factors[i / 2];
      }
    }
  }

  /// Updates the state of one row tile with the scores of a block of keys, and turns these into P, the probabilities
  /// that are not yet normalised. Without `both_halves`, which is uniform across the warp, rows 8 to 15 are past the
  /// tile's last row and left out.
  template <int kKeyTiles>
  __device__ __forceinline__ void update(int tile, float (&scores)[kKeyTiles][4], float log2_unit,
                                         bool both_halves = true) {
    float rescale[2] = {1.0f, 1.0f}, shift[2] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half == 1 && !both_halves) break;
      float block_max = scores[0][2 * half];
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        block_max = fmaxf(block_max, fmaxf(scores[block][2 * half], scores[block][2 * half + 1]));
      }
      block_max = fmaxf(block_max, __shfl_xor_sync(~0u, block_max, 1));
      block_max = fmaxf(block_max, __shfl_xor_sync(~0u, block_max, 2));
      const float row_max = fmaxf(max[tile][half], block_max);
      rescale[half] = rescale_factor(max[tile][half], row_max, log2_unit);
      shift[half] = is_large_maximum(row_max, log2_unit) ? row_max : 0.0f;
      max[tile][half] = row_max;
    }
    // Skipped if no maximum rose and no score is shifted: the factors are then exactly 1 and the shifts 0.
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f || shift[0] != 0.0f || shift[1] != 0.0f)) {
      scale_output(tile, rescale);
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) scores[block][i] -= shift[i / 2];
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half == 1 && !both_halves) break;
      const float base = exponent_base(max[tile][half], log2_unit);
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

  /// Adds up the sums of a row's lanes. Call it once, after the last block.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        sum[tile][half] += __shfl_xor_sync(~0u, sum[tile][half], 1);
        sum[tile][half] += __shfl_xor_sync(~0u, sum[tile][half], 2);
      }
    }
  }
};

/// The result of a row's state: `factor` times its output O is the row of `out`.
struct RowResult {
  float factor;
  float lse;  // natural logarithm of the sum of exp(logit)
};

/// The result of a row's state, be it one warp's or merged from the states of disjoint keys. Scores, and `max` with
/// them, times `log2_unit` are logits in base 2. `sink` is the logit of one more column, whose value is 0; -inf for
/// none. A row without a visible key has sum 0 and gets 0 and the sink. A NaN stays a NaN. Every operation is explicit
/// (no contraction by the compiler), so all kernels compute the same bits.
__device__ __forceinline__ RowResult finish_row(float max, float sum, float log2_unit, float sink, float v_scale) {
  if (sum == 0.0f) return RowResult{0.0f, sink};
  const float row_max = __fmul_rn(max, log2_unit), sink_log2 = __fmul_rn(sink, kLog2E);
  const float largest = fmaxf(row_max, sink_log2);
  // Without a sink `weight` is exactly 1 and `total` exactly `sum`.
  const float weight = ptx::exp2_approx(row_max - largest);
  const float total = __fmaf_rn(sum, weight, ptx::exp2_approx(sink_log2 - largest));
  return RowResult{v_scale * weight / total, __fmaf_rn(largest, kLn2, logf(total))};
}

/// The keys of a block that each row of a row tile attends to, as bits of the lane's scores: bit 4 b + i is number i of
/// block b.
template <int kHalves>
struct VisibleKeys {
  uint32_t bits = 0;

  /// Of masked scores.
  template <int kBlocks>
  __device__ __forceinline__ void find(const float (&scores)[kBlocks][4]) {
    static_assert(kBlocks <= 8);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) bits |= uint32_t{scores[block][i] != -INFINITY} << (4 * block + i);
    }
  }
  __device__ __forceinline__ bool has(int block, int i, float) const { return (bits >> (4 * block + i) & 1) != 0; }
};

/// The same by probabilities, for prefill, which has no register for the bits: keys whose probability is not 0.
struct ProbableKeys {
  __device__ __forceinline__ bool has(int, int, float probability) const { return probability != 0.0f; }
};

/// Sets scores of masked keys to -inf: of a 16-row tile that starts at row `first_row` of `tile`, and of the block of
/// keys that starts at `first_key`.
template <int kKeyTiles>
__device__ __forceinline__ void apply_mask(float (&scores)[kKeyTiles][4], const AttentionParams& params,
                                           const QoTile& tile, int32_t first_row, int32_t first_key) {
  // Few blocks need a mask, so each row's visible keys are computed again here instead of being kept in registers.
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
