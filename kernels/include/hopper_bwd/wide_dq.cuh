// dQ past 128 columns. A CTA holds 128 queries of a head, 64 per warpgroup, while the keys that they attend to stream
// past. dS is operand A of dQ in the registers in which it is computed. Each element of dQ is the sum of one CTA; in
// exchange S and P are computed twice, here and in wide_dkdv.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "bwd/gradient_type.cuh"
#include "element.cuh"
#include "hopper_bwd/compute.cuh"
#include "hopper_bwd/wide_operands.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Masks the scores [64 queries, kKeys].
template <typename Shape>
__device__ __forceinline__ void mask_scores(float (&scores)[Shape::kKeys / 8][4], const AttentionParams& forward,
                                            const QueryTile& tile, int32_t first_row, int32_t block) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) % 128, lane = thread % 32;
  const int32_t first_key = block * Shape::kKeys + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t position = first_row + thread / 32 * 16 + lane / 4 + 8 * half + tile.shift;
    // Keys that the query attends to, counted from this lane's first one.
    const int32_t begin = forward.window_left < 0 ? INT32_MIN : position - forward.window_left - first_key;
    int32_t end = tile.num_keys - first_key;
    if (forward.window_right >= 0) end = min(end, position + forward.window_right + 1 - first_key);
#pragma unroll
    for (int column = 0; column < Shape::kKeys / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t key = 8 * column + i;
        if (key < begin || key >= end) scores[column][2 * half + i] = -INFINITY;
      }
    }
  }
}

/// Computes all tiles of the CTA. Executed by each of the two warpgroups.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_dq(const HopperBackwardParams& params, const WidePipeline<Shape>& pipeline,
                                           int32_t warpgroup) {
  const AttentionParams& forward = params.base.forward;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t own_rows = warpgroup * 64 * Shape::Atom::kRowBytes;
  typename WidePipeline<Shape>::StreamedState read_state, release_state;
  typename WidePipeline<Shape>::StreamedValuesState value_read_state;
  const auto streamed_full = [&](auto state) { return pipeline.streamed_full(state); };
  const auto streamed_empty = [&](auto state) { return pipeline.streamed_empty(state); };
  const auto streamed = [&](auto state) { return pipeline.streamed(state); };
  const auto streamed_values_full = [&](auto state) { return pipeline.streamed_values_full(state); };
  const auto streamed_values_empty = [&](auto state) { return pipeline.streamed_values_empty(state); };
  const auto streamed_values = [&](auto state) { return pipeline.streamed_values(state); };
  constexpr int kTiles = Shape::kKeys / 8;
  float scores[kTiles][4];
  WideGradient<Shape::kAtomColumns> dq;
  // Named barriers let the warpgroups start dQ and the next S alternately (FlashAttention-3's warp_scheduler_barrier),
  // so that one of them computes P while the products of the other one run. Otherwise it depends on chance whether they
  // do so or wait for each other.
  constexpr int kWarpSchedulerBarrier = 4;
  const auto warp_scheduler_barrier_arrive = [&] {
    ptx::named_barrier_arrive(kWarpSchedulerBarrier + 1 - warpgroup, 256);
  };
  if (warpgroup == 1) warp_scheduler_barrier_arrive();
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    pipeline.tile_full(tile_state).wait();
    const QueryTile& tile = pipeline.tile(tile_state);
    const int32_t query_block = uniform(tile.block);
    if (query_block < 0) break;
    const int32_t first_row = query_block * Shape::kQueries + 64 * warpgroup;
    int32_t block = uniform(tile.first_block), blocks_left = uniform(tile.num_blocks);
    // Under a causal mask the tile's last key block may be masked for all queries of the first warpgroup.
    const bool skips_last_block =
        blocks_left > 1 && forward.window_right >= 0 &&
        (block + blocks_left - 1) * Shape::kKeys > first_row + 63 + uniform(tile.shift) + forward.window_right;
    blocks_left -= skips_last_block;
    BlockRange unmasked = {INT32_MIN, uniform(tile.num_keys) / Shape::kKeys};
    {
      const int32_t first_position = first_row + uniform(tile.shift);
      if (forward.window_right >= 0) {
        unmasked.end = min(unmasked.end, floor_div(first_position + forward.window_right + 1, Shape::kKeys));
      }
      if (forward.window_left >= 0) {
        unmasked.begin = -floor_div(-(first_position + 63 - forward.window_left), Shape::kKeys);
      }
    }
    // lse = inf makes the probabilities of rows past the last query 0.
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + lane / 4 + 8 * half;
      const int64_t from = static_cast<int64_t>(tile.head) * forward.num_tokens + tile.first_query + row;
      const bool exists = row < tile.num_queries;
      lse[half] = exists ? __ldg(params.lse_log2 + from) : INFINITY;
      delta[half] = exists ? __ldg(params.base.delta + from) : 0.0f;
    }
    float slope = 0.0f;
    if constexpr (Shape::kHasAlibi) {
      slope = __ldg(forward.alibi_slopes + tile.sequence * forward.alibi_stride + tile.head);
    }
    uint32_t ds[kTiles / 2][4];
    dq.clear();
    const auto start_s = [&] {
      wait_for_atom_columns<Shape::kAtomColumns>(read_state, streamed_full);
      // Opaque, so that the descriptors of all atom columns are computed anew for each product: registers that held
      // them all the time would spill under a soft cap.
      HeldRows<Shape, Shape::kAtomColumns> held;
      held.load(xa::ptx::opaque(pipeline.held() + own_rows));
      start_s_or_dp<T>(scores, held, read_state, streamed);
    };
    const auto start_dq = [&] { start_gradient<T, Shape>(dq, ds, release_state, streamed); };
    // Computes dS from S while dP is computed. In the first block of a tile no dQ is pending.
    const auto compute_ds = [&](bool is_first) {
      float dp[kTiles][4];
      wait_for_atom_columns<Shape::kValueAtomColumns>(value_read_state, streamed_values_full);
      auto next_value_read_state = value_read_state;
      HeldRows<Shape, Shape::kValueAtomColumns> held_values;
      held_values.load(xa::ptx::opaque(pipeline.held_values() + own_rows));
      start_s_or_dp<T>(dp, held_values, next_value_read_state, streamed_values);
      // The compiler moves nothing across a branch: exponentials before the start of dP would not overlap with it.
      if (!unmasked.contains(block)) mask_scores<Shape>(scores, forward, tile, first_row, block);
      const int32_t distance = first_row + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + lane / 4 + tile.shift -
                               block * Shape::kKeys - 2 * (lane % 4);
      const BackwardLogitsTransform<Shape> transform(forward, distance, slope);
      const float scale = forward.softmax_scale_log2;
#pragma unroll
      for (int column = 0; column < kTiles; ++column) {
        float (&s)[4] = scores[column];
        if constexpr (Shape::kHasSoftcap) {
          float unused[4];
          transform.softcap(s[0], s[1], lse[0], unused[0], unused[1]);
          transform.softcap(s[2], s[3], lse[1], unused[2], unused[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (Shape::kHasAlibi) {
              s[i] = transform.alibi(s[i], lse[i / 2], i / 2 * 8 - 8 * column - i % 2);
            } else {
              s[i] = xa::ptx::exp2_approx(__fmaf_rn(s[i], scale, -lse[i / 2]));
            }
          }
        }
      }
      ptx::wgmma_wait_group<0>();  // dP, and dQ of the previous block
      release_atom_columns<Shape::kValueAtomColumns>(value_read_state, streamed_values_empty);
      if (blocks_left == 1 && lane == 0) {
        pipeline.held_empty(tile_count).arrive();
        pipeline.held_values_empty(tile_count).arrive();
      }
      if (Shape::kOverlapsDq && !is_first) release_atom_columns<Shape::kAtomColumns>(release_state, streamed_empty);
#pragma unroll
      for (int column = 0; column < kTiles; ++column) {
        const float (&s)[4] = scores[column];
        const float (&d)[4] = dp[column];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = Element<T>::pack((d[2 * half] - delta[half]) * s[2 * half],
                                                 (d[2 * half + 1] - delta[half]) * s[2 * half + 1]);
          // If dQ still reads these registers, ptxas would otherwise write them too early and serialise all products.
          ds[column / 2][column % 2 * 2 + half] = Shape::kOverlapsDq ? ptx::mov_volatile(pair) : pair;
        }
      }
    };
    pipeline.held_full(tile_count).wait();
    start_s();
    ptx::wgmma_wait_group<0>();
    pipeline.held_values_full(tile_count).wait();
    compute_ds(true);
#pragma unroll 1
    while (--blocks_left > 0) {
      ++block;
      ptx::named_barrier_sync(kWarpSchedulerBarrier + warpgroup, 256);
      if constexpr (Shape::kOverlapsDq) {
        start_s();
        start_dq();
        warp_scheduler_barrier_arrive();
        ptx::wgmma_wait_group<1>();  // S
      } else {
        start_dq();
        start_s();
        warp_scheduler_barrier_arrive();
        ptx::wgmma_wait_group<1>();  // dQ
        release_atom_columns<Shape::kAtomColumns>(release_state, streamed_empty);
        ptx::wgmma_wait_group<0>();
      }
      compute_ds(false);
    }
    if (skips_last_block) ptx::named_barrier_sync(kWarpSchedulerBarrier + warpgroup, 256);
    start_dq();
    if (skips_last_block) warp_scheduler_barrier_arrive();
    ptx::wgmma_wait_group<0>();
    release_atom_columns<Shape::kAtomColumns>(release_state, streamed_empty);
    if (skips_last_block) {
      // A stage can be released once it is full: before that, the release would count for its previous block.
      wait_for_atom_columns<Shape::kAtomColumns>(read_state, streamed_full);
      wait_for_atom_columns<Shape::kValueAtomColumns>(value_read_state, streamed_values_full);
      release_atom_columns<Shape::kAtomColumns>(release_state, streamed_empty);
      release_atom_columns<Shape::kValueAtomColumns>(value_read_state, streamed_values_empty);
      read_state = release_state;
    }
    const int64_t row_stride = static_cast<int64_t>(params.num_q_heads) * forward.head_dim;
    const int64_t element = (tile.first_query + first_row) * row_stride + tile.head * forward.head_dim;
    with_gradient_type<T>(params.base, params.base.dq, [&](auto* gradient) {
      store_gradient(dq, params.base.softmax_scale, gradient + element, row_stride, tile.num_queries - first_row,
                     forward.head_dim);
    });
    __syncwarp();
    if (lane == 0) pipeline.tile_empty(tile_state).arrive();
  }
  if (warpgroup == 0) ptx::named_barrier_sync(kWarpSchedulerBarrier, 256);
}

}  // namespace xa::hopper
