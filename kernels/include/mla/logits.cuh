// The logits transforms of multi-head latent attention, which has no ALiBi (logits_transform.cuh).
#pragma once

#include <cstdint>

#include "element.cuh"
#include "logits_transform.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::mla {

/// No transform: the softmax scale is part of the exponential.
using logits_none = xa::logits_none;

/// The scale of the cache, and a soft cap behind a branch that is uniform across the grid: scores become logits in
/// base 2.
struct logits_scaled {
  const AttentionParams& params_;

  __device__ __forceinline__ explicit logits_scaled(const AttentionParams& params) : params_(params) {}
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t kv_head) {
    return logits_softcap_alibi::factor(params, kv_head);
  }
  __device__ __forceinline__ float log2_unit() const { return 1.0f; }
  struct Rows {
    float factor;
  };
  __device__ __forceinline__ Rows rows(const WorkTile& work, int32_t) const { return {work.score_factor}; }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4], const Rows& rows, int32_t) const {
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] *= rows.factor;
    }
    const float cap = params_.softcap_log2;
    if (cap <= 0.0f) return;
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[block][i];
        score = cap * (Element<T>::kIs16Bit ? ptx::tanh_approx(score) : tanhf(score));
      }
    }
  }
};

}  // namespace xa::mla
