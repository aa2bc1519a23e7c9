// The running softmax of the rows of a prefill warp, as of softmax.cuh, in steps that overlap with products.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// The nearest number that V's rows are multiplied by.
template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return Element<T>::to_f32(T{static_cast<uint16_t>(Element<T>::pack(x, x))});
}

/// The softmax of a warp's 16 rows, two a lane: g and g + 8. As SoftmaxState (softmax.cuh), in steps that leave the
/// output alone while the tensor cores still add to it, and with logits to base 2 for scores: a row's weights are
/// relative to its largest logit, *rounded*. What rounding takes from the exponent of one weight it takes from all of
/// the row's, so it cancels in the end, and one multiply-add makes an exponent for logits up to 2^28. The largest
/// weight is not exactly 1 then and is rounded with the others; the sum takes it as rounded, lest a key that has all of
/// the weight gets less or more.
template <int kColumnTiles>
struct OnlineSoftmax {
  /// How many sums a lane adds a row's weights up in; what is faster has been measured.
  static constexpr int kPartialSums = kColumnTiles == 128 / 8 ? 1 : 2;

  float max[2];      // largest logit, rounded
  float sum[2];      // this lane's columns only, until `finish`
  float rescale[2];  // what the output so far counts for, once the last block has been taken up
  float output[kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = -INFINITY;
      sum[half] = 0.0f;
    }
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[column][i] = 0.0f;
    }
  }

  /// Turns the scores of a block into the weights of V's rows. A row that sees nothing of it keeps its state, bit for
  /// bit.
  ///
  /// Nothing branches here: votes in between cost 2 to 7 % of the kernel's speed. So do other orders of the same
  /// instructions, which come about when this is written otherwise (docs/performance.md).
  template <int kKeyTiles>
  __device__ __forceinline__ void absorb(float (&scores)[kKeyTiles][4], float log2_unit) {
    const float largest[2] = {lane_max(scores, 0), lane_max(scores, 1)};
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) base[half] = raise(half, largest[half], log2_unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float block_sums[kPartialSums] = {};
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        float (&pair)[2] = reinterpret_cast<float (&)[2]>(scores[block][2 * half]);
#pragma unroll
        for (float& x : pair) x = xa::ptx::exp2_approx(__fmaf_rn(x, log2_unit, -base[half]));
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
  /// Whether some row's maximum rose with the last block. In most blocks of a long sequence none does: the factors are
  /// exactly 1, and work that is left out is power for the tensor cores.
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
  /// Makes the sums take the largest weights as rounded, of rows whose maximum rose with the block of `weights`. Up to
  /// logits of 1024 those are close enough to 1.
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void round_max_weights(const float (&weights)[kKeyTiles][4]) {
    const auto is_large = [](float x) { return fabsf(x) > 1024.0f && x != -INFINITY; };
    if (!__any_sync(~0u, is_large(max[0]) || is_large(max[1]))) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = quad_max(lane_max(weights, half));
      // Of the quad's lanes one has it, and any may add it.
      if (rescale[half] != 1.0f && threadIdx.x % 4 == 0) sum[half] += round_to<T>(largest) - largest;
    }
  }
  /// Adds up the lanes' sums; call once, after the last block.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
  }

 protected:
  /// Of what this lane has of a row's scores.
  template <int kKeyTiles>
  static __device__ __forceinline__ float lane_max(const float (&scores)[kKeyTiles][4], int half) {
    float largest = scores[0][2 * half];
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
      largest = fmaxf(largest, fmaxf(scores[block][2 * half], scores[block][2 * half + 1]));
    }
    return largest;
  }
  /// Of a row, from those of its lanes.
  static __device__ __forceinline__ float quad_max(float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

 private:
  /// Takes up the largest score of a block, of which each lane knows its own columns'; what the row's logits lose
  /// before they become weights.
  __device__ __forceinline__ float raise(int half, float largest, float log2_unit) {
    const float next = fmaxf(max[half], __fmul_rn(quad_max(largest), log2_unit));
    // Of a row that has seen nothing all weights are 0, and so is what its output counts for.
    const float base = next == -INFINITY ? 0.0f : next;
    rescale[half] = xa::ptx::exp2_approx(max[half] - base);
    max[half] = next;
    return base;
  }
};

}  // namespace xa::hopper
