// The combine kernels (combine.cu, combine_many.cu): the split tile of a CTA.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "params/combine.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"

namespace xa {

constexpr int32_t kWarps = kCombineThreads / 32;

/// A split tile of a KV head, of which this CTA merges part `part` of `num_parts`.
template <typename T>
struct SplitTile {
  const AttentionParams& params;
  const SplitRecord record;
  const PartialRows partials;
  const int32_t kv_head;
  const int32_t part;
  const int32_t num_parts;

  /// Calls `merge(tile)` if the CTA has a tile. The grid is Hkv by records by m: with m CTAs per record and KV head,
  /// those of a tile divide it.
  template <typename Merge>
  static __device__ __forceinline__ void find(const AttentionParams& params, const Merge& merge) {
    const int32_t kv_head = blockIdx.x, index = blockIdx.z, ctas_per_record = gridDim.z;
    const SplitRecord record = static_cast<const SplitRecord*>(params.partial.split_records)[blockIdx.y];
    if (record.num_partials == 0) return;
    merge(SplitTile{params, record, PartialRows(params.partial, kv_head), kv_head,
                    record.index * ctas_per_record + index, record.num_records * ctas_per_record});
  }

  /// Writes four columns of a row, and with the first ones its lse.
  __device__ __forceinline__ void write(int32_t row, int32_t column, const PartialState& state) const {
    const RowWriter<T, false> writer(params, record.tile, kv_head);
    writer.write(row, column, state, params.partial.log2_unit);
  }

  /// The partial row of row `row` of a partial; of the last row or partial instead of what follows it.
  __device__ __forceinline__ int32_t partial_row(int32_t partial, int32_t row) const {
    const int32_t index = min(partial, record.num_partials - 1);
    const int32_t first = index == 0 ? record.first_row : record.second_row + (index - 1) * record.row_stride;
    return first + min(row, record.tile.num_rows - 1);
  }
};

/// The largest of the values of `lanes` adjacent lanes, or their sum.
__device__ __forceinline__ float max_of_lanes(float x, int32_t lanes) {
#pragma unroll 1
  for (int32_t distance = lanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
__device__ __forceinline__ float sum_of_lanes(float x, int32_t lanes) {
#pragma unroll 1
  for (int32_t distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

/// log2 of the chunks of 128 columns that a row of up to 512 columns is merged in. Of 3 chunks, the fourth one is
/// empty.
__device__ __forceinline__ int32_t log2_row_chunks(int32_t value_dim) {
  return value_dim > 256 ? 2 : value_dim > 128 ? 1 : 0;
}

/// The first column of item `item`: the chunks of a row follow each other.
__device__ __forceinline__ int32_t column_of_item(int32_t item, int32_t log2_chunks) {
  return (item & ((1 << log2_chunks) - 1)) * 128;
}

/// Adds the states of the partials that `lanes` adjacent lanes have, one each, to the maximum and the sum of `merged`,
/// whose output is rescaled. Returns the weight of this lane's partial.
__device__ __forceinline__ float add_states(PartialState& merged, float2 state, int32_t lanes, float log2_unit) {
  const float largest = fmaxf(merged.max, max_of_lanes(state.x, lanes));
  const float before = merge_weight(merged.max, largest, log2_unit);
  const float weight = merge_weight(state.x, largest, log2_unit);
  merged.max = largest;
  merged.sum = merged.sum * before + sum_of_lanes(state.y * weight, lanes);
  merged.output = scaled(merged.output, before);
  return weight;
}

/// sum += weight * x
__device__ __forceinline__ void add_weighted(float4& sum, float weight, const float4& x) {
  sum.x += weight * x.x;
  sum.y += weight * x.y;
  sum.z += weight * x.z;
  sum.w += weight * x.w;
}

}  // namespace xa
