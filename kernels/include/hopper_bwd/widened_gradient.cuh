// dK and dV in f32, of calls that ask for it and of split query heads.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "params/attention.cuh"

namespace xa::hopper {

/// Stores this warp's 16 keys of dK or dV as f32, `[rows, KV heads, num_columns]`. Each quad of lanes stores 32 bytes.
template <typename Shape, int kColumnTiles>
__device__ __forceinline__ void store_widened_gradient(const float (&x)[kColumnTiles][4], float scale, void* gradient,
                                                       const AttentionParams& forward, const BackwardTile& tile,
                                                       int32_t num_columns) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, lane = thread % 32;
  const int32_t first = tile.key_block * Shape::kKeys + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t key = first + 8 * half;
    if (key >= tile.num_keys) continue;
    const int64_t row = static_cast<int64_t>(tile.first_key + key) * forward.num_kv_heads + tile.kv_head;
    float* const to = static_cast<float*>(gradient) + row * num_columns + lane % 4 * 2;
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      if (8 * column >= num_columns) break;
      store_columns(to + 8 * column, make_float2(x[column][2 * half] * scale, x[column][2 * half + 1] * scale));
    }
  }
}

}  // namespace xa::hopper
