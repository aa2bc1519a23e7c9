// synccheck: every warp makes mbarriers of its own, by one instruction. The compiler reports to the tool how many
// instructions make barriers, not how many barriers they make; what the tool keeps of barriers is as large as that.
//
// WARPS: how many.
#include "barriers.cuh"

__global__ void own_barriers(int* results) {
  __shared__ uint64_t barriers[2 * WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t mine = address_of(barriers) + 16 * warp;
  if (lane == 0) {
    barrier_init(mine, 1);
    barrier_init(mine + 8, 1);
  }
  __syncthreads();
  for (int turn = 0; turn < 6; ++turn) {
    const uint32_t barrier = mine + 8 * (turn % 2);
    if (lane == 0) barrier_arrive(barrier);
    barrier_wait(barrier, turn / 2 % 2);
    __syncwarp();
  }
  if (lane == 0) {
    barrier_end(mine);
    barrier_end(mine + 8);
    atomicAdd(results, 1);
  }
}

int main() { return print<1>(own_barriers, 32 * WARPS); }
