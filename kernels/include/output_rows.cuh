// From a warp's state to rows of `out` and `lse`; and the rows that no sequence owns.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention_params.cuh"
#include "element.cuh"
#include "paged_rows.cuh"
#include "softmax.cuh"
#include "tile_plan.cuh"

namespace xa {

/// Writes finished rows of one tile, leaving out those that another sequence claims first.
template <typename T>
class RowWriter {
 public:
  __device__ __forceinline__ RowWriter(const AttentionParams& params, const Plan& plan)
      : params_(params),
        map_(params, plan.tile, plan.kv_head),
        only_if_owner_(plan.overlap == Overlap::kNone ? -1 : plan.tile.sequence) {}

  __device__ __forceinline__ bool writes(int32_t row) const {
    return row < map_.num_rows && (only_if_owner_ < 0 || first_owner(params_, map_.token(row)) == only_if_owner_);
  }
  __device__ __forceinline__ T* out(int32_t row) const {
    return static_cast<T*>(params_.out) + map_.token(row) * params_.out_token_stride +
           map_.head(row) * params_.out_head_stride;
  }
  __device__ __forceinline__ void write_lse(int32_t row, float max, float sum, float log2_unit) const {
    if (params_.lse == nullptr || !writes(row)) return;
    params_.lse[static_cast<int64_t>(map_.head(row)) * params_.num_tokens + map_.token(row)] =
        log_sum_exp(max, sum, log2_unit);
  }

 private:
  const AttentionParams& params_;
  const RowMap map_;
  int32_t only_if_owner_;  // -1 where no two sequences overlap
};

/// Writes the rows of one warp, `first_row` the first. `staging` are that warp's rows in shared memory, kPitch apart:
/// the accumulators go through them to leave as whole chunks of 16 bytes.
template <typename Shape, typename T, typename State>
__device__ __forceinline__ void write_warp_rows(const AttentionParams& params, const RowWriter<T>& writer,
                                                const State& state, int32_t first_row, uint8_t* staging,
                                                float log2_unit) {
  using Grid = LaneGrid<Shape::kRowBytes>;
  constexpr int kElements = 16 / sizeof(T);
  const int32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = 16 * tile + 8 * half + g;
      const float inverse = normaliser(state.sum[tile][half]);
      T* const to = reinterpret_cast<T*>(staging + row * Shape::kPitch) + 2 * t;
#pragma unroll
      for (int column = 0; column < Shape::kHeadDim / 8; ++column) {
        const float (&o)[4] = state.output[tile][column];
        store_two<T>(to + 8 * column, o[2 * half] * inverse, o[2 * half + 1] * inverse);
      }
      if (t == 0) writer.write_lse(first_row + row, state.max[tile][half], state.sum[tile][half], log2_unit);
    }
  }
  __syncwarp();
  const Grid grid;
#pragma unroll 4
  for (int32_t row = grid.row; row < 16 * Shape::kRowTiles; row += Grid::kRowsPerStep) {
    if (!grid.has_chunk(0) || !writer.writes(first_row + row)) continue;
    const uint4* const from = reinterpret_cast<const uint4*>(staging + row * Shape::kPitch);
    T* const to = writer.out(first_row + row);
#pragma unroll
    for (int step = 0; step < Grid::kStepsPerRow; ++step) {
      const int32_t c = grid.chunk + 32 * step;
      if (c * kElements < params.head_dim) *reinterpret_cast<uint4*>(to + c * kElements) = from[c];
    }
  }
}

/// Merges the states of the warps that had different keys of the same rows, in the order of the warps, and writes the
/// result. Every thread of the CTA calls this; `shared` is free, `Shape::kMergeBytes` long.
template <typename Shape, typename T, typename State>
__device__ __forceinline__ void merge_and_write(const AttentionParams& params, const RowWriter<T>& writer,
                                                const State& state, uint8_t* shared, float log2_unit) {
  constexpr int kParts = Shape::kKeyWarps, kRows = Shape::kRows, kFours = Shape::kHeadDim / 4;
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* const outputs = reinterpret_cast<float*>(shared);  // [kParts][kRows][kMergePitch]
  float2* const states =
      reinterpret_cast<float2*>(outputs + kParts * kRows * Shape::kMergePitch);  // [kParts][kRows] (max, sum)
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t index = warp * kRows + 8 * half + g;
#pragma unroll
    for (int column = 0; column < Shape::kHeadDim / 8; ++column) {
      const float (&o)[4] = state.output[0][column];
      *reinterpret_cast<float2*>(outputs + index * Shape::kMergePitch + 8 * column + 2 * t) =
          make_float2(o[2 * half], o[2 * half + 1]);
    }
    if (t == 0) states[index] = make_float2(state.max[0][half], state.sum[0][half]);
  }
  __syncthreads();
  for (int32_t item = threadIdx.x; item < kRows * kFours; item += Shape::kThreads) {
    const int32_t row = item / kFours, column = item % kFours * 4;
    if (!writer.writes(row)) continue;
    float max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) max = fmaxf(max, states[part * kRows + row].x);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int32_t index = part * kRows + row;
      const float weight = State::weight(states[index].x, max, log2_unit);
      const float4 o = *reinterpret_cast<const float4*>(outputs + index * Shape::kMergePitch + column);
      total.x += weight * o.x;
      total.y += weight * o.y;
      total.z += weight * o.z;
      total.w += weight * o.w;
      sum += weight * states[index].y;
    }
    const float inverse = normaliser(sum);
    if (column < params.head_dim) {
      store_four<T>(writer.out(row) + column,
                    make_float4(total.x * inverse, total.y * inverse, total.z * inverse, total.w * inverse));
    }
    if (column == 0) writer.write_lse(row, max, sum, log2_unit);
  }
}

/// One row of every head: out = 0, lse = -inf.
template <typename T, int kThreads>
__device__ __forceinline__ void clear_row(const AttentionParams& params, int32_t token) {
  constexpr int kElements = 16 / sizeof(T);
  const int32_t num_heads = params.num_kv_heads * params.group, chunks = params.head_dim / kElements;
  T* const row = static_cast<T*>(params.out) + token * params.out_token_stride;
  for (int32_t item = threadIdx.x; item < num_heads * chunks; item += kThreads) {
    const int32_t head = item / chunks;
    T* const to = row + head * params.out_head_stride + (item - head * chunks) * kElements;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  if (params.lse == nullptr) return;
  for (int32_t head = threadIdx.x; head < num_heads; head += kThreads) {
    params.lse[static_cast<int64_t>(head) * params.num_tokens + token] = -INFINITY;
  }
}

/// This CTA's share of the rows that belong to no sequence.
template <typename T, int kThreads>
__device__ inline void clear_unowned_rows(const AttentionParams& params, Overlap overlap) {
  const int32_t num_seqs = live_sequences(params);
  if (overlap == Overlap::kNone) {
    // The owned rows are [begin, end).
    const int32_t begin = num_seqs > 0 ? start_of(params, 0) : 0;
    const int32_t end = num_seqs > 0 ? start_of(params, num_seqs) : 0;
    const int32_t unowned = params.num_tokens - (end - begin);
    for (int64_t i = blockIdx.x; i < unowned; i += gridDim.x) {
      const int32_t index = static_cast<int32_t>(i);
      clear_row<T, kThreads>(params, index < begin ? index : index - begin + end);
    }
  } else {
    for (int64_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
      if (first_owner(params, static_cast<int32_t>(token)) < 0) {
        clear_row<T, kThreads>(params, static_cast<int32_t>(token));
      }
    }
  }
}

}  // namespace xa
