// The combine kernel of split-KV: merges the partials of the tiles that a decode launch has split, and writes out and
// lse (include/work_partition.cuh).
//
// The decode launch writes a SplitRecord for every boundary between work ranges (include/partial_rows.cuh). For each
// record there are one or more CTAs per KV head; they and those whose boundaries split the same tile divide its rows
// between them. The kernel has few instructions rather than few operations: it runs for some 2 us, and its instructions
// are in no cache when it starts.
//
// Compiled once for each XA_DTYPE of out: f16, bf16, f32.
// Launch: kCombineThreads threads, a grid of Hkv by a multiple of PartialResults::num_ranges - 1, no dynamic shared
// memory.

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "params/attention.cuh"
#include "params/combine.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "split_tile.cuh"

namespace xa {

/// Merges partials in the order of their keys, as batch_invariant needs: an item is four columns of a row, and a lane
/// merges kItems items at a time, with the loads of kPartials partials of each in flight.
template <typename T, int kPartials, int kItems>
__device__ __forceinline__ void merge_in_order(const SplitTile<T>& tile) {
  const float log2_unit = tile.params.partial.log2_unit;
  const int32_t row_items = tile.params.value_dim / 4, items = tile.record.tile.num_rows * row_items;
  constexpr int32_t kStep = kItems * kCombineThreads;
  for (int32_t first = tile.part * kStep + static_cast<int32_t>(threadIdx.x); first < items;
       first += tile.num_parts * kStep) {
    PartialState merged[kItems];
#pragma unroll 1
    for (int32_t partial = 0; partial < tile.record.num_partials; partial += kPartials) {
      PartialState states[kItems][kPartials];
#pragma unroll
      for (int32_t i = 0; i < kItems; ++i) {
        const int32_t item = min(first + i * kCombineThreads, items - 1), row = item / row_items;
#pragma unroll
        for (int32_t j = 0; j < kPartials; ++j) {
          states[i][j] = tile.partials.load(tile.partial_row(partial + j, row), (item - row * row_items) * 4);
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kItems; ++i) {
#pragma unroll
        for (int32_t j = 0; j < kPartials; ++j) {
          if (partial + j == 0) {
            merged[i] = states[i][j];
          } else if (partial + j < tile.record.num_partials) {
            merge(merged[i], states[i][j], log2_unit);
          }
        }
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kItems; ++i) {
      const int32_t item = first + i * kCombineThreads, row = item / row_items;
      if (item < items) tile.write(row, (item - row * row_items) * 4, merged[i]);
    }
  }
}

/// Merges rows with 8, 16 or 32 lanes each, kRows adjacent ones at a time, with the loads of kPartials partials of each
/// in flight. A lane has four columns of every partial, and the state of one partial, from which it computes that
/// partial's weight. Of rows with more than 128 columns, a warp merges a chunk of 128.
template <typename T, int kPartials, int kRows>
__device__ __forceinline__ void merge_rows(const SplitTile<T>& tile) {
  const float log2_unit = tile.params.partial.log2_unit;
  const int32_t value_dim = tile.params.value_dim, num_rows = tile.record.tile.num_rows;
  const int32_t count = tile.record.num_partials;
  const int32_t lanes = value_dim > 64 ? 32 : value_dim > 32 ? 16 : 8, lane = threadIdx.x % lanes;
  const int32_t warp_rows = 32 / lanes * kRows, log2_chunks = log2_row_chunks(value_dim);
  const auto column_of = [&](int32_t item) { return column_of_item(item, log2_chunks) + 4 * lane; };
#pragma unroll 1
  for (int32_t item = tile.part * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
       (item >> log2_chunks) * warp_rows < num_rows; item += tile.num_parts * kWarps) {
    const int32_t first_row =
        (item >> log2_chunks) * warp_rows + static_cast<int32_t>(threadIdx.x) % 32 / lanes * kRows;
    const int32_t loaded_column = min(column_of(item), value_dim - 4);
    PartialState merged[kRows];
#pragma unroll
    for (PartialState& state : merged) state = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    float weight[kRows] = {};
#pragma unroll 1
    for (int32_t partial = 0; partial < count; partial += kPartials) {
      float4 outputs[kRows][kPartials];
#pragma unroll
      for (int32_t r = 0; r < kRows; ++r) {
#pragma unroll
        for (int32_t j = 0; j < kPartials; ++j) {
          const int32_t row = tile.partial_row(partial + j, first_row + r);
          outputs[r][j] = *reinterpret_cast<const float4*>(tile.partials.output(row, loaded_column));
        }
      }
      // The states of the next `lanes` partials, while these outputs are on their way.
      if (partial % lanes == 0) {
#pragma unroll
        for (int32_t r = 0; r < kRows; ++r) {
          float2 state = tile.partials.state(tile.partial_row(partial + lane, first_row + r));
          if (partial + lane >= count) state = make_float2(-INFINITY, 0.0f);
          weight[r] = add_states(merged[r], state, lanes, log2_unit);
        }
      }
#pragma unroll
      for (int32_t r = 0; r < kRows; ++r) {
#pragma unroll
        for (int32_t j = 0; j < kPartials; ++j) {
          // Partials past the last one have the weight 0, and the output of the last one.
          const float w = __shfl_sync(~0u, weight[r], partial % lanes + j, lanes);
          add_weighted(merged[r].output, w, outputs[r][j]);
        }
      }
    }
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      // Computed again to save a register.
      const int32_t column = column_of(ptx::opaque(item));
      if (column < value_dim) tile.write(first_row + r, column, merged[r]);
    }
  }
}

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kCombineThreads, xa::kCombineCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  xa::SplitTile<T>::find(params, [&](const xa::SplitTile<T>& tile) {
    if (params.partial.max_fixed_splits > 0) {
      xa::merge_in_order<T, 4, 1>(tile);
    } else if (tile.record.num_partials <= 4) {
      xa::merge_rows<T, 4, 2>(tile);
    } else {
      xa::merge_rows<T, 8, 1>(tile);
    }
  });
}
