// The main loop of the portable backward kernels: over the blocks of streamed rows.
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "bwd/sequence_segment.cuh"

namespace xa {

/// Streams the blocks of a segment: the first one is from streamed row `begin()` on, the one after the block from row
/// `first` on from `after(first)` on. `fetch(first, stage)` starts the copies of the block from streamed row `first` on
/// into a stage; `wait(first, stage)` waits for this thread's copies of it; `process_chunk(first, chunk, stage)`
/// computes with the rows from `chunk` on of it; `prepare()` runs while the first block is being copied.
///
/// With two stages the next block is copied during the products of this one; with one, after them.
template <typename Shape, typename Begin, typename After, typename Fetch, typename Prepare, typename Wait,
          typename ProcessChunk>
__device__ __forceinline__ void stream_blocks(const SequenceSegment& segment, const Begin& begin, const After& after,
                                              const Fetch& fetch, const Prepare& prepare, const Wait& wait,
                                              const ProcessChunk& process_chunk) {
  int32_t first = begin();
  fetch(first, 0);
  prepare();
  int stage = 0;
#pragma unroll 1
  while (first < segment.columns.end) {
    const int32_t next = after(ptx::opaque(first));
    const int next_stage = Shape::kStages > 1 ? stage ^ 1 : 0;
    wait(first, stage);
    __syncthreads();
    if (Shape::kStages > 1 && next < segment.columns.end) fetch(next, next_stage);
#pragma unroll 1
    for (int32_t chunk = 0; chunk < Shape::kBlock; chunk += Shape::kAtOnce) process_chunk(first, chunk, stage);
    if (Shape::kStages == 1) {
      __syncthreads();
      if (next < segment.columns.end) fetch(next, next_stage);
    }
    first = next;
    stage = next_stage;
  }
}

}  // namespace xa
