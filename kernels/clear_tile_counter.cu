// Clears the tile counter of hopper_prefill*.cu, which starts without waiting for this kernel. A memset takes longer,
// because the kernel after it starts when it is complete.
//
// Launch: one thread.

#include "hopper/ptx.cuh"
#include "params/clear_tile_counter.cuh"

extern "C" __global__ void __launch_bounds__(1) XA_ENTRY(const __grid_constant__ xa::ClearTileCounterParams params) {
  xa::hopper::ptx::launch_dependents();
  *params.next_tile = 0;
}
