// The combine kernel of split-KV: merges the partials of the tiles that a decode launch has split, and writes out and
// lse (include/work_partition.cuh).
//
// The decode launch writes a SplitRecord for every boundary between work ranges (include/partial_rows.cuh). For each
// record there is one CTA per KV head; those whose boundaries split the same tile divide its rows between them.
// Partials are merged in the order of their keys.
//
// Compiled once for each XA_DTYPE of out: f16, bf16, f32.
// Launch: kCombineThreads threads, a grid of Hkv by PartialResults::num_ranges - 1, no dynamic shared memory.

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "params/combine.cuh"
#include "partial_rows.cuh"

namespace xa {

constexpr int32_t kWarps = kCombineThreads / 32;

/// Partials whose loads are in flight together.
constexpr int32_t kLoadsInFlight = 12;

/// Merges partials `begin` to `end` of the tile, at least one.
__device__ __forceinline__ PartialState merge_partials(const SplitRecord& record, const PartialRows& partial_rows,
                                                       int32_t begin, int32_t end, int32_t row, int32_t column,
                                                       float log2_unit) {
  PartialState merged = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 1
  for (int32_t first = begin; first < end; first += kLoadsInFlight) {
    PartialState states[kLoadsInFlight];
#pragma unroll
    for (int32_t i = 0; i < kLoadsInFlight; ++i) {
      const int32_t partial = min(first + i, end - 1);
      const int64_t first_row =
          partial == 0 ? record.first_row : record.second_row + static_cast<int64_t>(partial - 1) * record.row_stride;
      states[i] = partial_rows.load(first_row + row, column);
    }
#pragma unroll
    for (int32_t i = 0; i < kLoadsInFlight; ++i) {
      if (first + i == begin) {
        merged = states[i];
      } else if (first + i < end) {
        merge(merged, states[i], log2_unit);
      }
    }
  }
  return merged;
}

/// Warps that divide the partials of the same columns between them. With batch_invariant one warp merges all, in order.
__device__ __forceinline__ int32_t warps_per_item(const AttentionParams& params, int32_t num_partials) {
  int32_t warps = 1;
  while (params.partial.max_fixed_splits == 0 && warps < kWarps && num_partials > warps * kLoadsInFlight) warps *= 2;
  return warps;
}

/// Merges this CTA's part of a split tile. An item is four columns of a row, and a lane has one item at a time. `warps`
/// adjacent warps have the same 32 items and merge different partials of them; the first of these warps merges their
/// results and writes them.
template <typename T>
__device__ __forceinline__ void merge_tile(const AttentionParams& params, const SplitRecord& record, int32_t kv_head) {
  __shared__ PartialState merged[kWarps][32];
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t warps = warps_per_item(params, record.num_partials), warp_groups = kWarps / warps;
  const int32_t warp_partials = (record.num_partials + warps - 1) / warps, begin = warp % warps * warp_partials;
  const int32_t end = min(begin + warp_partials, record.num_partials);
  const int32_t row_items = params.value_dim / 4, items = record.tile.num_rows * row_items;
  const float log2_unit = params.partial.log2_unit;
  const PartialRows partial_rows(params.partial, kv_head);
  const RowWriter<T, false> writer(params, record.tile, kv_head);
  for (int32_t first = record.index * warp_groups * 32; first < items; first += record.num_records * warp_groups * 32) {
    // All warps must reach the barriers. Those without an item compute the last one and do not write it.
    const int32_t item = first + warp / warps * 32 + lane, row = min(item, items - 1) / row_items;
    const int32_t column = (min(item, items - 1) - row * row_items) * 4;
    PartialState state = merge_partials(record, partial_rows, begin, end, row, column, log2_unit);
    if (warps > 1) {
      __syncthreads();
      merged[warp][lane] = state;
      __syncthreads();
      for (int32_t i = 1; warp % warps == 0 && i < warps; ++i) merge(state, merged[warp + i][lane], log2_unit);
    }
    if (warp % warps == 0 && item < items) writer.write(row, column, state, log2_unit);
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kCombineThreads)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  const xa::SplitRecord record = static_cast<const xa::SplitRecord*>(params.partial.split_records)[blockIdx.y];
  if (record.num_partials > 0) xa::merge_tile<xa::XA_PASTE(dtype_, XA_DTYPE)>(params, record, blockIdx.x);
}
