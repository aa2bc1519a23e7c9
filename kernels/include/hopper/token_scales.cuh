// Scales of the rows of K and V, one per token and KV head, as ../token_scales.cuh, in Hopper's prefill over 8-bit
// pages: a load warp copies those of a block of keys, and the compute warps multiply scores and weights by them.
#pragma once

#include <cstdint>

#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"
#include "scale_exponents.cuh"
#include "token_scales_ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Loads the scales of the blocks of all tiles of the CTA. Run by a load warp.
template <typename Shape>
__device__ __forceinline__ void load_token_scales(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  const auto& scaled = reinterpret_cast<const HopperTokenScaleParams&>(params);
  const AttentionParams& attention = params.attention;
  const int32_t lane = threadIdx.x % 32;
  int32_t block_count = 0;
  bool has_tile = true;
#pragma unroll 1
  for (int32_t count = 0; has_tile; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const typename Shape::Tile& tile = pipeline.tile(tile_state);
    has_tile = tile.work.tile.num_rows > Shape::kNoRows;
    const int32_t head = divide(tile.work.kv_head, params.packs_per_kv_head);
    const int32_t* const pages = attention.block_table + tile.work.tile.sequence * attention.block_table_stride;
#pragma unroll 1
    for (int32_t block = tile.end_block - 1; has_tile && block >= tile.first_block; --block, ++block_count) {
      const PipelineState<Shape::kScaleStages> state(block_count);
      pipeline.scales_empty(state).producer_wait();
#pragma unroll
      for (int32_t first = 0; first < Shape::kKeys; first += 32) {
        const int32_t row = first + lane, key = block * Shape::kKeys + row;
        if (Shape::kKeys % 32 != 0 && row >= Shape::kKeys) break;
        // Only pages of visible keys are looked up. The scales of other keys are 0.
        const bool visible = key >= tile.visible_begin && key < tile.visible_end;
        const int32_t known = visible ? key : tile.visible_begin;
        const int32_t index = divide(known, params.page_divisor);
        const int32_t page = clamp(__ldg(pages + index), 0, attention.num_pages - 1);
        const auto copy = [&](const KvSource& scales, uint32_t to) {
          const float* const from = static_cast<const float*>(scales.base) + page * scales.page_stride +
                                    (known - index * attention.page_size) * scales.token_stride +
                                    head * scales.head_stride;
          xa::ptx::cp_async_4(to + 4 * row, from, visible);
        };
        copy(scaled.k_scales, pipeline.key_scales(state.stage));
        copy(scaled.v_scales, pipeline.value_scales(state.stage));
      }
      ptx::cp_async_arrive(pipeline.scales_full(state).address);
    }
    __syncwarp();
    if (lane == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

/// What a compute warp has to know of the scales of V: its weights and outputs are multiplied by 2^exponent, of the
/// lane's two rows.
struct TokenScaleWeights {
  int32_t exponent[2];

  __device__ __forceinline__ void reset() { exponent[0] = exponent[1] = kLargestScaleExponent; }

  /// Multiplies the scores of a block by the scales of K at shared address `scales`.
  template <int kKeyTiles>
  static __device__ __forceinline__ void scale_scores(float (&scores)[kKeyTiles][4], uint32_t scales) {
    const uint32_t address = scales + threadIdx.x % 4 * 8;
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
      const float2 scale = xa::ptx::load_shared_f32x2(address + 32 * block);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] *= i % 2 == 0 ? scale.x : scale.y;
    }
  }
  /// Multiplies the weights of a block, whose sums are already taken, by the scales of V at shared address `scales` and
  /// by the power of two, which may shrink: then `rescale`, the factor of earlier outputs, shrinks with it. In a block
  /// without masked keys all rows have the same largest scale, in the others a row has that of its keys whose weight is
  /// not 0.
  template <int kKeyTiles>
  __device__ __forceinline__ void scale_weights(float (&weights)[kKeyTiles][4], uint32_t scales, bool masked,
                                                float (&rescale)[2]) {
    const uint32_t lane = threadIdx.x % 32, address = scales + lane % 4 * 8;
    uint32_t largest[2] = {};
    if (!masked) {
      constexpr int kKeys = 8 * kKeyTiles;
#pragma unroll
      for (int key = 0; key < kKeys; key += 32) {
        const uint32_t own = min(key + lane, uint32_t{kKeys - 1});
        largest[0] = max(largest[0], exponent_of_scale(xa::ptx::load_shared_f32(scales + own * 4)));
      }
      largest[0] = largest[1] = __reduce_max_sync(~0u, static_cast<int32_t>(largest[0]));
    } else {
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        const float2 scale = xa::ptx::load_shared_f32x2(address + 32 * block);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t own = weights[block][i] != 0.0f ? exponent_of_scale(i % 2 == 0 ? scale.x : scale.y) : 0;
          largest[i / 2] = max(largest[i / 2], own);
        }
      }
#pragma unroll
      for (uint32_t& x : largest) {
        x = max(x, __shfl_xor_sync(~0u, x, 1));
        x = max(x, __shfl_xor_sync(~0u, x, 2));
      }
    }
    float power[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t next = min(exponent[half], exponent_for_scales(static_cast<int32_t>(largest[half])));
      rescale[half] *= exponent_change(next - exponent[half]);
      exponent[half] = next;
      power[half] = power_of_two(next);
    }
    const auto multiply = [&](const auto& product) {
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        const float2 scale = xa::ptx::load_shared_f32x2(address + 32 * block);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weights[block][i] = product(weights[block][i], (i % 2 == 0 ? scale.x : scale.y) * power[i / 2]);
        }
      }
    };
    if (masked) {
      // Of a masked key the product is 0, also if its scale is a NaN or an infinity.
      multiply([](float weight, float scale) { return weight == 0.0f ? 0.0f : weight * scale; });
    } else {
      multiply([](float weight, float scale) { return weight * scale; });
    }
  }
  /// Undoes the powers of two, after the last block.
  template <int kColumnTiles>
  __device__ __forceinline__ void finish(float (&output)[kColumnTiles][4]) const {
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[column][i] *= power_of_two(-exponent[i / 2]);
    }
  }
};

}  // namespace xa::hopper
