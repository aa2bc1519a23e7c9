// From q . k to a score: what happens before the mask and the softmax.
#pragma once

#include "element.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "scales.cuh"
#include "work_tile.cuh"

namespace xa {

/// Scores stay q . k; the scale is part of the exponential.
struct logits_none {
  const AttentionParams& params_;

  __device__ __forceinline__ explicit logits_none(const AttentionParams& params, const float* = nullptr)
      : params_(params) {}
  /// WorkTile::score_factor
  static __device__ __forceinline__ float factor(const AttentionParams&, int32_t) { return 1.0f; }
  /// Logits to base 2 are `log2_unit()` times what `apply` leaves.
  __device__ __forceinline__ float log2_unit() const { return params_.softmax_scale_log2; }
  /// To a 16-row tile that starts at row `first_row` of the plan's tile, and a block of keys from `first_key` on.
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&)[kKeyTiles][4], const WorkTile&, int32_t, int32_t) const {}
};

/// Scores become logits to base 2, with what the call asks for, each behind a branch that is the same for the CTA.
struct logits_softcap_alibi {
  const AttentionParams& params_;
  const float* row_factors_;

  /// `row_factors`, if any: what the scores of the tile's rows are multiplied by first.
  __device__ __forceinline__ explicit logits_softcap_alibi(const AttentionParams& params,
                                                           const float* row_factors = nullptr)
      : params_(params), row_factors_(row_factors) {}
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t kv_head) {
    return params.score_factor * scale_of(params.q_scale, kv_head) * scale_of(params.k_scale, kv_head);
  }
  __device__ __forceinline__ float log2_unit() const { return 1.0f; }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4], const WorkTile& plan, int32_t first_row,
                                        int32_t first_key) const {
    float factors[2] = {plan.score_factor, plan.score_factor};
    if (row_factors_ != nullptr) {
      const int32_t row = first_row + threadIdx.x % 32 / 4;
      factors[0] *= row_factors_[row];
      factors[1] *= row_factors_[row + 8];
    }
    if (params_.softcap_log2 > 0.0f) {
      for_each(scores, factors, [&](float s) { return params_.softcap_log2 * tanh_of<T>(s); });
    } else {
      for_each(scores, factors, [&](float s) { return s; });
    }
    if (params_.alibi_slopes != nullptr) add_alibi(scores, plan, first_row, first_key);
  }

 private:
  template <typename T>
  static __device__ __forceinline__ float tanh_of(float x) {
    if constexpr (Element<T>::kIs16Bit) {
      return ptx::tanh_approx(x);
    } else {
      return tanhf(x);
    }
  }

  template <int kKeyTiles, typename Function>
  static __device__ __forceinline__ void for_each(float (&scores)[kKeyTiles][4], const float (&factors)[2],
                                                  const Function& function) {
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] = function(scores[block][i] * factors[i / 2]);
    }
  }

  /// -slope * |query's position - key|, the slope that of the row's head.
  template <int kKeyTiles>
  __device__ __forceinline__ void add_alibi(float (&scores)[kKeyTiles][4], const WorkTile& plan, int32_t first_row,
                                            int32_t first_key) const {
    constexpr float kLog2E = 1.44269504088896341f;
    // As for the mask, derived again in each block, not kept in registers.
    const RowMap map(params_, plan.tile, plan.kv_head);
    const float* const slopes = params_.alibi_slopes + plan.tile.sequence * params_.alibi_stride;
    const int32_t shift = Visibility(params_, plan.tile).shift;
    const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row + 8 * half + threadIdx.x % 32 / 4;
      const int32_t position = map.rows.query(row) + shift;
      const float slope = -kLog2E * __ldg(slopes + map.head(row));
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scores[block][2 * half + i] += slope * distance(position, first_column + 8 * block + i);
        }
      }
    }
  }

  /// |a - b|, which may be more than a signed number holds.
  static __device__ __forceinline__ float distance(int32_t a, int32_t b) {
    const uint32_t difference = static_cast<uint32_t>(a) - static_cast<uint32_t>(b);
    return static_cast<float>(a >= b ? difference : 0u - difference);
  }
};

}  // namespace xa
