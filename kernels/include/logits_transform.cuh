// Logits transforms: what is applied to q . k before the mask and the softmax. A transform has
//
//   factor(params, kv_head)        WorkTile::score_factor of a KV head
//   apply(scores, work, row, key)  transforms the scores of 16 rows from row `row` of the work tile on, and of the
//                                  block of keys from `key` on
//   log2_unit()                    the factor from transformed scores to logits in base 2
#pragma once

#include "element.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "scales.cuh"
#include "work_tile.cuh"

namespace xa {

/// No transform: scores stay q . k. The softmax scale is part of the exponential.
struct logits_none {
  const AttentionParams& params_;

  __device__ __forceinline__ explicit logits_none(const AttentionParams& params, const float* = nullptr)
      : params_(params) {}
  static __device__ __forceinline__ float factor(const AttentionParams&, int32_t) { return 1.0f; }
  __device__ __forceinline__ float log2_unit() const { return params_.softmax_scale_log2; }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&)[kKeyTiles][4], const WorkTile&, int32_t, int32_t) const {}
};

/// Scales of q and K, soft cap and ALiBi: scores become logits in base 2. Soft cap and ALiBi are behind branches that
/// are uniform across the CTA.
struct logits_softcap_alibi {
  const AttentionParams& params_;
  const float* row_factors_;

  /// `row_factors`, if not null, are factors of the scores of each row of the tile, in shared memory (fp8:
  /// query_rows.cuh).
  __device__ __forceinline__ explicit logits_softcap_alibi(const AttentionParams& params,
                                                           const float* row_factors = nullptr)
      : params_(params), row_factors_(row_factors) {}
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t kv_head) {
    return params.score_factor * scale_of(params.q_scale, kv_head) * scale_of(params.k_scale, kv_head);
  }
  __device__ __forceinline__ float log2_unit() const { return 1.0f; }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4], const WorkTile& work, int32_t first_row,
                                        int32_t first_key) const {
    float factors[2] = {work.score_factor, work.score_factor};
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
    if (params_.alibi_slopes != nullptr) add_alibi(scores, work, first_row, first_key);
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

  /// Adds the ALiBi bias, -slope * |position of the query - key|, with the slope of the row's head.
  template <int kKeyTiles>
  __device__ __forceinline__ void add_alibi(float (&scores)[kKeyTiles][4], const WorkTile& work, int32_t first_row,
                                            int32_t first_key) const {
    constexpr float kLog2E = 1.44269504088896341f;
    // As in apply_mask, computed again in each block instead of being kept in registers.
    const RowMap map(params_, work.tile, work.kv_head);
    const float* const slopes = params_.alibi_slopes + work.tile.sequence * params_.alibi_stride;
    const int32_t shift = Visibility(params_, work.tile).shift;
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

  /// |a - b|, which may exceed the largest int32_t.
  static __device__ __forceinline__ float distance(int32_t a, int32_t b) {
    const uint32_t difference = static_cast<uint32_t>(a) - static_cast<uint32_t>(b);
    return static_cast<float>(a >= b ? difference : 0u - difference);
  }
};

}  // namespace xa
