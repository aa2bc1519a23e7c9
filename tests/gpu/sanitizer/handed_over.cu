// racecheck: a warp stores a plan in shared memory, another reads it, and both say so at mbarriers, turn by turn: as
// plan_tiles and load_blocks of kernels/include/hopper. __syncwarp orders a warp's lanes before the one that arrives.
//
// PLANS: the lane that stores the plan. THERE, BACK: how many lanes of the warp arrive where the plan is there, and
// where it is no longer needed: 1 or 32. READS: lanes that read, 1 or 32. AFTER: whether __syncwarp follows each wait.
#include "barriers.cuh"

__global__ void handed_over(int* results) {
  __shared__ uint64_t barriers[4];  // full and empty, two places each
  __shared__ int plans[2];
  const int lane = threadIdx.x % 32;
  const uint32_t full = address_of(barriers), empty = full + 16;
  if (threadIdx.x == 0) {
    barrier_init(full, THERE);
    barrier_init(full + 8, THERE);
    barrier_init(empty, BACK);
    barrier_init(empty + 8, BACK);
  }
  __syncthreads();
  for (int turn = 0; turn < 10; ++turn) {
    const uint32_t place = turn % 2, parity = turn / 2 % 2;
    if (threadIdx.x < 32) {
      barrier_wait(empty + 8 * place, parity ^ 1);
      if (AFTER) __syncwarp();
      if (lane == PLANS) plans[place] = turn;
      __syncwarp();
      if (lane < THERE) barrier_arrive(full + 8 * place);
      __syncwarp();
    } else {
      barrier_wait(full + 8 * place, parity);
      if (AFTER) __syncwarp();
      int plan = 0;
      if (lane < READS) plan = plans[place];
      __syncwarp();
      if (lane < BACK) barrier_arrive(empty + 8 * place);
      if (lane == 0) results[0] += plan;
    }
  }
}

int main() { return print<1>(handed_over, 64); }
