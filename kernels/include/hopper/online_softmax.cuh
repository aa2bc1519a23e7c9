// The online softmax of a prefill warp's rows, in steps that overlap with wgmma.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// The unit of the scores of a lane's rows in `half`, of one unit for both or of one for each.
__device__ __forceinline__ float unit_of(float unit, int) { return unit; }
__device__ __forceinline__ float unit_of(const float (&units)[2], int half) { return units[half]; }

/// `x` rounded to T, as the weights P are before P V.
template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return Element<T>::to_f32(T{static_cast<uint16_t>(Element<T>::pack(x, x))});
}

/// State of the online softmax of a warp's 16 rows, two per lane: g and g + 8 with g = lane / 4. Unlike SoftmaxState
/// (softmax.cuh), `update` leaves the output alone, because the previous P V is still adding to it.
///
/// The reference of a row's exponents is its largest logit (base 2) *as rounded* to f32, so one FMA computes an
/// exponent for logits up to 2^28. Rounding changes all exponents of a row by the same amount, which the normalisation
/// cancels. The largest weight is then not exactly 1 and is rounded to T like the others; `round_max_weight` adds it to
/// the sum as rounded, so that a key with all of the weight gets exactly that.
template <int kColumnTiles>
struct OnlineSoftmax {
  /// Independent partial sums per lane and row; measured to be the faster choice for each width.
  static constexpr int kPartialSums = kColumnTiles == 128 / 8 ? 1 : 2;

  float max[2];        // largest logit, rounded
  float max_score[2];  // largest score
  float sum[2];        // of this lane's columns only, until `finalize`
  float rescale[2];    // factor of the earlier output relative to the last block's maximum
  float output[kColumnTiles][4];

  /// The state of no block, but for the output.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = max_score[half] = -INFINITY;
      sum[half] = 0.0f;
    }
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[column][i] = 0.0f;
    }
  }

  /// Replaces the scores of a block by the weights P, and updates max, sum and rescale. A row without a visible key in
  /// the block keeps its state bit for bit.
  ///
  /// This must stay free of branches and votes, which cost 2 to 7 % of the kernel's speed, and in this order of
  /// statements: others compile to slower instruction orders (docs/dev/lab_notebook.md).
  template <int kKeyTiles, typename Unit>
  __device__ __forceinline__ void update(float (&scores)[kKeyTiles][4], const Unit& log2_unit) {
    const float largest[2] = {lane_max(scores, 0), lane_max(scores, 1)};
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) base[half] = update_max(half, largest[half], unit_of(log2_unit, half));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float block_sums[kPartialSums] = {};
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        float (&pair)[2] = reinterpret_cast<float (&)[2]>(scores[block][2 * half]);
#pragma unroll
        for (float& x : pair) x = xa::ptx::exp2_approx(__fmaf_rn(x, unit_of(log2_unit, half), -base[half]));
        if constexpr (kPartialSums == 1) {
          block_sums[0] += pair[0] + pair[1];
        } else {
          block_sums[0] += pair[0];
          block_sums[1] += pair[1];
        }
      }
      const float block_sum = kPartialSums == 1 ? block_sums[0] : block_sums[0] + block_sums[1];
      sum[half] = __fmaf_rn(sum[half], rescale[half], block_sum);
    }
  }
  /// Whether the last block raised the maximum of any of the warp's rows. Most blocks of a long sequence raise none:
  /// all rescale factors are exactly 1, and skipping the multiplications saves power, which limits the tensor cores'
  /// clock.
  __device__ __forceinline__ bool max_changed() const {
    return __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f);
  }
  __device__ __forceinline__ void rescale_output() {
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[column][i] *= rescale[i / 2];
    }
  }
  /// Corrects the sums of rows whose maximum the last block raised: their largest weight enters as rounded to T. Below
  /// logits of 1024 that weight is close enough to 1 to need no correction.
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void round_max_weights(const float (&weights)[kKeyTiles][4]) {
    if (!__any_sync(~0u, is_large(max[0]) || is_large(max[1]))) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = quad_max(lane_max(weights, half));
      // The sums of the quad's lanes are added up later, so lane 0 corrects its own for all.
      if (rescale[half] != 1.0f && threadIdx.x % 4 == 0) sum[half] += round_to<T>(largest) - largest;
    }
  }
  /// The same for the maximum over all blocks, once after the last block. The weights of earlier maxima stay as they
  /// are.
  template <typename Unit, typename Round>
  __device__ __forceinline__ void round_max_weight(const Unit& log2_unit, const Round& round) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float weight = xa::ptx::exp2_approx(__fmaf_rn(max_score[half], unit_of(log2_unit, half), -max[half]));
      if (is_large(max[half]) && threadIdx.x % 4 == 0) sum[half] += round(weight) - weight;
    }
  }
  /// Reduces the lanes' sums; called once, after the last block.
  __device__ __forceinline__ void finalize() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
  }

 protected:
  /// The largest of this lane's scores of a row.
  template <int kKeyTiles>
  static __device__ __forceinline__ float lane_max(const float (&scores)[kKeyTiles][4], int half) {
    float largest = scores[0][2 * half];
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
      largest = fmaxf(largest, fmaxf(scores[block][2 * half], scores[block][2 * half + 1]));
    }
    return largest;
  }
  /// The largest over the quad of lanes that hold a row.
  static __device__ __forceinline__ float quad_max(float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

 private:
  static __device__ __forceinline__ bool is_large(float x) { return fabsf(x) > 1024.0f && x != -INFINITY; }
  /// Updates a row's maximum and rescale factor by the largest score of this lane's columns. Returns the reference that
  /// is subtracted from the row's logits.
  __device__ __forceinline__ float update_max(int half, float largest, float log2_unit) {
    largest = quad_max(largest);
    max_score[half] = fmaxf(max_score[half], largest);
    const float next = fmaxf(max[half], __fmul_rn(largest, log2_unit));
    // A row without a visible key so far has weights of 0 and a rescale factor of 0.
    const float base = next == -INFINITY ? 0.0f : next;
    rescale[half] = xa::ptx::exp2_approx(max[half] - base);
    max[half] = next;
    return base;
  }
};

}  // namespace xa::hopper
