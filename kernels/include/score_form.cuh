// From q . k to a score: what happens before the mask and the softmax.
#pragma once

#include "attention_params.cuh"
#include "element.cuh"
#include "ptx.cuh"

namespace xa {

/// Scores stay q . k; the scale is part of the exponential.
struct score_plain {
  const AttentionParams& params_;

  __device__ __forceinline__ explicit score_plain(const AttentionParams& params) : params_(params) {}
  /// Logits to base 2 are `log2_unit()` times what `apply` leaves.
  __device__ __forceinline__ float log2_unit() const { return params_.softmax_scale_log2; }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&)[kKeyTiles][4]) const {}
};

/// Scores become logits to base 2, with what the call asks for, each behind a branch that is the same for the CTA.
struct score_modified {
  const AttentionParams& params_;

  __device__ __forceinline__ explicit score_modified(const AttentionParams& params) : params_(params) {}
  __device__ __forceinline__ float log2_unit() const { return 1.0f; }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4]) const {
    if (params_.softcap_log2 > 0.0f) {
      for_each(scores, [&](float s) { return params_.softcap_log2 * tanh_of<T>(s * params_.softcap_into); });
    } else {
      for_each(scores, [&](float s) { return s * params_.softmax_scale_log2; });
    }
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
  static __device__ __forceinline__ void for_each(float (&scores)[kKeyTiles][4], const Function& function) {
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] = function(scores[block][i]);
    }
  }
};

}  // namespace xa
