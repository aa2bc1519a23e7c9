// kernels/include/hopper_mla_fp8/ptx.cuh on the host.
#pragma once
#include "hopper/wgmma.cuh"

namespace xa::hopper_mla_fp8::ptx {

inline bool barrier_or(int id, int threads, bool mine) { return !emulator::barrier(id, threads, !mine); }

template <uint32_t kHigh, int kTiles>
void multiply(float (&d)[kTiles][4], const uint32_t (&a)[4], uint32_t low, int32_t accumulates) {
  hopper::Wgmma<F16, 8 * kTiles>::template rs<false>(d, a, uint64_t{kHigh} << 32 | low, accumulates);
}

}  // namespace xa::hopper_mla_fp8::ptx
