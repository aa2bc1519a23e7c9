// The compute warpgroups of multi-head latent attention on Hopper, one with the left and one with the right half of the
// value columns. The left one computes the scores and passes P on:
//
//   left   S of block i │ P ─┐ O += P V │ S of block i + 1 ...
//   right                    └─► O += P V │ waits for P of block i + 1
//
// A block is in use from its scores to its products with P only. With the scores of two blocks first, so that one
// warpgroup's softmax runs beside the other one's products, both buffers would be in use for the time of two blocks,
// and then be loaded at the same time. A thread passes P to the thread of the right warpgroup that has the same rows,
// through a slot that no other thread accesses.
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
  /// P is at most 2^kRise.
  static constexpr float kRise = 8.0f;

 public:
  /// `half` is 0 for the left and 1 for the right columns.
  __device__ __forceinline__ HalfTile(const AttentionParams& params, const Buffers<Shape>& buffers, int half)
      : params_(params),
        buffers_(buffers),
        work_(buffers.cta_tile()),
        transform_(params),
        unit_(hopper::ptx::opaque(transform_.log2_unit())),
        query_(hopper::matrix_descriptor<Atom>(buffers.query(), 0, Atom::kBytes)),
        keys_(hopper::matrix_descriptor<Atom>(buffers.buffer(0), 0, Atom::kBytes)),
        values_(hopper::matrix_descriptor<Atom>(
            buffers.buffer(0) + half * (Shape::kColumns / Atom::kColumns) * Shape::kAtomColumnBytes,
            Shape::kAtomColumnBytes, Atom::kBytes)) {
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.0f;
  }

  /// The result of no block.
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (float (&o)[4] : output_) o[0] = o[1] = o[2] = o[3] = 0.0f;
  }

  /// The left warpgroup: scores and P of blocks `first` to before `end`, and its half of the output. `number` counts
  /// the CTA's blocks.
  __device__ __forceinline__ void attend_left(int32_t first, int32_t end, int32_t& number) {
#pragma unroll 1
    for (int32_t block = first; block < end; ++block) {
      const int32_t n = number++;
      Weights weights;
      Scores scores;
      issue_scores(scores, n);
      hopper::ptx::wgmma_wait_group<0>();
      compute_weights(weights, scores, block, max_);
      pass(weights, n);
      raise(weights, block > first);
      issue_values(weights, n, block > first);
      hopper::ptx::wgmma_wait_group<0>();
      buffers_.release(n, 0);
    }
  }

  /// The right warpgroup: its half of the output.
  __device__ __forceinline__ void attend_right(int32_t first, int32_t end, int32_t& number) {
#pragma unroll 1
    for (int32_t block = first; block < end; ++block) {
      const int32_t n = number++;
      Weights weights;
#pragma unroll
      for (int part = Shape::kParts / 2; part < Shape::kParts; ++part) buffers_.full(n, part).wait();
      receive(weights, n);
      raise(weights, block > first);
      issue_values(weights, n, block > first);
      hopper::ptx::wgmma_wait_group<0>();
      buffers_.release(n, 1);
    }
  }

  /// Stores the result of the work tile. Both warpgroups call this.
  __device__ __forceinline__ void store_result(const WorkRange& range, int half) {
    // Both must have read the blocks, and P.
    sync_compute_threads();
    if (warp_row() < work_.tile.num_rows) store_output(half);
    if (half == 0) store_states();
    sync_compute_threads();
    const float* const states = buffers_.row_states();
    const int32_t partial_row = range.partial_row < 0 ? -1 : range.partial_row + buffers_.cta_rank() * Shape::kRows;
    mla::store_rows<Shape::kComputeThreads, RowWriter<T, false>>(
        params_, work_, partial_row, unit_, threadIdx.x, [&](int32_t row, int32_t column) {
          const uint8_t* const output = buffers_.output() + row * Shape::kOutputPitch + 4 * column;
          return PartialState{states[Shape::kRows + row], states[row], *reinterpret_cast<const float4*>(output)};
        });
    // TMA writes the next tile's blocks in the same place.
    hopper::ptx::fence_proxy_async_shared();
  }

  static __device__ __forceinline__ void sync_compute_threads() {
    hopper::ptx::named_barrier_sync(1, Shape::kComputeThreads);
  }

 private:
  static __device__ __forceinline__ int32_t warp_row() { return static_cast<int32_t>(threadIdx.x / 32 % 4) * 16; }

  /// S = Q K^T of a buffer, as one wgmma group that starts when the first part of the block is loaded.
  __device__ __forceinline__ void issue_scores(Scores& scores, int32_t number) const {
    const uint64_t block = keys_ + number % 2 * (Shape::kBlockBytes >> 4);
    multiply_part<0>(scores, number, block);
    multiply_part<1>(scores, number, block);
    multiply_part<2>(scores, number, block);
    multiply_part<3>(scores, number, block);
    hopper::ptx::wgmma_commit_group();
  }
  /// Adds the products of a part to S, which the first one resets.
  template <int kPart>
  __device__ __forceinline__ void multiply_part(Scores& scores, int32_t number, uint64_t block) const {
    constexpr int kSteps = Atom::kColumns / 16;  // per atom column
    buffers_.full(number, kPart).wait();
    hopper::ptx::wgmma_fence();
#pragma unroll
    for (int i = Shape::part_start(kPart) * kSteps; i < Shape::part_start(kPart + 1) * kSteps; ++i) {
      const uint64_t offset = Shape::atom_column(i / kSteps) * (Shape::kAtomColumnBytes >> 4) + i % kSteps * 2;
      if (i == 0) {
        hopper::Wgmma<T, Shape::kKeys>::template ss<false>(scores, query_ + offset, block + offset);
      } else {
        hopper::Wgmma<T, Shape::kKeys>::template ss<true>(scores, query_ + offset, block + offset);
      }
    }
  }
  /// O = P V of a buffer (+ O where it `accumulates`), as one wgmma group.
  __device__ __forceinline__ void issue_values(const Weights& weights, int32_t number, bool accumulates) {
    const uint64_t block = values_ + number % 2 * (Shape::kBlockBytes >> 4);
    hopper::ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      hopper::Wgmma<T, Shape::kColumns>::rs(output_, weights.p[step], block + step * (2 * Atom::kBytes >> 4),
                                            step > 0 || accumulates);
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
      // A maximum rises only by more than kRise, so that few blocks rescale the output. -inf always rises.
      weights.max[half] = (largest - max[half]) * unit_ <= kRise ? max[half] : largest;
      const float base = weights.max[half] == -INFINITY ? 0.0f : weights.max[half] * unit_;
      // Where rounding the product would matter, the maximum is subtracted first.
      const bool is_large = fabsf(base) > 128.0f;
      if (__any_sync(~0u, is_large)) {
        const float shift = is_large ? weights.max[half] : 0.0f;
#pragma unroll
        for (int column = 0; column < Shape::kKeys / 8; ++column) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) scores[column][i] -= shift;
        }
      }
      const float subtracted = is_large ? 0.0f : base;
      float block_sum = 0.0f;
#pragma unroll
      for (int column = 0; column < Shape::kKeys / 8; ++column) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[column][i] = xa::ptx::exp2_approx(scores[column][i] * unit_ - subtracted);
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
  __device__ __forceinline__ void raise(const Weights& weights, bool has_output) {
    const bool rises = weights.max[0] != max_[0] || weights.max[1] != max_[1];
    if (__any_sync(~0u, rises)) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[half] = merge_weight(max_[half], weights.max[half], unit_);
        sum_[half] *= factor[half];
        max_[half] = weights.max[half];
      }
      if (has_output) {
#pragma unroll
        for (int column = 0; column < Shape::kColumns / 8; ++column) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output_[column][i] *= factor[i / 2];
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += added_[half];
      added_[half] = 0.0f;
    }
  }

  /// Passes P to the right warpgroup, once it has received the P before.
  __device__ __forceinline__ void pass(const Weights& weights, int32_t number) const {
    buffers_.p_empty(number).producer_wait();
    const int32_t thread = threadIdx.x % 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t (&p)[4] = weights.p[step];
      buffers_.p()[128 * step + thread] = make_uint4(p[0], p[1], p[2], p[3]);
    }
    buffers_.maxima()[thread] = make_float2(weights.max[0], weights.max[1]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) buffers_.p_full(number).arrive();
  }
  __device__ __forceinline__ void receive(Weights& weights, int32_t number) const {
    buffers_.p_full(number).wait();
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
    __syncwarp();
    if (threadIdx.x % 32 == 0) buffers_.p_empty(number).arrive();
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
  /// The left warpgroup has the sums, and the maxima that they and the outputs are relative to.
  __device__ __forceinline__ void store_states() const {
    float* const states = buffers_.row_states();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int32_t row = warp_row() + 8 * i + static_cast<int32_t>(threadIdx.x % 32 / 4);
      if (threadIdx.x % 4 != 0) continue;
      states[row] = sum;
      states[Shape::kRows + row] = max_[i];
    }
  }

  const AttentionParams& params_;
  const Buffers<Shape>& buffers_;
  const WorkTile& work_;
  const LogitsTransform transform_;
  const float unit_;
  const uint64_t query_, keys_, values_;  // descriptors of Q, and of the first buffer
  float output_[Shape::kColumns / 8][4];  // not set before the first block
  float max_[2];
  float sum_[2];  // left: of this lane's columns
  float added_[2] = {0.0f, 0.0f};
};

/// Computes a work tile.
template <typename Shape, typename T, typename LogitsTransform>
__device__ __forceinline__ void compute_tile(const AttentionParams& params, const Buffers<Shape>& buffers,
                                             int32_t& number, int half) {
  const WorkTile& work = buffers.work_tile();
  const int32_t first = hopper::uniform(work.keys.begin / Shape::kKeys);
  const int32_t end = hopper::uniform((work.keys.end + Shape::kKeys - 1) / Shape::kKeys);
  load_query<Shape, T>(params, buffers, threadIdx.x);
  HalfTile<Shape, T, LogitsTransform>::sync_compute_threads();
  HalfTile<Shape, T, LogitsTransform> tile(params, buffers, half);
  if (first >= end) {
    tile.clear_output();
  } else if (half == 0) {
    tile.attend_left(first, end, number);
  } else {
    tile.attend_right(first, end, number);
  }
  tile.store_result(buffers.work_range(), half);
}

}  // namespace xa::hopper_mla
