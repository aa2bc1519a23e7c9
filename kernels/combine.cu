// Makes rows of out and lse of the tiles that a decode launch has cut into parts (include/work_partition.cuh).
//
// The decode launch leaves a SplitRecord for every end of a share (include/partial_rows.cuh). One CTA a KV head looks
// at each; those whose ends cut the same tile share out its rows. Parts are folded in the order of their keys.
//
// Compiled once for each XA_DTYPE of out: f16, bf16, f32.
// Launch: kCombineThreads threads, a grid of Hkv by groups - 1, no dynamic shared memory.

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "params/combine.cuh"
#include "partial_rows.cuh"

namespace xa {

constexpr int32_t kWarps = kCombineThreads / 32;

/// Parts whose reads are under way together.
constexpr int32_t kAtOnce = 12;

/// Folds parts `begin` to `end`, at least one.
__device__ __forceinline__ PartialState merge_partials(const SplitRecord& record, const PartialRows& partial,
                                                       int32_t begin, int32_t end, int32_t row, int32_t column,
                                                       float log2_unit) {
  PartialState folded = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 1
  for (int32_t first = begin; first < end; first += kAtOnce) {
    PartialState partials[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      const int32_t part = min(first + i, end - 1);
      const int64_t first_row =
          part == 0 ? record.first_row : record.second_row + static_cast<int64_t>(part - 1) * record.row_stride;
      partials[i] = partial.load(first_row + row, column);
    }
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (first + i == begin) {
        folded = partials[i];
      } else if (first + i < end) {
        merge(folded, partials[i], log2_unit);
      }
    }
  }
  return folded;
}

/// Warps that share out the parts of the same columns. With batch_invariant one takes them all, in order.
__device__ __forceinline__ int32_t warps_a_column(const AttentionParams& params, int32_t num_partials) {
  int32_t warps = 1;
  while (params.partial.max_fixed_splits == 0 && warps < kWarps && num_partials > warps * kAtOnce) warps *= 2;
  return warps;
}

template <typename T>
__device__ __forceinline__ void merge(const AttentionParams& params, const SplitRecord& record, int32_t kv_head) {
  __shared__ PartialState folded[kWarps][32];
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t warps = warps_a_column(params, record.num_partials), shares = kWarps / warps;
  const int32_t my_parts = (record.num_partials + warps - 1) / warps, begin = warp % warps * my_parts;
  const int32_t end = min(begin + my_parts, record.num_partials);
  const int32_t fours = params.value_dim / 4, items = record.tile.num_rows * fours;
  const float log2_unit = params.partial.log2_unit;
  const PartialRows partial(params.partial, kv_head);
  const RowWriter<T, false> writer(params, record.tile, kv_head);
  for (int32_t first = record.index * shares * 32; first < items; first += record.num_records * shares * 32) {
    // Every warp takes part in the barriers.
    const int32_t item = first + warp / warps * 32 + lane, row = min(item, items - 1) / fours;
    const int32_t column = (min(item, items - 1) - row * fours) * 4;
    PartialState part = merge_partials(record, partial, begin, end, row, column, log2_unit);
    if (warps > 1) {
      __syncthreads();
      folded[warp][lane] = part;
      __syncthreads();
      for (int32_t i = 1; warp % warps == 0 && i < warps; ++i) merge(part, folded[warp + i][lane], log2_unit);
    }
    if (warp % warps == 0 && item < items) writer.write(row, column, part, log2_unit);
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kCombineThreads)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  const xa::SplitRecord record = static_cast<const xa::SplitRecord*>(params.partial.split_records)[blockIdx.y];
  if (record.num_partials > 0) xa::merge<xa::XA_PASTE(dtype_, XA_DTYPE)>(params, record, blockIdx.x);
}
