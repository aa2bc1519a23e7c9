// Clears the counters of a kernel that starts without waiting for this one: the tile counter of hopper_prefill*.cu, and
// what hopper_fused.cu has besides. A memset takes longer, because the kernel after it starts when it is complete.
//
// Launch: one CTA.

#include <cstdint>

#include "hopper/ptx.cuh"
#include "params/clear_tile_counter.cuh"

extern "C" __global__ void __launch_bounds__(xa::kClearThreads)
    XA_ENTRY(const __grid_constant__ xa::ClearTileCounterParams params) {
  xa::hopper::ptx::launch_dependents();
  for (int32_t i = threadIdx.x; i < params.count; i += blockDim.x) params.next_tile[i] = 0;
}
