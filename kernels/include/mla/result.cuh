// The result of a work tile of multi-head latent attention, from its output in shared memory.
#pragma once

#include <cstdint>

#include "mla/shape.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "work_tile.cuh"

namespace xa::mla {

/// Stores the rows of a work tile in the workspace from partial row `partial_row` on, or in out and lse if that is
/// negative. `part_of(row, column)` is the state of a row with four columns of its output. kThreads threads call this;
/// this one is thread `thread`.
template <int kThreads, typename Writer, typename PartOf>
__device__ __forceinline__ void store_rows(const AttentionParams& params, const WorkTile& work, int32_t partial_row,
                                           float log2_unit, int32_t thread, const PartOf& part_of) {
  // A warp has whole rows: an item per four columns would take a division each.
  const int32_t lane_column = thread % 32 * 4;
  if (partial_row >= 0) {
    const PartialRows partial(params.partial, work.kv_head);
#pragma unroll 1
    for (int32_t row = thread / 32; row < work.tile.num_rows; row += kThreads / 32) {
#pragma unroll
      for (int32_t column = lane_column; column < kLatentValueDim; column += 128) {
        if (column < params.value_dim) partial.store(partial_row + row, column, part_of(row, column));
      }
    }
    return;
  }
  const Writer writer(params, work.tile, work.kv_head);
#pragma unroll 1
  for (int32_t row = thread / 32; row < work.tile.num_rows; row += kThreads / 32) {
#pragma unroll 1
    for (int32_t column = lane_column; column < params.value_dim; column += 128) {
      writer.write(row, column, part_of(row, column), log2_unit);
    }
  }
}

}  // namespace xa::mla
