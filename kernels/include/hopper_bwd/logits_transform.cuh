// Weights of scores that a soft cap bends, or that a bias is added to.
#pragma once

#include <cmath>
#include <cstdint>

#include "params/attention.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// By some scores of one head.
template <typename Shape>
class BackwardLogitsTransform {
 public:
  /// `distance`: that of query and key of the first score; `slope`: that of the head.
  __device__ __forceinline__ BackwardLogitsTransform(const AttentionParams& forward, int32_t distance, float slope)
      : factor_(forward.score_factor), cap_(forward.softcap_log2) {
    constexpr float kLog2E = 1.44269504088896341f;
    distance_ = static_cast<float>(distance);
    slope_ = -kLog2E * slope;
  }
  /// The weights under the soft cap of two scores of one query. In the scores' places it leaves the weights times the
  /// derivatives of their logits.
  ///
  /// Two, as one reciprocal, that of the product, serves both: the unit that makes exponentials and reciprocals is what
  /// takes longest. By one query, as NaN among its scores is in the lse of all of them.
  __device__ __forceinline__ void softcap(float& first, float& second, float lse, float& first_p,
                                          float& second_p) const {
    const float a = half_one_plus_exp(first), b = half_one_plus_exp(second);
    // u = 1 less tanh, within 2^-21. The tanh of the hardware is not enough: weights are relative to a sum that others
    // have computed. The derivative is u (2 - u), and 2 - u is u exp(2 x): 0 of a score of -inf, however u is rounded.
    const float reciprocal_of_both = xa::ptx::reciprocal_approx(a * b);
    const float first_u = reciprocal_of_both * b, second_u = reciprocal_of_both * a;
    first_p = xa::ptx::exp2_approx(__fmaf_rn(first_u, -cap_, cap_ - lse));
    second_p = xa::ptx::exp2_approx(__fmaf_rn(second_u, -cap_, cap_ - lse));
    first = first_p * first_u * (first_u * __fmaf_rn(a, 2.0f, -1.0f));
    second = second_p * second_u * (second_u * __fmaf_rn(b, 2.0f, -1.0f));
  }
  /// The weight with the bias of a score whose distance is the first one's and so much.
  __device__ __forceinline__ float alibi(float score, float lse, int further) const {
    const float distance = fabsf(distance_ + static_cast<float>(further));
    return xa::ptx::exp2_approx(__fmaf_rn(score, factor_, __fmaf_rn(distance, slope_, -lse)));
  }

 private:
  /// (1 + exp(2 x)) / 2 of a score's x, held down so that no product of two overflows; the tanh is then 1 but for
  /// 2^-59.
  __device__ __forceinline__ float half_one_plus_exp(float score) const {
    constexpr float kTwoLog2E = 2.88539008177792681f;
    return __fmaf_rn(xa::ptx::exp2_approx(fminf(score * (factor_ * kTwoLog2E), 60.0f)), 0.5f, 0.5f);
  }

  float factor_, cap_, distance_, slope_;
};

}  // namespace xa::hopper
