// synccheck: every warp initialises its own mbarriers with the same instruction. The compiler tells the tool the number
// of instructions that initialise barriers, not the number of barriers, and the tool's table has that size.
//
// WARPS: the number of warps.
#include "barriers.cuh"

__global__ void warp_barriers(int* results) {
  __shared__ uint64_t barriers[2 * WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t first = address_of(barriers) + 16 * warp;
  if (lane == 0) {
    barrier_init(first, 1);
    barrier_init(first + 8, 1);
  }
  __syncthreads();
  for (int phase = 0; phase < 6; ++phase) {
    const uint32_t barrier = first + 8 * (phase % 2);
    if (lane == 0) barrier_arrive(barrier);
    barrier_wait(barrier, phase / 2 % 2);
    __syncwarp();
  }
  if (lane == 0) {
    barrier_end(first);
    barrier_end(first + 8);
    atomicAdd(results, 1);
  }
}

int main() { return print<1>(warp_barriers, 32 * WARPS); }
