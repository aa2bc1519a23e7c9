// Weights of scores that a soft cap bends, or that a bias is added to.
#pragma once

#include <cmath>
#include <cstdint>

#include "params/attention.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// Of some scores of one head.
template <typename Shape>
class ModifiedWeights {
 public:
  /// `distance`: that of query and key of the first score; `slope`: that of the head.
  __device__ __forceinline__ ModifiedWeights(const AttentionParams& forward, int32_t distance, float slope)
      : factor_(forward.score_factor), cap_(forward.softcap_log2) {
    constexpr float kLog2E = 1.44269504088896341f;
    distance_ = static_cast<float>(distance);
    slope_ = -kLog2E * slope;
  }
  /// The weight of a score under the soft cap. In the score's place it leaves the weight times the derivative of its
  /// logit.
  __device__ __forceinline__ float bend(float& score, float lse) const {
    // 1 less tanh, within 2^-22. The tanh of the hardware is not enough: weights are relative to a sum that others have
    // computed.
    constexpr float kTwoLog2E = 2.88539008177792681f;
    const float raised = xa::ptx::exp2_approx(score * (factor_ * kTwoLog2E));
    const float rest = xa::ptx::reciprocal_approx(__fmaf_rn(raised, 0.5f, 0.5f));
    const float weight = xa::ptx::exp2_approx(__fmaf_rn(rest, -cap_, cap_ - lse));
    score = weight * rest * (2.0f - rest);
    return weight;
  }
  /// The weight with the bias of a score whose distance is the first one's and so much.
  __device__ __forceinline__ float add_bias(float score, float lse, int further) const {
    const float distance = fabsf(distance_ + static_cast<float>(further));
    return xa::ptx::exp2_approx(__fmaf_rn(score, factor_, __fmaf_rn(distance, slope_, -lse)));
  }

 private:
  float factor_, cap_, distance_, slope_;
};

}  // namespace xa::hopper
