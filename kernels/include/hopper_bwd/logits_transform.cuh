// Probabilities from scores under a soft cap, with ALiBi or with a bias.
#pragma once

#include <cmath>
#include <cstdint>

#include "hopper_bwd/pipeline.cuh"
#include "log2_units.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// The logits transform of some scores of one head.
template <typename Shape>
class BackwardLogitsTransform {
 public:
  /// `distance` is the distance of query and key of the first score, `slope` the ALiBi slope of the head.
  __device__ __forceinline__ BackwardLogitsTransform(const AttentionParams& forward, int32_t distance, float slope)
      : factor_(forward.score_factor), cap_(forward.softcap_log2) {
    distance_ = static_cast<float>(distance);
    slope_ = -kLog2E * slope;
  }
  /// Computes the probabilities of two scores of one query under the soft cap, and replaces the scores by the
  /// probabilities times the derivatives of the logits, which dS needs.
  ///
  /// Two scores share one reciprocal, that of a product, because exponentials and reciprocals use the unit with the
  /// lowest rate. They must be of one query, because a NaN score makes the lse of its query NaN, but must not reach
  /// other queries.
  __device__ __forceinline__ void softcap(float& first, float& second, float lse, float& first_p,
                                          float& second_p) const {
    const float a = half_one_plus_exp(first), b = half_one_plus_exp(second);
    // u = 1 - tanh(x), to within 2^-21; tanh.approx is not accurate enough, because probabilities are normalised by the
    // lse that the forward pass has computed. The derivative of tanh is u (2 - u) = u (u exp(2 x)), which is 0 for a
    // score of -inf, however u is rounded.
    const float reciprocal_of_both = xa::ptx::reciprocal_approx(a * b);
    const float first_u = reciprocal_of_both * b, second_u = reciprocal_of_both * a;
    first_p = xa::ptx::exp2_approx(__fmaf_rn(first_u, -cap_, cap_ - lse));
    second_p = xa::ptx::exp2_approx(__fmaf_rn(second_u, -cap_, cap_ - lse));
    first = first_p * first_u * (first_u * __fmaf_rn(a, 2.0f, -1.0f));
    second = second_p * second_u * (second_u * __fmaf_rn(b, 2.0f, -1.0f));
  }
  /// The probability of a score with ALiBi; `further` is its distance from the first score's.
  __device__ __forceinline__ float alibi(float score, float lse, int further) const {
    const float distance = fabsf(distance_ + static_cast<float>(further));
    return xa::ptx::exp2_approx(__fmaf_rn(score, factor_, __fmaf_rn(distance, slope_, -lse)));
  }

  /// The probability of a score with a bias.
  __device__ __forceinline__ float biased(float score, float bias, float lse) const {
    return xa::ptx::exp2_approx(__fmaf_rn(score, factor_, __fmaf_rn(bias, kLog2E, -lse)));
  }

 private:
  /// (1 + exp(2 x)) / 2 for the tanh argument x of a score. The exponent is limited to 60, so that the product of two
  /// does not overflow; tanh(x) then is 1 to within 2^-59.
  __device__ __forceinline__ float half_one_plus_exp(float score) const {
    constexpr float kTwoLog2E = 2.88539008177792681f;
    return __fmaf_rn(xa::ptx::exp2_approx(fminf(score * (factor_ * kTwoLog2E), 60.0f)), 0.5f, 0.5f);
  }

  float factor_, cap_, distance_, slope_;
};

/// The logits transform of this lane's scores in a query block: the first score is that of the lane's first key and
/// first query. `slope` is the shared address of the head's ALiBi slope.
template <typename Shape>
__device__ __forceinline__ BackwardLogitsTransform<Shape> logits_transform(const AttentionParams& forward,
                                                                           const BackwardTile& tile, int32_t block,
                                                                           uint32_t slope) {
  if constexpr (!Shape::kHasAlibi) return {forward, 0, 0.0f};
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, lane = thread % 32;
  const int32_t key = tile.key_block * Shape::kKeys + thread / 32 * 16 + lane / 4;
  const int32_t distance = block * Shape::kQueries + 2 * (lane % 4) + tile.shift - key;
  return {forward, distance, ptx::load_shared_f32(slope)};
}

}  // namespace xa::hopper
