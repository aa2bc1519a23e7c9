// dQ of wide rows. 128 queries of a head stay, 64 a warpgroup, while the keys that they see stream past. dS is an
// operand of dQ as it leaves the arithmetic. So dQ is the sum of one CTA, at the price of making S and dP twice
// (wide_keys.cuh).
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "hopper_bwd/wide_keys.cuh"

namespace xa::hopper {

/// Hides scores [64 queries, 64 keys] of what does not see each other.
template <typename Shape>
__device__ __forceinline__ void hide_unseen_keys(float (&scores)[8][4], const AttentionParams& forward,
                                                 const QueryTile& tile, int32_t first_row, int32_t block) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) % 128, lane = thread % 32;
  const int32_t first_key = block * Shape::kKeys + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t position = first_row + thread / 32 * 16 + lane / 4 + 8 * half + tile.shift;
    // Keys that the query sees, counted from this lane's first one.
    const int32_t begin = forward.window_left < 0 ? INT32_MIN : position - forward.window_left - first_key;
    int32_t end = tile.num_keys - first_key;
    if (forward.window_right >= 0) end = min(end, position + forward.window_right + 1 - first_key);
#pragma unroll
    for (int column = 0; column < 8; ++column) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t key = 8 * column + i;
        if (key < begin || key >= end) scores[column][2 * half + i] = -INFINITY;
      }
    }
  }
}

/// Computes all tiles of the CTA. The work of a warpgroup, number `warpgroup` of two.
template <typename Shape, typename T>
__device__ __forceinline__ void make_queries_gradients(const HopperWideBackwardParams& wide_params,
                                                       const WidePipeline<Shape>& pipeline, int32_t warpgroup) {
  const HopperBackwardParams& params = wide_params.common;
  const AttentionParams& forward = params.base.forward;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t own_rows = warpgroup * 64 * Shape::Panel::kRowBytes;
  typename WidePipeline<Shape>::At at, done_at;
  typename WidePipeline<Shape>::ValueAt value_at;
  const auto full = [&](auto place) { return pipeline.full(place); };
  const auto empty = [&](auto place) { return pipeline.empty(place); };
  const auto panel = [&](auto place) { return pipeline.panel(place); };
  const auto full_values = [&](auto place) { return pipeline.full_values(place); };
  const auto empty_values = [&](auto place) { return pipeline.empty_values(place); };
  const auto value_panel = [&](auto place) { return pipeline.value_panel(place); };
  float scores[8][4];
  WideGradient<Shape::kPanels> dq;
#pragma unroll 1
  for (int32_t count = 0;; ++count) {
    const PipelineState<2> turn(count);
    pipeline.tile_full(turn).wait();
    const QueryTile& tile = pipeline.tile(turn);
    const int32_t query_block = uniform(tile.block);
    if (query_block < 0) break;
    const int32_t first_row = query_block * Shape::kQueries + 64 * warpgroup;
    int32_t block = uniform(tile.first_block), left = uniform(tile.num_blocks);
    BlockRange plain = {INT32_MIN, uniform(tile.num_keys) / 64};
    {
      const int32_t first_position = first_row + uniform(tile.shift);
      if (forward.window_right >= 0) {
        plain.end = min(plain.end, floor_div(first_position + forward.window_right + 1, 64));
      }
      if (forward.window_left >= 0) plain.begin = -floor_div(-(first_position + 63 - forward.window_left), 64);
    }
    // Rows past the last one weigh nothing. (Made uniform anew for each tile: a register that held the warp's rows all
    // the time would spill under a soft cap.)
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row + uniform(threadIdx.x % 128 / 32 * 16) + lane / 4 + 8 * half;
      const int64_t from = static_cast<int64_t>(tile.head) * forward.num_tokens + tile.first_query + row;
      const bool is_there = row < tile.num_queries;
      lse[half] = is_there ? __ldg(params.lse_log2 + from) : INFINITY;
      delta[half] = is_there ? __ldg(params.base.delta + from) : 0.0f;
    }
    float slope = 0.0f;
    if constexpr (Shape::kBiased) {
      slope = __ldg(forward.alibi_slopes + tile.sequence * forward.alibi_stride + tile.head);
    }
    dq.clear();
    const auto start_scores = [&] {
      wait_for_panels<Shape::kPanels>(at, full);
      start_scores_of<T, Shape, Shape::kPanels>(scores, pipeline.held() + own_rows, at, panel);
#pragma unroll
      for (int i = 0; i < Shape::kPanels; ++i) at.advance();
    };
    pipeline.held_full(count).wait();
    start_scores();
    ptx::wgmma_wait_group<0>();
    pipeline.held_values_full(count).wait();
#pragma unroll 1
    while (true) {
      float dp[8][4];
      wait_for_panels<Shape::kValuePanels>(value_at, full_values);
      start_scores_of<T, Shape, Shape::kValuePanels>(dp, pipeline.held_values() + own_rows, value_at, value_panel);
      // The compiler moves nothing across a branch: exponentials ahead of the products would not be beside them.
      if (!plain.holds(block)) hide_unseen_keys<Shape>(scores, forward, tile, first_row, block);
      const int32_t distance = first_row + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + lane / 4 + tile.shift -
                               block * Shape::kKeys - 2 * (lane % 4);
      const ModifiedWeights<Shape> modified(forward, distance, slope);
      const float scale = forward.softmax_scale_log2;
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        float (&s)[4] = scores[column];
        if constexpr (Shape::kCapped) {
          float unused[4];
          modified.bend(s[0], s[1], lse[0], unused[0], unused[1]);
          modified.bend(s[2], s[3], lse[1], unused[2], unused[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (Shape::kBiased) {
              s[i] = modified.add_bias(s[i], lse[i / 2], i / 2 * 8 - 8 * column - i % 2);
            } else {
              s[i] = xa::ptx::exp2_approx(__fmaf_rn(s[i], scale, -lse[i / 2]));
            }
          }
        }
      }
      ptx::wgmma_wait_group<0>();  // dP
      release_panels<Shape::kValuePanels>(value_at, empty_values);
      uint32_t ds[4][4];
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const float (&s)[4] = scores[column];
        const float (&d)[4] = dp[column];
        ds[column / 2][column % 2 * 2] = Element<T>::pack((d[0] - delta[0]) * s[0], (d[1] - delta[0]) * s[1]);
        ds[column / 2][column % 2 * 2 + 1] = Element<T>::pack((d[2] - delta[1]) * s[2], (d[3] - delta[1]) * s[3]);
      }
      start_gradient<T, Shape>(dq, ds, done_at, panel);
      if (--left == 0) break;
      ++block;
      start_scores();
      ptx::wgmma_wait_group<1>();  // dQ
      release_panels<Shape::kPanels>(done_at, empty);
      ptx::wgmma_wait_group<0>();
    }
    if (lane == 0) pipeline.held_values_empty(count).arrive();
    ptx::wgmma_wait_group<0>();
    release_panels<Shape::kPanels>(done_at, empty);
    // dQ leaves through the place of this warpgroup's rows of q, which are its own.
    const uint32_t from = pipeline.held() + own_rows;
    stage_gradient<T, typename Shape::Panel>(from, Shape::kHeldPanelBytes, dq, params.base.softmax_scale);
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(2 + warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
      const RaggedRows rows(tile.first_query, tile.num_queries);
#pragma unroll
      for (int i = 0; i < Shape::kPanels; ++i) {
        ptx::tma_store(from + i * Shape::kHeldPanelBytes, wide_params.dq, i * 64, tile.head, rows.base + first_row,
                       rows.end, RaggedRows::kEnd);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_group_read();
      pipeline.held_empty(count).arrive();
    }
    __syncwarp();
    if (lane == 0) pipeline.tile_empty(turn).arrive();
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait_group();
}

}  // namespace xa::hopper
