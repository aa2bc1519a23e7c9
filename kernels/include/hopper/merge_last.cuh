// The merge of split tiles in the launch that computes them: the CTA that is the last one to store a partial of a tile
// merges all of them. A combine kernel would start after the last CTA of the launch, although most CTAs go on with
// other work when the partials have been there for long.
#pragma once

#include <cstdint>

#include "output_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// What a CTA merges.
struct MergeTask {
  int32_t num_partials;  // 0: another CTA merges them
  int32_t first_range;   // the first work range that begins inside of the tile
};

/// Called by every thread when the result of a work tile is stored. If that is a partial, it is counted in the tile's
/// counter of `arrivals` [num_ranges - 1, Hkv], which is 0 before the launch, and the last partial's CTA merges them in
/// the order of their keys. `shared` has room for a MergeTask.
template <typename Shape, typename T>
__device__ __forceinline__ void merge_if_last(const AttentionParams& params, const WorkTile& work,
                                              const WorkRange& range, uint64_t* arrivals, uint8_t* shared) {
  if (range.partial_row < 0) return;
  auto& task = *reinterpret_cast<MergeTask*>(shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    const KvSplit::Ranges inside = range.kv_split.ranges_starting_in(range.tile_begin, range.tile_chunks);
    const auto first_range = static_cast<int32_t>(inside.first);
    const int32_t num_partials = static_cast<int32_t>(inside.last) - first_range + 2;
    const int32_t counter = (first_range - 1) * params.num_kv_heads + work.kv_head;
    // The barrier and the fences order this CTA's partial before its arrival, and other arrivals before the loads of
    // other partials.
    __threadfence();
    const auto arrived = atomicAdd(reinterpret_cast<unsigned long long*>(arrivals + counter), 1ull);
    __threadfence();
    task = MergeTask{static_cast<int32_t>(arrived) + 1 == num_partials ? num_partials : 0, first_range};
  }
  __syncthreads();
  const MergeTask merged = task;
  if (merged.num_partials == 0) return;
  const PartialRows partials(params.partial, work.kv_head);
  const RowWriter<T, false> writer(params, work.tile, work.kv_head);
  const int32_t row_items = params.value_dim / 4;
  const int32_t first_row = end_partial_row<Shape::kRows>(range.kv_split.num_ranges, merged.first_range - 1);
#pragma unroll 1
  for (int32_t item = threadIdx.x; item < work.tile.num_rows * row_items; item += Shape::kThreads) {
    const int32_t row = item / row_items, column = (item - row * row_items) * 4;
    PartialState state = partials.load(first_row + row, column);
#pragma unroll 2
    for (int32_t partial = 1; partial < merged.num_partials; ++partial) {
      const int32_t start = start_partial_row<Shape::kRows>(merged.first_range + partial - 1);
      merge(state, partials.load(start + row, column), params.partial.log2_unit);
    }
    writer.write(row, column, state, params.partial.log2_unit);
  }
}

}  // namespace xa::hopper
