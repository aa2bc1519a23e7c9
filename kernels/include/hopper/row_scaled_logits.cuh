// The logits transform of kernels that convert Q: no soft cap and no ALiBi, and a factor per row.
#pragma once

#include "logits_transform.cuh"
#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// The softmax scale, q_scale, k_scale and the factor of a converted row as one factor per row, which is part of the
/// exponent if it is positive. Otherwise the largest score is not the largest logit, and `apply` multiplies the scores.
struct logits_row_scaled {
  const float* row_factors_;

  /// `row_factors`: as in logits_softcap_alibi.
  __device__ __forceinline__ logits_row_scaled(const AttentionParams&, const float* row_factors)
      : row_factors_(row_factors) {}
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t kv_head) {
    return logits_softcap_alibi::factor(params, kv_head);
  }
  /// Whether `apply` changes nothing for this tile. The factors of rows are positive.
  static __device__ __forceinline__ bool is_identity(const WorkTile& work) { return work.score_factor > 0.0f; }
  __device__ __forceinline__ float log2_unit() const { return 1.0f; }
  struct Rows {
    float factor[2];

    /// The factor from the scores after `apply` to logits in base 2.
    __device__ __forceinline__ float log2_unit(int half) const { return factor[half] > 0.0f ? factor[half] : 1.0f; }
  };
  template <typename Find>
  __device__ __forceinline__ Rows rows(const WorkTile& work, int32_t first_row, const Find&) const {
    Rows rows = {{work.score_factor, work.score_factor}};
    if (row_factors_ != nullptr) {
      first_row += threadIdx.x % 32 / 4;
      rows.factor[0] *= row_factors_[first_row];
      rows.factor[1] *= row_factors_[first_row + 8];
    }
    return rows;
  }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4], const Rows& rows, int32_t) const {
    if (rows.factor[0] > 0.0f) return;
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] *= rows.factor[i / 2];
    }
  }
};

}  // namespace xa::hopper
