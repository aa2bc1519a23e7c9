// Rows of which several CTAs, or one CTA after another, computed disjoint keys: how their states are kept and folded.
//
// In the workspace a KV head has rows_per_head partial rows: (max, sum) of each, and an output of `pitch` columns.
// Which rows a part takes is closed-form arithmetic on the plan (work_partition.cuh), so nothing is counted or cleared.
#pragma once

#include <cmath>
#include <cstdint>

#include "params/attention.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// What the end of a share leaves to be merged: a tile that it cuts, and where the tile's parts are.
struct SplitRecord {
  QoTile tile;
  int32_t num_partials;  // 0 where the end of the share cuts no tile
  int32_t num_records;   // ends of shares in this tile: as many CTAs a KV head merge it
  int32_t index;         // of this end among them
  int32_t first_row;     // partial row of row 0 of part 0
  int32_t second_row;    // of part 1
  int32_t row_stride;    // partial rows from one part to the next, from part 1 on
  int32_t reserved[2];
};

static_assert(sizeof(SplitRecord) == kSplitRecordBytes, "the launch makes room for it");

/// Four columns of a row's state.
struct PartialState {
  float max;
  float sum;
  float4 output;
};

/// What a state at `max` counts for beside one at `largest`; exactly 1 where they are equal. Where nothing has been
/// seen yet both are -inf, whose difference would be NaN.
__device__ __forceinline__ float merge_weight(float max, float largest, float log2_unit) {
  return largest == -INFINITY ? 1.0f : ptx::exp2_approx(__fmul_rn(max - largest, log2_unit));
}

__device__ __forceinline__ float weighted_sum(float a, float a_weight, float b, float b_weight) {
  return __fmaf_rn(b, b_weight, __fmul_rn(a, a_weight));
}

/// Takes up the state of the keys that follow. The arithmetic is spelled out: with batch_invariant the same bits have
/// to come out of every kernel that folds.
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
      : first_(static_cast<int64_t>(kv_head) * results.rows_per_head),
        states_(static_cast<float2*>(results.states)),
        outputs_(static_cast<float*>(results.outputs)),
        pitch_(results.pitch) {}

  __device__ __forceinline__ PartialState load(int64_t row, int32_t column) const {
    const float2 state = states_[first_ + row];
    return PartialState{state.x, state.y, *reinterpret_cast<const float4*>(output(row, column))};
  }
  /// `part` holds columns `column` to `column` + 3.
  __device__ __forceinline__ void store(int64_t row, int32_t column, const PartialState& part) const {
    *reinterpret_cast<float4*>(output(row, column)) = part.output;
    if (column == 0) states_[first_ + row] = make_float2(part.max, part.sum);
  }

 private:
  __device__ __forceinline__ float* output(int64_t row, int32_t column) const {
    return outputs_ + (first_ + row) * pitch_ + column;
  }

  int64_t first_;
  float2* states_;
  float* outputs_;
  int32_t pitch_;
};

}  // namespace xa
