// Stores of the gradient of a bias.
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "chunk.cuh"
#include "element.cuh"
#include "params/bias.cuh"
#include "score_bias.cuh"

namespace xa {

/// The gradient of row `row` of the bias and its key 0.
template <typename E>
__device__ __forceinline__ E* dbias_row(const BiasBackwardParams& params, BiasRowIndex row) {
  return static_cast<E*>(params.dbias) + static_cast<int64_t>(row) * static_cast<uint32_t>(params.bias.keys);
}

/// Stores zeros to `count` elements at `to`, by the lanes of a warp.
template <typename E>
__device__ __forceinline__ void clear_elements(E* to, int32_t count) {
  constexpr int32_t kElements = 16 / static_cast<int32_t>(sizeof(E));
  const auto misaligned = static_cast<int32_t>(reinterpret_cast<uint64_t>(to) % 16 / sizeof(E));
  const int32_t head = min(count, (kElements - misaligned) % kElements), chunks = (count - head) / kElements;
  const int32_t lane = threadIdx.x % 32, tail = head + chunks * kElements;
  if (lane < head) to[lane] = E{};
  for (int32_t i = lane; i < chunks; i += 32) reinterpret_cast<uint4*>(to + head)[i] = make_uint4(0, 0, 0, 0);
  if (lane < count - tail) to[tail + lane] = E{};
}

/// Stores the gradients of keys `key`, an even number, and `key + 1` of the row at `row`, if they exist.
template <typename E>
__device__ __forceinline__ void store_dbias_pair(E* row, int32_t key, int32_t keys, float2 pair) {
  if (keys % 2 == 0) {
    if (key < keys) store_columns(row + key, pair);
  } else {
    if (key < keys) row[key] = rounded<E>(pair.x);
    if (key + 1 < keys) row[key + 1] = rounded<E>(pair.y);
  }
}

/// Stores dS of a warp's query rows as the gradient of a bias that is each pair's own. `rows` are their indices in the
/// bias, and `first_key` is the first column's key, an even number.
template <typename T, int kTiles, int kBlocks>
__device__ __forceinline__ void store_dbias(const BiasBackwardParams& params, const BiasRowIndex* rows,
                                            int32_t first_key, const float (&ds)[kTiles][kBlocks][4]) {
  with_bias_type<T>(params.dbias_is_f32, [&](auto type) {
    using E = decltype(type);
    const int32_t lane = ptx::thread() % 32, keys = params.bias.keys;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const BiasRowIndex row = rows[16 * tile + 8 * half + lane / 4];
        if (row == kNoBiasRow) continue;
        E* const to = dbias_row<E>(params, row);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const float (&x)[4] = ds[tile][block];
          store_dbias_pair(to, first_key + 8 * block + lane % 4 * 2, keys, make_float2(x[2 * half], x[2 * half + 1]));
        }
      }
    }
  });
}

}  // namespace xa
