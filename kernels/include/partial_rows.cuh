// Partial results of attention rows over disjoint sets of keys: how they are stored in the workspace, and merged.
//
// The workspace has rows_per_head partial rows per KV head: (max, sum) of each, and an unnormalized output of `pitch`
// columns. Which rows a partial takes follows from the work partition by arithmetic (work_partition.cuh), so the
// workspace needs no counters and need not be cleared.
#pragma once

#include <cmath>
#include <cstdint>

#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// What the combine kernel needs to know of a boundary between work ranges: the tile that it splits, and where the
/// tile's partials are.
struct SplitRecord {
  QoTile tile;
  int32_t num_partials;  // of the tile; 0 if the boundary splits no tile
  int32_t num_records;   // boundaries inside of the tile: as many CTAs per KV head merge it
  int32_t index;         // of this boundary among them
  int32_t first_row;     // partial row of row 0 of partial 0
  int32_t second_row;    // partial row of row 0 of partial 1
  int32_t row_stride;    // from each partial to the next, from partial 1 on
  int32_t reserved[2];
};

static_assert(sizeof(SplitRecord) == kSplitRecordBytes, "the launch makes room for it");

/// The state of a row over some keys, with four columns of its unnormalized output.
struct PartialState {
  float max;
  float sum;
  float4 output;
};

/// The factor that rescales a state with maximum `max` to the maximum `largest`; exactly 1 if they are equal. Both are
/// -inf before the first visible key, and their difference would be NaN.
__device__ __forceinline__ float merge_weight(float max, float largest, float log2_unit) {
  return largest == -INFINITY ? 1.0f : ptx::exp2_approx(__fmul_rn(max - largest, log2_unit));
}

__device__ __forceinline__ float weighted_sum(float a, float a_weight, float b, float b_weight) {
  return __fmaf_rn(b, b_weight, __fmul_rn(a, a_weight));
}

/// Merges `next`, the state of the keys that follow, into `row`. Every operation is an intrinsic, so that no compiler
/// contracts or reorders them: with batch_invariant, all kernels that merge must produce the same bits.
__device__ __forceinline__ void merge(PartialState& row, const PartialState& next, float log2_unit) {
  const float largest = fmaxf(row.max, next.max);
  const float a = merge_weight(row.max, largest, log2_unit), b = merge_weight(next.max, largest, log2_unit);
  row.max = largest;
  row.sum = weighted_sum(row.sum, a, next.sum, b);
  row.output.x = weighted_sum(row.output.x, a, next.output.x, b);
  row.output.y = weighted_sum(row.output.y, a, next.output.y, b);
  row.output.z = weighted_sum(row.output.z, a, next.output.z, b);
  row.output.w = weighted_sum(row.output.w, a, next.output.w, b);
}

/// The partial rows of one KV head.
class PartialRows {
 public:
  __device__ __forceinline__ PartialRows(const PartialResults& results, int32_t kv_head)
      : PartialRows(results, kv_head, results.rows_per_head) {}
  __device__ __forceinline__ PartialRows(const PartialResults& results, int32_t kv_head, int32_t rows_per_head)
      : row_bytes_(results.pitch * sizeof(float)) {
    const int64_t first = static_cast<int64_t>(kv_head) * rows_per_head;
    states_ = static_cast<float2*>(results.states) + first;
    outputs_ = static_cast<uint8_t*>(results.outputs) + first * row_bytes_;
  }

  __device__ __forceinline__ PartialState load(int32_t row, int32_t column) const {
    return PartialState{state(row).x, state(row).y, *reinterpret_cast<const float4*>(output(row, column))};
  }
  /// Max and sum.
  __device__ __forceinline__ float2 state(int32_t row) const { return states_[row]; }
  /// `state` has columns `column` to `column` + 3.
  __device__ __forceinline__ void store(int32_t row, int32_t column, const PartialState& state) const {
    *reinterpret_cast<float4*>(output(row, column)) = state.output;
    if (column == 0) store_state(row, state.max, state.sum);
  }
  __device__ __forceinline__ void store_state(int32_t row, float max, float sum) const {
    states_[row] = make_float2(max, sum);
  }
  /// The address of an unnormalized output, from `column` on.
  __device__ __forceinline__ float* output(int32_t row, int32_t column) const {
    return reinterpret_cast<float*>(outputs_ + static_cast<uint64_t>(static_cast<uint32_t>(row)) * row_bytes_) + column;
  }

 private:
  float2* states_;
  uint8_t* outputs_;
  uint32_t row_bytes_;
};

}  // namespace xa
