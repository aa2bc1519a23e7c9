// The compute warpgroups of multi-head latent attention on Hopper, one with the left and one with the right half of the
// value columns. Blocks come in pairs:
//
//   left   S of the even block │ P ─┐ O += P_even V │      wait  ┌─► O += P_odd V
//   right  S of the odd block  │    └─► O += P_even V │ P of the odd block ─┘ O += P_odd V
//
// So the tensor cores compute scores of one block while the other warpgroup is in its softmax (the schedule of
// FlashMLA). Both warpgroups multiply the output by the same factors in the same order. A thread passes P to the thread
// of the other warpgroup that has the same rows, through a slot that no other thread accesses.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "hopper/ptx.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper/wgmma.cuh"
#include "hopper_mla/load.cuh"
#include "hopper_mla/shape.cuh"
#include "mla/result.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "softmax.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper_mla {

/// P of a block: the A operand of four wgmma, and the maxima of the thread's two rows that its exponents refer to.
struct Weights {
  uint32_t p[4][4];
  float max[2];
};

/// A compute warpgroup's part of a work tile: 64 rows, half of the value columns.
template <typename Shape, typename T, typename LogitsTransform>
class HalfTile {
  using Atom = typename Shape::Atom;
  using Scores = float[Shape::kKeys / 8][4];

 public:
  /// `half` is 0 for the left and 1 for the right columns.
  __device__ __forceinline__ HalfTile(const AttentionParams& params, const Buffers<Shape>& buffers, int half)
      : params_(params),
        buffers_(buffers),
        work_(buffers.work_tile()),
        transform_(params),
        unit_(hopper::ptx::opaque(transform_.log2_unit())),
        query_(hopper::matrix_descriptor<Atom>(buffers.query(), 0, Atom::kBytes)),
        keys_(hopper::matrix_descriptor<Atom>(buffers.block(0), 0, Atom::kBytes)),
        values_(hopper::matrix_descriptor<Atom>(
            buffers.block(0) + half * (Shape::kColumns / Atom::kColumns) * Shape::kAtomColumnBytes,
            Shape::kAtomColumnBytes, Atom::kBytes)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0.0f;
    }
#pragma unroll
    for (int column = 0; column < Shape::kColumns / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output_[column][i] = 0.0f;
    }
  }

  /// The left half: scores of even blocks.
  __device__ __forceinline__ void attend_left(int32_t first, int32_t end, BufferCounts& counts) {
#pragma unroll 1
    for (int32_t block = first; block < end; block += 2) {
      Weights even;
      Scores scores;
      issue_scores(scores, 0, counts.even);
      hopper::ptx::wgmma_wait_group<0>();
      compute_weights(even, scores, block, max_);
      pass(even, buffers_.p_full(0, counts.even));
      raise(even);
      issue_values(even, 0);
      if (block + 1 < end) {
        Weights odd;
        buffers_.p_full(1, counts.odd).wait();
        receive(odd);
        hopper::ptx::wgmma_wait_group<0>();
        release<0>(0, counts.even);
        raise(odd);
        buffers_.full(1, 0, counts.odd).wait();
        issue_values(odd, 1);
        hopper::ptx::wgmma_wait_group<0>();
        release<0>(1, counts.odd++);
      } else {
        hopper::ptx::wgmma_wait_group<0>();
        release<0>(0, counts.even);
      }
      ++counts.even;
    }
  }

  /// The right half: scores of odd blocks.
  __device__ __forceinline__ void attend_right(int32_t first, int32_t end, BufferCounts& counts) {
    int32_t block = first;
#pragma unroll 1
    for (; block + 1 < end; block += 2) {
      Weights even, odd;
      Scores scores;
      issue_scores(scores, 1, counts.odd);
      buffers_.p_full(0, counts.even).wait();
      receive(even);
      hopper::ptx::wgmma_wait_group<0>();
      raise(even);
      buffers_.full(0, 1, counts.even).wait();
      issue_values(even, 0);
      compute_weights(odd, scores, block + 1, max_);
      pass(odd, buffers_.p_full(1, counts.odd));
      hopper::ptx::wgmma_wait_group<0>();
      release<1>(0, counts.even++);
      raise(odd);
      issue_values(odd, 1);
      hopper::ptx::wgmma_wait_group<0>();
      release<1>(1, counts.odd++);
    }
    if (block < end) {
      Weights even;
      buffers_.p_full(0, counts.even).wait();
      receive(even);
      raise(even);
      buffers_.full(0, 1, counts.even).wait();
      issue_values(even, 0);
      hopper::ptx::wgmma_wait_group<0>();
      release<1>(0, counts.even++);
    }
  }

  /// Stores the result of the work tile. Both warpgroups call this.
  __device__ __forceinline__ void store_result(const WorkRange& range, int half) {
    // Both must have read the blocks, and P.
    sync_compute_threads();
    store_output(half);
    store_states(half);
    sync_compute_threads();
    const float* const states = buffers_.row_states();
    mla::store_rows<Shape::kComputeThreads, Shape::kOutputPitch, T>(
        params_, work_, range, buffers_.output(), unit_, threadIdx.x, [&](int32_t row) {
          return make_float2(states[2 * Shape::kRows + row], states[row] + states[Shape::kRows + row]);
        });
  }

  static __device__ __forceinline__ void sync_compute_threads() {
    hopper::ptx::named_barrier_sync(1, Shape::kComputeThreads);
  }

 private:
  static __device__ __forceinline__ int32_t warp_row() { return static_cast<int32_t>(threadIdx.x / 32 % 4) * 16; }

  /// S = Q K^T of a buffer, as one wgmma group that starts when the first half of the block is loaded.
  __device__ __forceinline__ void issue_scores(Scores& scores, int buffer, int32_t count) const {
    constexpr int kHalf = Shape::kAtomColumnsPerHalf;
    const uint64_t block = keys_ + buffer * (Shape::kBlockBytes >> 4);
    buffers_.full(buffer, 0, count).wait();
    hopper::ptx::wgmma_fence();
    multiply_columns<0, kHalf>(scores, block);
    multiply_columns<2 * kHalf, Shape::kAtomColumns>(scores, block);
    buffers_.full(buffer, 1, count).wait();
    hopper::ptx::wgmma_fence();
    multiply_columns<kHalf, 2 * kHalf>(scores, block);
    hopper::ptx::wgmma_commit_group();
  }
  /// Adds the products of atom columns from kFirst to before kEnd to S, which the first one resets.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void multiply_columns(Scores& scores, uint64_t block) const {
    constexpr int kSteps = Atom::kColumns / 16;  // per atom column
#pragma unroll
    for (int step = kFirst * kSteps; step < kEnd * kSteps; ++step) {
      const uint64_t offset = step / kSteps * (Shape::kAtomColumnBytes >> 4) + step % kSteps * 2;
      if (step == 0) {
        hopper::Wgmma<T, Shape::kKeys>::template ss<false>(scores, query_ + offset, block + offset);
      } else {
        hopper::Wgmma<T, Shape::kKeys>::template ss<true>(scores, query_ + offset, block + offset);
      }
    }
  }
  /// O += P V of a buffer, as one wgmma group.
  __device__ __forceinline__ void issue_values(const Weights& weights, int buffer) {
    const uint64_t block = values_ + buffer * (Shape::kBlockBytes >> 4);
    hopper::ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      hopper::Wgmma<T, Shape::kColumns>::rs(output_, weights.p[step], block + step * (2 * Atom::kBytes >> 4));
    }
    hopper::ptx::wgmma_commit_group();
  }

  /// P of block `block` from its scores, relative to the larger of `max` and the block's maxima.
  __device__ __forceinline__ void compute_weights(Weights& weights, Scores& scores, int32_t block,
                                                  const float (&max)[2]) {
    const int32_t key = block * Shape::kKeys;
    transform_.template apply<T>(scores, transform_.rows(work_, warp_row()), key);
    const bool masked = key < work_.keys.common_begin || key + Shape::kKeys > work_.keys.common_end;
    if (masked) apply_mask(scores, params_, work_.tile, warp_row(), key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = scores[0][2 * half];
#pragma unroll
      for (int column = 0; column < Shape::kKeys / 8; ++column) {
        largest = fmaxf(largest, fmaxf(scores[column][2 * half], scores[column][2 * half + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      weights.max[half] = fmaxf(max[half], largest);
      // The maximum is subtracted first, so that it may be of any size.
      const float shift = weights.max[half] == -INFINITY ? 0.0f : weights.max[half];
      float block_sum = 0.0f;
#pragma unroll
      for (int column = 0; column < Shape::kKeys / 8; ++column) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[column][i] = xa::ptx::exp2_approx((scores[column][i] - shift) * unit_);
          block_sum += scores[column][i];
        }
      }
      // `raise` multiplies the sum so far by the factor of the output, which this block's weights do not have.
      added_[half] = block_sum;
    }
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &scores[2 * step + i / 2][i % 2 * 2];
        weights.p[step][i] = Element<T>::pack(pair[0], pair[1]);
      }
    }
  }

  /// Raises the maxima to those of a block. If none rises, output and sums stay bitwise unchanged.
  __device__ __forceinline__ void raise(const Weights& weights) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = merge_weight(max_[half], weights.max[half], unit_);
      sum_[half] = sum_[half] * factor[half] + added_[half];
      added_[half] = 0.0f;
      max_[half] = weights.max[half];
    }
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f) == 0) return;
#pragma unroll
    for (int column = 0; column < Shape::kColumns / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output_[column][i] *= factor[i / 2];
    }
  }

  /// Passes P to the other warpgroup.
  __device__ __forceinline__ void pass(const Weights& weights, const Barrier& full) const {
    const int32_t thread = threadIdx.x % 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t (&p)[4] = weights.p[step];
      buffers_.p()[128 * step + thread] = make_uint4(p[0], p[1], p[2], p[3]);
    }
    buffers_.maxima()[thread] = make_float2(weights.max[0], weights.max[1]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) full.arrive();
  }
  __device__ __forceinline__ void receive(Weights& weights) const {
    const int32_t thread = threadIdx.x % 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 p = buffers_.p()[128 * step + thread];
      weights.p[step][0] = p.x;
      weights.p[step][1] = p.y;
      weights.p[step][2] = p.z;
      weights.p[step][3] = p.w;
    }
    const float2 max = buffers_.maxima()[thread];
    weights.max[0] = max.x;
    weights.max[1] = max.y;
  }
  template <int kHalf>
  __device__ __forceinline__ void release(int buffer, int32_t count) const {
    if (threadIdx.x % 32 == 0) buffers_.empty(buffer, kHalf, count).arrive();
  }

  __device__ __forceinline__ void store_output(int half) const {
    const int32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* const row = reinterpret_cast<float*>(buffers_.output() + (warp_row() + 8 * i + g) * Shape::kOutputPitch);
#pragma unroll
      for (int column = 0; column < Shape::kColumns / 8; ++column) {
        const float (&o)[4] = output_[column];
        store_columns(row + half * Shape::kColumns + 8 * column + 2 * t, make_float2(o[2 * i], o[2 * i + 1]));
      }
    }
  }
  /// Each warpgroup has the sums of its own blocks, relative to the same maxima.
  __device__ __forceinline__ void store_states(int half) const {
    float* const states = buffers_.row_states();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int32_t row = warp_row() + 8 * i + static_cast<int32_t>(threadIdx.x % 32 / 4);
      if (threadIdx.x % 4 != 0) continue;
      states[half * Shape::kRows + row] = sum;
      if (half == 0) states[2 * Shape::kRows + row] = max_[i];
    }
  }

  const AttentionParams& params_;
  const Buffers<Shape>& buffers_;
  const WorkTile& work_;
  const LogitsTransform transform_;
  const float unit_;
  const uint64_t query_, keys_, values_;  // descriptors of Q, and of the first buffer
  float output_[Shape::kColumns / 8][4];
  float max_[2];
  float sum_[2];  // of this lane's columns of the warpgroup's own blocks
  float added_[2] = {0.0f, 0.0f};
};

/// Computes a work tile.
template <typename Shape, typename T, typename LogitsTransform>
__device__ __forceinline__ void compute_tile(const AttentionParams& params, const Buffers<Shape>& buffers,
                                             BufferCounts& counts, int half) {
  const WorkTile& work = buffers.work_tile();
  const int32_t first = hopper::uniform(work.keys.begin / Shape::kKeys);
  const int32_t end = hopper::uniform((work.keys.end + Shape::kKeys - 1) / Shape::kKeys);
  load_query<Shape, T>(params, buffers, threadIdx.x);
  HalfTile<Shape, T, LogitsTransform>::sync_compute_threads();
  HalfTile<Shape, T, LogitsTransform> tile(params, buffers, half);
  if (half == 0) {
    tile.attend_left(first, end, counts);
  } else {
    tile.attend_right(first, end, counts);
  }
  tile.store_result(buffers.work_range(), half);
}

}  // namespace xa::hopper_mla
