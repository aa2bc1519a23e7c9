// From products to weights: q . k becomes p, and dout . v becomes the gradient of the score, ds, without the scale of
// q . k, by which sums are multiplied at the end.
#pragma once

#include <cmath>
#include <cstdint>

#include "bwd/pass.cuh"
#include "bwd/ptx_extra.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"
#include "ptx.cuh"

namespace xa {

/// Scores are q . k but for the scale.
struct weights_plain {
  static constexpr bool kPlaces = false;  // whether rows' positions and slopes are wanted
  float scale_log2;

  __device__ __forceinline__ explicit weights_plain(const AttentionParams& params)
      : scale_log2(params.softmax_scale_log2) {}
  template <typename T>
  __device__ __forceinline__ void weigh(float& score, float& gradient, const QueryRow& row, int32_t) const {
    score = ptx::exp2_approx(__fmaf_rn(score, scale_log2, row.negative_lse));
    gradient = score * (gradient - row.delta);
  }
};

/// With a soft cap and a bias, each behind a branch that is the same for the CTA.
struct weights_modified {
  static constexpr bool kPlaces = true;
  const AttentionParams& params_;

  __device__ __forceinline__ explicit weights_modified(const AttentionParams& params) : params_(params) {}
  template <typename T>
  __device__ __forceinline__ void weigh(float& score, float& gradient, const QueryRow& row, int32_t key) const {
    float logit = score * params_.score_factor, slope = 1.0f;
    if (params_.softcap_log2 > 0.0f) {
      const float bent = tanh_of<T>(logit);
      logit = params_.softcap_log2 * bent;
      slope = 1.0f - bent * bent;
    }
    if (params_.alibi_slopes != nullptr) logit += row.negative_slope * distance(row.position, key);
    score = ptx::exp2_approx(logit + row.negative_lse);
    gradient = score * (gradient - row.delta) * slope;
  }

 private:
  /// Within 2^-22. The tanh of the hardware is not enough: weights are relative to a sum that others have computed.
  template <typename T>
  static __device__ __forceinline__ float tanh_of(float x) {
    constexpr float kTwoLog2E = 2.88539008177792681f;
    if constexpr (Element<T>::kIs16Bit) {
      return 1.0f - 2.0f * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * kTwoLog2E));
    } else {
      return tanhf(x);
    }
  }
  /// |a - b|, which may be more than a signed number holds.
  static __device__ __forceinline__ float distance(int32_t a, int32_t b) {
    const uint32_t difference = static_cast<uint32_t>(a) - static_cast<uint32_t>(b);
    return static_cast<float>(a >= b ? difference : 0u - difference);
  }
};

/// Makes weights of a warp's products `score` and `gradient`, of rows held and columns from `first_column` on, streamed
/// rows counted as in Pass. Without `kMasked` every row has all columns; else `span_of` tells those of one of the
/// warp's.
///
/// `queries` are those of the columns where keys are held, and `first_key` is then the key of the warp's first row;
/// else those of the warp's rows.
template <typename T, bool kHoldsKeys, bool kMasked, typename Weights, typename SpanOf, int kTiles, int kBlocks>
__device__ __forceinline__ void weigh(float (&score)[kTiles][kBlocks][4], float (&gradient)[kTiles][kBlocks][4],
                                      const Weights& weights, const QueryRow* queries, const SpanOf& span_of,
                                      int32_t first_column, int32_t first_key) {
  // Derived again here where registers are dearest.
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
  const auto one = [&](int tile, int block, int i, const QueryRow& row, const Span& span) {
    const int32_t column = first_column + 8 * block + 2 * t + i % 2;
    const int32_t key = kHoldsKeys ? first_key + 16 * tile + 8 * (i / 2) + g : column;
    float &p = score[tile][block][i], &ds = gradient[tile][block][i];
    weights.template weigh<T>(p, ds, row, key);
    if constexpr (kMasked) {
      // By selection: what is hidden may be NaN.
      const bool hidden = static_cast<uint32_t>(column - span.begin) >= static_cast<uint32_t>(span.end - span.begin);
      p = hidden ? 0.0f : p;
      ds = hidden ? 0.0f : ds;
    }
  };
  if constexpr (kHoldsKeys) {
    Span of_rows[kTiles][2] = {};
    if constexpr (kMasked) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        of_rows[tile][0] = span_of(16 * tile + g);
        of_rows[tile][1] = span_of(16 * tile + 8 + g);
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const QueryRow row = queries[8 * block + 2 * t + side];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          one(tile, block, side, row, of_rows[tile][0]);
          one(tile, block, 2 + side, row, of_rows[tile][1]);
        }
      }
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const QueryRow row = queries[16 * tile + 8 * half + g];
        Span span = {};
        if constexpr (kMasked) span = span_of(row);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          one(tile, block, 2 * half, row, span);
          one(tile, block, 2 * half + 1, row, span);
        }
      }
    }
  }
}

}  // namespace xa
