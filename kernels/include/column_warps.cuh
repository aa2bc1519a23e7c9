// Warps that have the same rows and keys but different columns of Q, K, V and O: past 256 columns a warp has too few
// registers for the output of 16 rows. Each multiplies its own columns of Q and K, and the products are added up in
// shared memory; so every column of K and V is read by one warp per row tile, and all of these warps have the same
// scores and the same softmax.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace xa {

/// The first column of this warp.
template <typename Shape>
__device__ __forceinline__ int32_t first_warp_column() {
  if constexpr (Shape::kColumnWarps == 1) return 0;
  return threadIdx.x / 32 % Shape::kColumnWarps * Shape::kWarpColumns;
}

/// The first row of this warp in its tile.
template <typename Shape>
__device__ __forceinline__ int32_t first_warp_row() {
  return threadIdx.x / (32 * Shape::kColumnWarps) * 16 * Shape::kRowTiles;
}

/// Makes `scores`, this warp's part of a sum, the sum over kWarps warps, the same bits in each of them. Warp `warp` of
/// these stores its part at shared address `parts` + `warp` * `pitch`. `barrier` waits for these warps; after it, all
/// parts have been read.
template <int kWarps, int kTiles, int kBlocks, typename Barrier>
__device__ __forceinline__ void add_up_columns(float (&scores)[kTiles][kBlocks][4], uint32_t parts, int32_t pitch,
                                               int32_t warp, const Barrier& barrier) {
  const uint32_t lane = threadIdx.x % 32 * 16, own = parts + warp * pitch + lane;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float (&part)[4] = scores[tile][block];
      ptx::store_shared_16(own + (tile * kBlocks + block) * 512,
                           make_uint4(__float_as_uint(part[0]), __float_as_uint(part[1]), __float_as_uint(part[2]),
                                      __float_as_uint(part[3])));
    }
  }
  barrier();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const auto part = [&](int32_t of, float (&numbers)[4]) {
        const float4 x = ptx::load_shared_f32x4(parts + of * pitch + lane + (tile * kBlocks + block) * 512);
        numbers[0] = x.x, numbers[1] = x.y, numbers[2] = x.z, numbers[3] = x.w;
      };
      float (&sum)[4] = scores[tile][block];
      if constexpr (kWarps > 2) part(0, sum);
#pragma unroll
      for (int other = 1; other < kWarps; ++other) {
        // Of two parts the other one is enough, because a + b = b + a.
        float numbers[4];
        part(kWarps == 2 ? warp ^ 1 : other, numbers);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += numbers[i];
      }
    }
  }
  barrier();
}

/// Prefill: the same for the scores of a block, whose rows of K are at shared address `keys`. Each warp's part takes
/// the place of the rows that it copies, which all warps have read.
template <typename Shape>
__device__ __forceinline__ void add_up_block(float (&scores)[Shape::kRowTiles][Shape::kKeys / 8][4], uint32_t keys) {
  constexpr int kColumnWarps = Shape::kColumnWarps, kWarpBytes = Shape::kKeysPerLoad * Shape::Rows::kPitch;
  if constexpr (kColumnWarps > 1) {
    const int32_t warp = threadIdx.x / 32, first = warp / kColumnWarps * kColumnWarps;
    add_up_columns<kColumnWarps>(scores, keys + first * kWarpBytes, kWarpBytes, warp - first,
                                 [&] { ptx::barrier_sync<32 * kColumnWarps>(1 + warp / kColumnWarps); });
  }
}

/// `x`. With `kIsOpaque` the compiler computes what depends on it where it is used: in registers throughout a loop over
/// keys it spills.
template <bool kIsOpaque, typename T>
__device__ __forceinline__ T opaque_if(T x) {
  if constexpr (kIsOpaque) return static_cast<T>(ptx::opaque(static_cast<int32_t>(x)));
  return x;
}

}  // namespace xa
