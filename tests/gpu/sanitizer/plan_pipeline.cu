// racecheck: a pipeline with two stages. A producer warp stores a plan in shared memory, a consumer warp reads it, and
// full and empty mbarriers order them, as in kernels/include/hopper. __syncwarp orders a warp's lanes before an
// arrival.
//
// WRITER: the lane that stores the plan. FULL, EMPTY: the number of lanes that arrive at the full and the empty
// barrier, 1 or 32. READERS: the number of lanes that read, 1 or 32. SYNC: whether __syncwarp follows each wait.
#include "barriers.cuh"

__global__ void plan_pipeline(int* results) {
  __shared__ uint64_t barriers[4];  // full and empty, of two stages
  __shared__ int plans[2];
  const int lane = threadIdx.x % 32;
  const uint32_t full = address_of(barriers), empty = full + 16;
  if (threadIdx.x == 0) {
    barrier_init(full, FULL);
    barrier_init(full + 8, FULL);
    barrier_init(empty, EMPTY);
    barrier_init(empty + 8, EMPTY);
  }
  __syncthreads();
  for (int iteration = 0; iteration < 10; ++iteration) {
    const uint32_t stage = iteration % 2, parity = iteration / 2 % 2;
    if (threadIdx.x < 32) {
      barrier_wait(empty + 8 * stage, parity ^ 1);
      if (SYNC) __syncwarp();
      if (lane == WRITER) plans[stage] = iteration;
      __syncwarp();
      if (lane < FULL) barrier_arrive(full + 8 * stage);
      __syncwarp();
    } else {
      barrier_wait(full + 8 * stage, parity);
      if (SYNC) __syncwarp();
      int plan = 0;
      if (lane < READERS) plan = plans[stage];
      __syncwarp();
      if (lane < EMPTY) barrier_arrive(empty + 8 * stage);
      if (lane == 0) results[0] += plan;
    }
  }
}

int main() { return print<1>(plan_pipeline, 64); }
