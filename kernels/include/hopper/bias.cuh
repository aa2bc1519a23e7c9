// A bias of pairs of rows and keys (../score_bias.cuh), of q's type, in Hopper's prefill of packed keys: a warp loads
// that of each block of keys by TMA, and the compute warps add it to the block's scores. A tile has rows of one query
// head, so its bias is a box of a matrix [row, key].
#pragma once

#include <cstdint>

#include "element.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "log2_units.cuh"
#include "logits_transform.cuh"
#include "params/attention.cuh"
#include "params/hopper_prefill.cuh"

namespace xa::hopper {

/// The logits transform of calls with a bias: `add_bias` makes logits of scores.
struct logits_bias : logits_none {
  using logits_none::logits_none;
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t = 0) {
    return params.score_factor * kLn2;
  }
  __device__ __forceinline__ float log2_unit() const { return kLog2E; }
};

/// Bytes of a row of an atom column of a stage, which has 64 keys.
constexpr int32_t kBiasRowBytes = 128;

/// The matrix of a tile's bias.
__device__ __forceinline__ int32_t bias_matrix(const BiasSource& bias, const PrefillTile& tile) {
  return tile.work.tile.sequence * bias.seq_matrices + tile.work.kv_head * bias.head_matrices;
}

/// Calls `load(tile)` for all tiles of the CTA, one after the other. Executed by the bias warp.
template <typename Shape, typename Load>
__device__ __forceinline__ void for_bias_tiles(const Pipeline<Shape>& pipeline, const Load& load) {
  bool has_tile = true;
#pragma unroll 1
  for (int32_t count = 0; has_tile; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const BiasTile& tile = pipeline.tile(tile_state);
    has_tile = tile.work.tile.num_rows > Shape::kNoRows;
    if (has_tile) load(tile);
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

/// Loads the bias of the blocks of all tiles of the CTA. Executed by a warp.
template <typename Shape>
__device__ __forceinline__ void load_bias(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  const HopperBiasParams& biased = reinterpret_cast<const HopperBiasParams&>(params);
  int32_t block_count = 0;
  for_bias_tiles(pipeline, [&](const BiasTile& tile) {
    if (threadIdx.x % 32 != 0) return;
    const int32_t matrix = bias_matrix(biased.source, tile);
#pragma unroll 1
    for (int32_t block = tile.end_block - 1; block >= tile.first_block; --block, ++block_count) {
      const PipelineState<Shape::kBiasStages> state(block_count);
      const Barrier full = pipeline.bias_full(state);
      pipeline.bias_empty(state).producer_wait();
      full.arrive_expect_tx(Shape::kBiasBytes);
#pragma unroll
      for (int column = 0; column < Shape::kKeys / 64; ++column) {
        ptx::tma_load(pipeline.bias(state.stage) + column * (Shape::kRows * kBiasRowBytes), biased.bias, full.address,
                      block * Shape::kKeys + 64 * column, tile.first_query, matrix, 0, 0);
      }
    }
  });
}

/// Scales the scores of a warp's 16 rows and adds their bias, the CTA's block number `block_count`.
template <typename Shape, typename T, int kKeyTiles>
__device__ __forceinline__ void add_bias(const Pipeline<Shape>& pipeline, float (&scores)[kKeyTiles][4], float factor,
                                         int32_t block_count) {
  const PipelineState<Shape::kBiasStages> state(block_count);
  // The row of which this lane passes the address to ldmatrix, and its chunk of those of two column tiles. The row is
  // computed anew for each block, because registers are scarce at D 256.
  const int32_t thread = xa::ptx::opaque(threadIdx.x), lane = thread % 32, chunk = lane / 16;
  const int32_t row = thread / 32 * 16 + lane % 16;
  const uint32_t from = pipeline.bias(state.stage) + row * kBiasRowBytes + (chunk ^ row % 8) * 16;
  pipeline.bias_full(state).wait();
#pragma unroll
  for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
    uint32_t bias[4];
    // The swizzle XORs the index of a chunk with the row.
    xa::ptx::ldmatrix_x4(bias, (from + pair / 4 * (Shape::kRows * kBiasRowBytes)) ^ (pair % 4 * 2 << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<T>(bias[i]);
      float (&s)[4] = scores[2 * pair + i / 2];
      s[i % 2 * 2] = __fmaf_rn(s[i % 2 * 2], factor, x.x);
      s[i % 2 * 2 + 1] = __fmaf_rn(s[i % 2 * 2 + 1], factor, x.y);
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) pipeline.bias_empty(state).arrive();
}

}  // namespace xa::hopper
