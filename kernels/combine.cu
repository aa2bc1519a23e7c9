// The combine kernel of split-KV: merges the partials of the tiles that a decode launch has split, and writes out and
// lse (include/work_partition.cuh).
//
// The decode launch writes a SplitRecord for every boundary between work ranges (include/partial_rows.cuh). For each
// record there are one or more CTAs per KV head; they and those whose boundaries split the same tile divide its rows
// between them. Partials are merged in the order of their keys.
//
// Compiled once for each XA_DTYPE of out: f16, bf16, f32.
// Launch: kCombineThreads threads, a grid of Hkv by a multiple of PartialResults::num_ranges - 1, no dynamic shared
// memory.

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

/// A tile of up to this many partials takes the loop that merges several items at a time.
constexpr int32_t kFewPartials = kLoadsInFlight / kCombineItemsAtOnce;

/// The partial row of row 0 of a partial.
__device__ __forceinline__ int64_t first_row_of(const SplitRecord& record, int32_t partial) {
  return partial == 0 ? record.first_row : record.second_row + static_cast<int64_t>(partial - 1) * record.row_stride;
}

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
      states[i] = partial_rows.load(first_row_of(record, min(first + i, end - 1)) + row, column);
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

/// The columns of a row that a lane merges at a time: four, from `column` on.
struct Item {
  int32_t row;
  int32_t column;

  __device__ __forceinline__ Item(int32_t index, int32_t row_items)
      : row(index / row_items), column((index - row * row_items) * 4) {}
};

/// Merges this CTA's part of a tile with up to kFewPartials partials: kCombineItemsAtOnce items per lane, so that as
/// many loads are in flight as with many partials.
template <typename T>
__device__ __forceinline__ void merge_few_partials(const AttentionParams& params, const SplitRecord& record,
                                                   int32_t kv_head, int32_t part, int32_t num_parts) {
  const float log2_unit = params.partial.log2_unit;
  const int32_t row_items = params.value_dim / 4, items = record.tile.num_rows * row_items;
  const PartialRows partial_rows(params.partial, kv_head);
  const RowWriter<T, false> writer(params, record.tile, kv_head);
  constexpr int32_t kStep = kCombineItemsAtOnce * kCombineThreads;
  for (int32_t first = part * kStep + static_cast<int32_t>(threadIdx.x); first < items; first += num_parts * kStep) {
    PartialState states[kCombineItemsAtOnce][kFewPartials];
#pragma unroll
    for (int32_t i = 0; i < kCombineItemsAtOnce; ++i) {
      const Item item(min(first + i * kCombineThreads, items - 1), row_items);
#pragma unroll
      for (int32_t j = 0; j < kFewPartials; ++j) {
        states[i][j] = partial_rows.load(first_row_of(record, min(j, record.num_partials - 1)) + item.row, item.column);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kCombineItemsAtOnce; ++i) {
      if (first + i * kCombineThreads >= items) break;
      const Item item(first + i * kCombineThreads, row_items);
#pragma unroll
      for (int32_t j = 1; j < kFewPartials; ++j) {
        if (j < record.num_partials) merge(states[i][0], states[i][j], log2_unit);
      }
      writer.write(item.row, item.column, states[i][0], log2_unit);
    }
  }
}

/// Merges this CTA's part of a split tile. An item is four columns of a row, and a lane has one item at a time. `warps`
/// adjacent warps have the same 32 items and merge different partials of them; the first of these warps merges their
/// results and writes them.
template <typename T>
__device__ __forceinline__ void merge_many_partials(const AttentionParams& params, const SplitRecord& record,
                                                    int32_t kv_head, int32_t part, int32_t num_parts) {
  __shared__ PartialState merged[kWarps][32];
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t warps = warps_per_item(params, record.num_partials), warp_groups = kWarps / warps;
  const int32_t warp_partials = (record.num_partials + warps - 1) / warps, begin = warp % warps * warp_partials;
  const int32_t end = min(begin + warp_partials, record.num_partials);
  const int32_t row_items = params.value_dim / 4, items = record.tile.num_rows * row_items;
  const float log2_unit = params.partial.log2_unit;
  const PartialRows partial_rows(params.partial, kv_head);
  const RowWriter<T, false> writer(params, record.tile, kv_head);
  for (int32_t first = part * warp_groups * 32; first < items; first += num_parts * warp_groups * 32) {
    // All warps must reach the barriers. Those without an item compute the last one and do not write it.
    const int32_t index = first + warp / warps * 32 + lane;
    const Item item(min(index, items - 1), row_items);
    PartialState state = merge_partials(record, partial_rows, begin, end, item.row, item.column, log2_unit);
    if (warps > 1) {
      __syncthreads();
      merged[warp][lane] = state;
      __syncthreads();
      for (int32_t i = 1; warp % warps == 0 && i < warps; ++i) merge(state, merged[warp + i][lane], log2_unit);
    }
    if (warp % warps == 0 && index < items) writer.write(item.row, item.column, state, log2_unit);
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kCombineThreads)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  const int32_t num_records = params.partial.num_ranges - 1, ctas_per_record = gridDim.y / num_records;
  const int32_t index = blockIdx.y / num_records;
  const auto* const records = static_cast<const xa::SplitRecord*>(params.partial.split_records);
  const xa::SplitRecord record = records[blockIdx.y - index * num_records];
  const int32_t part = record.index * ctas_per_record + index, num_parts = record.num_records * ctas_per_record;
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  if (record.num_partials == 0) return;
  if (record.num_partials <= xa::kFewPartials) {
    xa::merge_few_partials<T>(params, record, blockIdx.x, part, num_parts);
  } else {
    xa::merge_many_partials<T>(params, record, blockIdx.x, part, num_parts);
  }
}
