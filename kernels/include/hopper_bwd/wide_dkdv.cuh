// dK and dV past 128 columns. A CTA holds 64 keys while query blocks stream past. One warpgroup computes S^T = K Q^T, P
// and dV = P^T dO, the other one dP^T = V dO^T, dS and dK = dS^T Q: each accumulates one gradient of 64 keys in
// registers. As in compute.cuh scores are transposed, so that P^T and dS^T are operand A in the registers in which they
// are computed. dS = P (dP - delta) needs P in the second warpgroup too: P goes there through shared memory in f16,
// which rounds less than the bf16 of dS does.
//
// Both warpgroups compute P or dS of the next block while the product of their gradient runs, so that the tensor cores
// stay busy meanwhile.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "hopper_bwd/compute.cuh"
#include "hopper_bwd/wide_operands.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Stores dK or dV of a tile's 64 keys to `to`, [rows, KV heads, num_columns], of type T or f32.
template <typename Shape, typename T, int kAtomColumns>
__device__ __forceinline__ void store_dk_or_dv(const WideGradient<kAtomColumns>& d, float scale, void* to,
                                               const HopperBackwardParams& params, const BackwardTile& tile,
                                               int32_t num_columns) {
  const int32_t first = tile.key_block * Shape::kKeys;
  const int64_t row_stride = static_cast<int64_t>(params.base.forward.num_kv_heads) * num_columns;
  const int64_t element = (tile.first_key + first) * row_stride + tile.kv_head * num_columns;
  const auto store = [&](auto* gradient) {
    store_gradient(d, scale, gradient + element, row_stride, tile.num_keys - first, num_columns);
  };
  if (params.widens_key_gradients != 0) {
    store(static_cast<float*>(to));
  } else {
    store(static_cast<T*>(to));
  }
}

/// Computes P and dV of all tiles of the CTA. Executed by a warpgroup.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_dv(const HopperBackwardParams& params, const WidePipeline<Shape>& pipeline) {
  constexpr int kTiles = Shape::kQueries / 8;
  const AttentionParams& forward = params.base.forward;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t own_p = pipeline.p() + threadIdx.x % 128 * 16;
  typename WidePipeline<Shape>::StreamedState read_state, release_state;
  typename WidePipeline<Shape>::StreamedValuesState value_read_state;
  const auto streamed_full = [&](auto state) { return pipeline.streamed_full(state); };
  const auto streamed_empty = [&](auto state) { return pipeline.streamed_empty(state); };
  const auto streamed = [&](auto state) { return pipeline.streamed(state); };
  const auto streamed_values_full = [&](auto state) { return pipeline.streamed_values_full(state); };
  const auto streamed_values_empty = [&](auto state) { return pipeline.streamed_values_empty(state); };
  const auto streamed_values = [&](auto state) { return pipeline.streamed_values(state); };
  float scores[kTiles][4];
  HeldRows<Shape, Shape::kAtomColumns> held;
  WideGradient<Shape::kValueAtomColumns> dv;
  int32_t step = 0;
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    pipeline.tile_full(tile_state).wait();
    const BackwardTile& tile = pipeline.tile(tile_state);
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    const int32_t first_block = uniform(tile.first_block), num_blocks = uniform(tile.num_blocks);
    // Query blocks that need no mask.
    BlockRange unmasked = {INT32_MIN, INT32_MAX};
    {
      const int32_t first_key = key_block * 64, shift = uniform(tile.shift);
      if (forward.window_right >= 0) {
        unmasked.begin = -floor_div(-(first_key + 63 - shift - forward.window_right), Shape::kQueries);
      }
      if (forward.window_left >= 0) {
        unmasked.end = floor_div(first_key - shift + forward.window_left + 1, Shape::kQueries);
      }
      if constexpr (Shape::kHasAlibi) unmasked.end = min(unmasked.end, uniform(tile.num_queries) / Shape::kQueries);
      if (first_key + 64 > uniform(tile.num_keys)) unmasked.end = INT32_MIN;
    }
    const int32_t num_steps = uniform(tile.num_heads) * num_blocks;
    int32_t steps_left = num_steps, block = first_block;
    uint32_t p[kTiles / 2][4];
    dv.clear();
    const auto start_s = [&] {
      wait_for_atom_columns<Shape::kAtomColumns>(read_state, streamed_full);
      start_s_or_dp<T>(scores, held, read_state, streamed);
    };
    const auto start_dv = [&] {
      wait_for_atom_columns<Shape::kValueAtomColumns>(value_read_state, streamed_values_full);
      start_gradient<T, Shape>(dv, p, value_read_state, streamed_values);
    };
    const auto finish_dv = [&] {
      ptx::wgmma_wait_group<0>();
      release_atom_columns<Shape::kValueAtomColumns>(value_read_state, streamed_values_empty);
    };
    // Computes P, as operand A of dV and for the other warpgroup. In the first block of a tile no dV is pending.
    const auto compute_p = [&] {
      // S of the last block is complete, so K is no longer needed.
      if (!Shape::kStreamsHeld && steps_left == 1 && lane == 0) pipeline.held_empty(tile_count).arrive();
      const PipelineState<2> step_state(step);
      pipeline.lses_full(step_state).wait();
      const RowStatPairs lses(pipeline.lses(step_state.stage));
      if (!unmasked.contains(block)) {
        for_masked<Shape>(forward, tile, block, [&](int column, int i) { scores[column][i] = -INFINITY; });
      }
      const auto transform =
          logits_transform<Shape>(forward, tile, block, pipeline.lses(step_state.stage) + Shape::kSlopeOffset);
      uint32_t next_p[kTiles / 2][4];
      const float scale = forward.softmax_scale_log2;
#pragma unroll
      for (int column = 0; column < kTiles; ++column) {
        if (Shape::kReleasesEarly && column == kTiles / 2 && steps_left != num_steps) finish_dv();
        const float2 lse = lses.pair(column);
        float (&s)[4] = scores[column];
        float p_f32[4];
        if constexpr (Shape::kHasSoftcap) {
          transform.softcap(s[0], s[2], lse.x, p_f32[0], p_f32[2]);
          transform.softcap(s[1], s[3], lse.y, p_f32[1], p_f32[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float of_row = i % 2 == 0 ? lse.x : lse.y;
            if constexpr (Shape::kHasAlibi) {
              p_f32[i] = s[i] = transform.alibi(s[i], of_row, 8 * column + i % 2 - i / 2 * 8);
            } else {
              p_f32[i] = s[i] = xa::ptx::exp2_approx(__fmaf_rn(s[i], scale, -of_row));
            }
          }
        }
        next_p[column / 2][column % 2 * 2] = Element<T>::pack(p_f32[0], p_f32[1]);
        next_p[column / 2][column % 2 * 2 + 1] = Element<T>::pack(p_f32[2], p_f32[3]);
      }
      if constexpr (Shape::kHasSoftcap) {
        if (!unmasked.contains(block)) {
          for_masked<Shape>(forward, tile, block, [&](int column, int i) {
            next_p[column / 2][column % 2 * 2 + i / 2] &= i % 2 == 0 ? 0xffff0000 : 0x0000ffff;
          });
        }
      }
      __syncwarp();
      if (lane == 0) pipeline.lses_empty(step_state).arrive();
      pipeline.p_empty(step).producer_wait();
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
        const auto pair_of = [&](int i) {
          const float (&s)[4] = scores[2 * k + i / 2];
          return Element<F16>::pack(s[i % 2 * 2], s[i % 2 * 2 + 1]);
        };
        xa::ptx::store_shared_16(own_p + k * 2048, make_uint4(pair_of(0), pair_of(1), pair_of(2), pair_of(3)));
      }
      __syncwarp();
      if (lane == 0) pipeline.p_full(step).arrive();
      ++step;
      if (!Shape::kReleasesEarly && steps_left != num_steps) finish_dv();
      // ptxas would otherwise write these registers while dV still reads them, and serialise all products.
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[k][i] = ptx::mov_volatile(next_p[k][i]);
      }
    };
    if constexpr (Shape::kStreamsHeld) {
      held.load_streamed(read_state, streamed_full, streamed);
    } else {
      pipeline.held_full(tile_count).wait();
      held.load(pipeline.held());
    }
    start_s();
    ptx::wgmma_wait_group<0>();
    if constexpr (Shape::kStreamsHeld) {
      release_atom_columns<Shape::kAtomColumns>(release_state, streamed_empty);
      release_unread<Shape::kValueAtomColumns>(value_read_state, streamed_values_full, streamed_values_empty);
    }
    release_atom_columns<Shape::kAtomColumns>(release_state, streamed_empty);
    compute_p();
#pragma unroll 1
    while (--steps_left > 0) {
      if (++block == first_block + num_blocks) block = first_block;
      start_s();
      start_dv();
      ptx::wgmma_wait_group<1>();  // S
      release_atom_columns<Shape::kAtomColumns>(release_state, streamed_empty);
      compute_p();
    }
    start_dv();
    finish_dv();
    store_dk_or_dv<Shape, T>(dv, 1.0f, params.base.dv, params, tile, forward.value_dim);
    __syncwarp();
    if (lane == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

/// Computes dS and dK of all tiles of the CTA. Executed by a warpgroup.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_dk(const HopperBackwardParams& params, const WidePipeline<Shape>& pipeline) {
  constexpr int kTiles = Shape::kQueries / 8;
  const AttentionParams& forward = params.base.forward;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t own_p = pipeline.p() + threadIdx.x % 128 * 16;
  typename WidePipeline<Shape>::StreamedState read_state;
  typename WidePipeline<Shape>::StreamedValuesState value_read_state, value_release_state;
  const auto streamed_full = [&](auto state) { return pipeline.streamed_full(state); };
  const auto streamed_empty = [&](auto state) { return pipeline.streamed_empty(state); };
  const auto streamed = [&](auto state) { return pipeline.streamed(state); };
  const auto streamed_values_full = [&](auto state) { return pipeline.streamed_values_full(state); };
  const auto streamed_values_empty = [&](auto state) { return pipeline.streamed_values_empty(state); };
  const auto streamed_values = [&](auto state) { return pipeline.streamed_values(state); };
  float dp[kTiles][4];
  HeldRows<Shape, Shape::kValueAtomColumns> held;
  WideGradient<Shape::kAtomColumns> dk;
  int32_t step = 0;
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    pipeline.tile_full(tile_state).wait();
    const BackwardTile& tile = pipeline.tile(tile_state);
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    const int32_t num_steps = uniform(tile.num_heads) * uniform(tile.num_blocks);
    int32_t steps_left = num_steps;
    uint32_t ds[kTiles / 2][4];
    dk.clear();
    const auto start_dp = [&] {
      wait_for_atom_columns<Shape::kValueAtomColumns>(value_read_state, streamed_values_full);
      start_s_or_dp<T>(dp, held, value_read_state, streamed_values);
    };
    const auto start_dk = [&] {
      // The other warpgroup has waited for these atom columns of Q before it computed P, but each warp that reads data
      // of an asynchronous copy must wait for it itself.
      wait_for_atom_columns<Shape::kAtomColumns>(read_state, streamed_full);
      start_gradient<T, Shape>(dk, ds, read_state, streamed);
    };
    const auto finish_dk = [&] {
      ptx::wgmma_wait_group<0>();
      release_atom_columns<Shape::kAtomColumns>(read_state, streamed_empty);
    };
    // Computes dS from dP. In the first block of a tile no dK is pending.
    const auto compute_ds = [&] {
      // dP of the last block is complete, so V is no longer needed.
      if (!Shape::kStreamsHeld && steps_left == 1 && lane == 0) pipeline.held_values_empty(tile_count).arrive();
      const PipelineState<2> step_state(step);
      pipeline.deltas_full(step_state).wait();
      const RowStatPairs deltas(pipeline.deltas(step_state.stage));
      pipeline.p_full(step).wait();
      uint32_t next_ds[kTiles / 2][4];
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
        if (Shape::kReleasesEarly && k == kTiles / 4 && steps_left != num_steps) finish_dk();
        const float4 packed_p = ptx::load_shared_f32x4(own_p + k * 2048);
        const float pairs[4] = {packed_p.x, packed_p.y, packed_p.z, packed_p.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 delta = deltas.pair(2 * k + i);
          const float (&d)[4] = dp[2 * k + i];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 p = ptx::unpack_f16(__float_as_uint(pairs[2 * i + half]));
            next_ds[k][2 * i + half] =
                Element<T>::pack((d[2 * half] - delta.x) * p.x, (d[2 * half + 1] - delta.y) * p.y);
          }
        }
      }
      __syncwarp();
      if (lane == 0) {
        pipeline.p_empty(step).arrive();
        pipeline.deltas_empty(step_state).arrive();
      }
      ++step;
      if (!Shape::kReleasesEarly && steps_left != num_steps) finish_dk();
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[k][i] = ptx::mov_volatile(next_ds[k][i]);
      }
    };
    if constexpr (Shape::kStreamsHeld) {
      held.load_streamed(value_read_state, streamed_values_full, streamed_values);
    } else {
      pipeline.held_values_full(tile_count).wait();
      held.load(pipeline.held_values());
    }
    start_dp();
    ptx::wgmma_wait_group<0>();
    if constexpr (Shape::kStreamsHeld) {
      release_atom_columns<Shape::kValueAtomColumns>(value_release_state, streamed_values_empty);
      release_unread<Shape::kAtomColumns>(read_state, streamed_full, streamed_empty);
    }
    release_atom_columns<Shape::kValueAtomColumns>(value_release_state, streamed_values_empty);
    compute_ds();
#pragma unroll 1
    while (--steps_left > 0) {
      start_dp();
      start_dk();
      ptx::wgmma_wait_group<1>();  // dP
      release_atom_columns<Shape::kValueAtomColumns>(value_release_state, streamed_values_empty);
      compute_ds();
    }
    start_dk();
    finish_dk();
    store_dk_or_dv<Shape, T>(dk, params.base.softmax_scale, params.base.dk, params, tile, forward.head_dim);
    __syncwarp();
    if (lane == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

}  // namespace xa::hopper
