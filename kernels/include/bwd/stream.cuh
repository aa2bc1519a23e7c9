// The loop of the gradients' kernels over the rows that they stream.
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "bwd/sequence_segment.cuh"

namespace xa {

/// Streams the blocks of a pass. `fetch(first, stage)` starts to load the block from row `first` on into a stage,
/// `wait(first, stage)` waits for what this thread has loaded of it, `take_up(first, chunk, stage)` computes with a
/// chunk of it; `prepare()` runs while the first block is on its way.
template <typename Shape, typename Fetch, typename Prepare, typename Wait, typename TakeUp>
__device__ __forceinline__ void stream_blocks(const Pass& pass, const Fetch& fetch, const Prepare& prepare,
                                              const Wait& wait, const TakeUp& take_up) {
  int32_t first = pass.columns.begin;
  fetch(first, 0);
  prepare();
  int stage = 0;
#pragma unroll 1
  while (first < pass.columns.end) {
    const int32_t next = ptx::opaque(first) + Shape::kBlock;
    const int next_stage = Shape::kStages > 1 ? stage ^ 1 : 0;
    wait(first, stage);
    __syncthreads();
    if (Shape::kStages > 1 && next < pass.columns.end) fetch(next, next_stage);
#pragma unroll 1
    for (int32_t chunk = 0; chunk < Shape::kBlock; chunk += Shape::kAtOnce) take_up(first, chunk, stage);
    if (Shape::kStages == 1) {
      __syncthreads();
      if (next < pass.columns.end) fetch(next, next_stage);
    }
    first = next;
    stage = next_stage;
  }
}

}  // namespace xa
