// Something is stored where an mbarrier is, as the merging of decode's warps once did beneath prefill. Results: for
// each of three turns (of one arrival each) after the store, whether the wait ends, 1, or does not within 1000
// attempts, 2.
//
// WORD: what is stored, 64 bits; without it nothing is.
#include "barriers.cuh"

__global__ void overwritten(int* results) {
  __shared__ uint64_t state;
  const uint32_t barrier = address_of(&state);
  if (threadIdx.x == 0) barrier_init(barrier, 1);
  __syncthreads();
#ifdef WORD
  if (threadIdx.x == 0) *const_cast<volatile uint64_t*>(&state) = WORD;
#endif
  __syncthreads();
  for (int turn = 0; turn < 3; ++turn) {
    // Before the arrival the phase must not be over.
    const bool early = is_over(barrier, turn % 2);
    __syncwarp();
    if (threadIdx.x == 0) barrier_arrive(barrier);
    __syncwarp();
    bool over = false;
    for (int attempt = 0; attempt < 1000 && !over; ++attempt) over = is_over(barrier, turn % 2);
    if (threadIdx.x == 0) results[turn] = (over ? 1 : 2) + (early ? 10 : 0);
  }
}

int main() { return print<3>(overwritten, 32); }
