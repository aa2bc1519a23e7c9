// Clears padding rows at the end of a launch whose grid is KV heads by work ranges.
#pragma once

#include <cstdint>

#include "output_rows.cuh"
#include "params/attention.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// Clears this CTA's part of the padding rows, if the launch has to. `work` and `range` are those at the end of its
/// work range, and the `kThreads` first threads of the CTA call this.
template <typename T, int kThreads>
__device__ __forceinline__ void clear_padding_rows(const AttentionParams& params, const WorkTile& work,
                                                   const WorkRange& range) {
  if (params.clears_padding_rows == 0) return;
  clear_padding_rows<T, kThreads>(params, starts_ascend(work.maxima), range.live,
                                  static_cast<int32_t>(blockIdx.y * gridDim.x + blockIdx.x),
                                  static_cast<int32_t>(gridDim.x * gridDim.y));
}

}  // namespace xa
