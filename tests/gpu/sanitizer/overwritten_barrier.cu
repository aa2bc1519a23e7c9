// Stores to the memory of an mbarrier, as a bug in an earlier fused kernel did. Results: for each of three phases (of
// one arrival each) after the store, 1 if the wait ends and 2 if it does not within 1000 attempts; 10 is added if the
// phase was complete before the arrival.
//
// WORD: the 64 bits that are stored; without it nothing is stored.
#include "barriers.cuh"

__global__ void overwritten_barrier(int* results) {
  __shared__ uint64_t state;
  const uint32_t barrier = address_of(&state);
  if (threadIdx.x == 0) barrier_init(barrier, 1);
  __syncthreads();
#ifdef WORD
  if (threadIdx.x == 0) *const_cast<volatile uint64_t*>(&state) = WORD;
#endif
  __syncthreads();
  for (int phase = 0; phase < 3; ++phase) {
    // Before the arrival the phase must not be complete.
    const bool early = is_complete(barrier, phase % 2);
    __syncwarp();
    if (threadIdx.x == 0) barrier_arrive(barrier);
    __syncwarp();
    bool complete = false;
    for (int attempt = 0; attempt < 1000 && !complete; ++attempt) complete = is_complete(barrier, phase % 2);
    if (threadIdx.x == 0) results[phase] = (complete ? 1 : 2) + (early ? 10 : 0);
  }
}

int main() { return print<3>(overwritten_barrier, 32); }
