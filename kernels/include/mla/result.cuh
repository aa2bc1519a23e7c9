// The result of a work tile of multi-head latent attention, from its output in shared memory.
#pragma once

#include <cstdint>

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
  const Writer writer(params, work.tile, work.kv_head);
  const PartialRows partial(params.partial, work.kv_head);
  const int32_t row_vectors = params.value_dim / 4;  // float4
#pragma unroll 1
  for (int32_t item = thread; item < work.tile.num_rows * row_vectors; item += kThreads) {
    const int32_t row = item / row_vectors, column = (item - row * row_vectors) * 4;
    const PartialState part = part_of(row, column);
    if (partial_row >= 0) {
      partial.store(partial_row + row, column, part);
    } else {
      writer.write(row, column, part, log2_unit);
    }
  }
}

}  // namespace xa::mla
