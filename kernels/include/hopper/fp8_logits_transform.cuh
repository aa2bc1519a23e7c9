// Logits transforms of the fp8 kernel: as logits_transform.cuh, with the factor of q and K's scales from the work tile.
#pragma once

#include "logits_transform.cuh"
#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// q_scale, k_scale and the softmax scale as one factor, which is part of the exponent where that is possible.
struct fp8_logits_scaled {
  /// Whether `apply` changes nothing for most tiles.
  static constexpr bool kUsuallyIdentity = true;

  __device__ __forceinline__ explicit fp8_logits_scaled(const AttentionParams&) {}
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t kv_head) {
    return logits_softcap_alibi::factor(params, kv_head);
  }
  /// Whether `apply` changes nothing for this tile. With a factor that is not positive the largest score is not the
  /// largest logit, so the factor cannot be part of the exponential.
  static __device__ __forceinline__ bool is_identity(const WorkTile& work) { return work.score_factor > 0.0f; }
  /// The factor from the scores after `apply` to logits in base 2.
  static __device__ __forceinline__ float log2_unit(const WorkTile& work) {
    return is_identity(work) ? work.score_factor : 1.0f;
  }
  struct Rows {
    float factor;
  };
  template <typename... Find>
  __device__ __forceinline__ Rows rows(const WorkTile& work, int32_t, const Find&...) const {
    return {work.score_factor};
  }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4], const Rows& rows, int32_t) const {
    if (rows.factor > 0.0f) return;
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] *= rows.factor;
    }
  }
};

/// Soft cap and ALiBi: `apply` turns the scores of every tile into logits in base 2.
struct fp8_logits_softcap_alibi : logits_softcap_alibi {
  static constexpr bool kUsuallyIdentity = false;

  using logits_softcap_alibi::logits_softcap_alibi;
  static __device__ __forceinline__ bool is_identity(const WorkTile&) { return true; }
  static __device__ __forceinline__ float log2_unit(const WorkTile&) { return 1.0f; }
};

}  // namespace xa::hopper
