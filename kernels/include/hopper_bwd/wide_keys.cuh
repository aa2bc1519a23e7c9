// dK and dV of wide rows. 64 keys stay while blocks of 64 queries stream past. One warpgroup makes the weights P and
// dV, the other one dS and dK: so each holds one gradient of 64 keys in registers. As in compute.cuh all products of
// scores are transposed, and P and dS are operands as they leave the arithmetic; P goes through shared memory besides,
// in f32, for dS = P (dP - delta).
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper_bwd/compute.cuh"
#include "hopper_bwd/products.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "hopper_bwd/wide_shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Numbers of a block of 8 kTiles rows, of which a lane needs those of its two columns of each tile, as all lanes with
/// its lane % 4 do. It reads an eighth of them, and gets the others from the lanes that have read them: what shared
/// memory delivers to registers is counted by lanes, and the tensor cores need it.
template <int kTiles>
class RowPairs {
 public:
  __device__ __forceinline__ explicit RowPairs(uint32_t from) {
#pragma unroll
    for (int i = 0; i < kTiles / 8; ++i) own_[i] = ptx::load_shared_f32x2(from + 256 * i + threadIdx.x % 32 * 8);
  }
  /// Those of columns 2 (lane % 4) and the next of a tile.
  __device__ __forceinline__ float2 of(int tile) const {
    const float2& own = own_[tile / 8];
    return make_float2(ptx::of_quad_lane(own.x, tile % 8), ptx::of_quad_lane(own.y, tile % 8));
  }

 private:
  float2 own_[kTiles / 8];
};

/// A panel of a ring as an operand.
template <typename Shape>
__device__ __forceinline__ uint64_t panel_descriptor(uint32_t address) {
  using Panel = typename Shape::Panel;
  return matrix_descriptor<Panel>(address, 0, Panel::kBytes);
}

/// Waits for the panels of a block and goes on to the next block.
template <int kPanels, typename At, typename FullOf>
__device__ __forceinline__ void wait_for_panels(At at, const FullOf& full_of) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel, at.advance()) full_of(at).wait();
}

/// Gives the panels of a block back; `at` goes on to the next one.
template <int kPanels, typename At, typename EmptyOf>
__device__ __forceinline__ void release_panels(At& at, const EmptyOf& empty_of) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel, at.advance()) {
    if (threadIdx.x % 32 == 0) empty_of(at).arrive();
  }
}

/// d = a b^T, a the 64 rows from `rows` on of what is held, b a block in a ring; starts it.
template <typename T, typename Shape, int kPanels, typename At, typename PanelOf>
__device__ __forceinline__ void start_scores_of(float (&d)[8][4], uint32_t rows, At at, const PanelOf& panel_of) {
  constexpr uint64_t kAlong = 2;
  ptx::wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel, at.advance()) {
    const uint64_t a = panel_descriptor<Shape>(rows + panel * Shape::kHeldPanelBytes);
    const uint64_t b = panel_descriptor<Shape>(panel_of(at));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (panel == 0 && k == 0) {
        BackwardProduct<T, 64>::template along<false>(d, a, b);
      } else {
        BackwardProduct<T, 64>::template along<true>(d, a + k * kAlong, b + k * kAlong);
      }
    }
  }
  ptx::wgmma_commit_group();
}

/// A gradient of 64 rows: accumulators of `kPanels` panels, of which products take kAtOnce. Rings hold a whole number
/// of as many, so that they are neighbours.
template <int kPanels_>
struct WideGradient {
  static constexpr int kPanels = kPanels_, kAtOnce = kPanels % 3 == 0 ? 3 : 2;
  float sums[kPanels / kAtOnce][8 * kAtOnce][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& some : sums) {
#pragma unroll
      for (auto& column : some) {
#pragma unroll
        for (float& x : column) x = 0.0f;
      }
    }
  }
  /// Of eight columns.
  __device__ __forceinline__ const float (&of(int tile) const)[4] {
    return sums[tile / (8 * kAtOnce)][tile % (8 * kAtOnce)];
  }
};

/// d += a b, a [64, 64] in registers, b a block in a ring; starts it.
template <typename T, typename Shape, int kPanels, typename At, typename PanelOf>
__device__ __forceinline__ void start_gradient(WideGradient<kPanels>& d, const uint32_t (&a)[4][4], At at,
                                               const PanelOf& panel_of) {
  using Panel = typename Shape::Panel;
  constexpr uint64_t kDown = 2 * Panel::kBytes >> 4;
  constexpr int kAtOnce = WideGradient<kPanels>::kAtOnce;
  ptx::wgmma_fence();
#pragma unroll
  for (int some = 0; some < kPanels / kAtOnce; ++some) {
    const uint64_t b = matrix_descriptor<Panel>(panel_of(at), Shape::kPanelBytes, Panel::kBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) BackwardProduct<T, 64 * kAtOnce>::weigh(d.sums[some], a[k], b + k * kDown);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) at.advance();
  }
  ptx::wgmma_commit_group();
}

/// Writes a gradient of 64 rows to shared memory in panels [64][64], each `panel_bytes` after the one before.
template <typename T, typename Panel, int kPanels>
__device__ __forceinline__ void stage_gradient(uint32_t to, int32_t panel_bytes, const WideGradient<kPanels>& d,
                                               float scale) {
  const int32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
  const uint32_t own = to + Panel::offset(row, half);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int column = 0; column < 8; column += 2) {
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = d.of(8 * panel + column + i / 2);
        matrices[i] = Element<T>::pack(x[i % 2 * 2] * scale, x[i % 2 * 2 + 1] * scale);
      }
      ptx::stmatrix_x4((own + panel * panel_bytes) ^ (column << 4), matrices);
    }
  }
}

/// Stores dK or dV of the tile's 64 keys out of the place of K or V. The work of a warpgroup.
template <typename T, typename Shape, int kPanels>
__device__ __forceinline__ void store_of_keys(uint32_t from, const TensorMap& map, const BackwardTile& tile,
                                              int32_t key_block, const WideGradient<kPanels>& d, float scale,
                                              int32_t warpgroup, const Barrier& empty) {
  stage_gradient<T, typename Shape::Panel, kPanels>(from, Shape::kHeldPanelBytes, d, scale);
  ptx::fence_proxy_async_shared();
  ptx::named_barrier_sync(2 + warpgroup, 128);
  if (threadIdx.x % 128 == 0) {
    const RaggedRows rows(tile.first_key, tile.num_keys);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_store(from + panel * Shape::kHeldPanelBytes, map, panel * 64, tile.kv_head,
                     rows.base + key_block * Shape::kKeys, rows.end, RaggedRows::kEnd);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_group_read();
    empty.arrive();
  }
  __syncwarp();
}

/// What a warpgroup of this kernel does in a tile: the first makes P and dV, the second dS and dK.
template <typename Shape, typename T>
__device__ __forceinline__ void make_values_gradients(const HopperBackwardParams& params,
                                                      const WidePipeline<Shape>& pipeline) {
  const AttentionParams& forward = params.base.forward;
  const int32_t lane = threadIdx.x % 32;
  const uint32_t own_weights = pipeline.weights() + threadIdx.x % 128 * 16;
  typename WidePipeline<Shape>::At at, done_at;
  typename WidePipeline<Shape>::ValueAt value_at;
  const auto full = [&](auto place) { return pipeline.full(place); };
  const auto empty = [&](auto place) { return pipeline.empty(place); };
  const auto panel = [&](auto place) { return pipeline.panel(place); };
  const auto full_values = [&](auto place) { return pipeline.full_values(place); };
  const auto empty_values = [&](auto place) { return pipeline.empty_values(place); };
  const auto value_panel = [&](auto place) { return pipeline.value_panel(place); };
  float scores[8][4];
  WideGradient<Shape::kValuePanels> dv;
  int32_t step = 0;
#pragma unroll 1
  for (int32_t count = 0;; ++count) {
    const PipelineState<2> turn(count);
    pipeline.tile_full(turn).wait();
    const BackwardTile& tile = pipeline.tile(turn);
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    const int32_t first_block = uniform(tile.first_block), num_blocks = uniform(tile.num_blocks);
    BlockRange plain = {INT32_MIN, INT32_MAX};
    {
      const int32_t first_key = key_block * 64, shift = uniform(tile.shift);
      if (forward.window_right >= 0) plain.begin = -floor_div(-(first_key + 63 - shift - forward.window_right), 64);
      if (forward.window_left >= 0) plain.end = floor_div(first_key - shift + forward.window_left + 1, 64);
      if constexpr (Shape::kBiased) plain.end = min(plain.end, uniform(tile.num_queries) / 64);
      if (first_key + 64 > uniform(tile.num_keys)) plain.end = INT32_MIN;
    }
    int32_t left = forward.group * num_blocks, block = first_block;
    dv.clear();
    const auto start_scores = [&] {
      wait_for_panels<Shape::kPanels>(at, full);
      start_scores_of<T, Shape, Shape::kPanels>(scores, pipeline.held(), at, panel);
#pragma unroll
      for (int i = 0; i < Shape::kPanels; ++i) at.advance();
    };
    pipeline.held_full(count).wait();
    start_scores();
    ptx::wgmma_wait_group<0>();
#pragma unroll 1
    while (true) {
      const PipelineState<2> now(step);
      release_panels<Shape::kPanels>(done_at, empty);
      pipeline.lses_full(now).wait();
      const RowPairs<8> lses(pipeline.lses(now.stage));
      if (!plain.holds(block)) {
        for_unseen<Shape>(forward, tile, block, [&](int column, int i) { scores[column][i] = -INFINITY; });
      }
      const auto modified = modified_weights<Shape>(forward, tile, block, pipeline.lses(now.stage) + 4 * 64);
      uint32_t p[4][4];
      const float scale = forward.softmax_scale_log2;
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const float2 lse = lses.of(column);
        float (&s)[4] = scores[column];
        float weights[4];
        if constexpr (Shape::kCapped) {
          modified.bend(s[0], s[2], lse.x, weights[0], weights[2]);
          modified.bend(s[1], s[3], lse.y, weights[1], weights[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float of_row = i % 2 == 0 ? lse.x : lse.y;
            if constexpr (Shape::kBiased) {
              weights[i] = s[i] = modified.add_bias(s[i], of_row, 8 * column + i % 2 - i / 2 * 8);
            } else {
              weights[i] = s[i] = xa::ptx::exp2_approx(__fmaf_rn(s[i], scale, -of_row));
            }
          }
        }
        p[column / 2][column % 2 * 2] = Element<T>::pack(weights[0], weights[1]);
        p[column / 2][column % 2 * 2 + 1] = Element<T>::pack(weights[2], weights[3]);
      }
      if constexpr (Shape::kCapped) {
        if (!plain.holds(block)) {
          for_unseen<Shape>(forward, tile, block, [&](int column, int i) {
            p[column / 2][column % 2 * 2 + i / 2] &= i % 2 == 0 ? 0xffff0000 : 0x0000ffff;
          });
        }
      }
      __syncwarp();
      if (lane == 0) pipeline.lses_empty(now).arrive();
      pipeline.weights_empty(step).producer_wait();
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const float (&s)[4] = scores[column];
        xa::ptx::store_shared_16(own_weights + column * 2048, make_uint4(__float_as_uint(s[0]), __float_as_uint(s[1]),
                                                                         __float_as_uint(s[2]), __float_as_uint(s[3])));
      }
      __syncwarp();
      if (lane == 0) pipeline.weights_full(step).arrive();
      ++step;
      wait_for_panels<Shape::kValuePanels>(value_at, full_values);
      start_gradient<T, Shape>(dv, p, value_at, value_panel);
      if (--left == 0) break;
      if (++block == first_block + num_blocks) block = first_block;
      start_scores();
      ptx::wgmma_wait_group<1>();  // dV
      release_panels<Shape::kValuePanels>(value_at, empty_values);
      ptx::wgmma_wait_group<0>();
    }
    ptx::wgmma_wait_group<0>();
    release_panels<Shape::kValuePanels>(value_at, empty_values);
    // Both warpgroups are done with K and with V, through whose places the gradients leave.
    ptx::named_barrier_sync(1, 256);
    store_of_keys<T, Shape>(pipeline.held_values(), params.dv, tile, key_block, dv, 1.0f, 0,
                            pipeline.held_values_empty(count));
    if (lane == 0) pipeline.tile_empty(turn).arrive();
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait_group();
}

template <typename Shape, typename T>
__device__ __forceinline__ void make_keys_gradients(const HopperBackwardParams& params,
                                                    const WidePipeline<Shape>& pipeline) {
  const int32_t lane = threadIdx.x % 32;
  const uint32_t own_weights = pipeline.weights() + threadIdx.x % 128 * 16;
  typename WidePipeline<Shape>::At at;
  typename WidePipeline<Shape>::ValueAt value_at, done_value_at;
  const auto empty = [&](auto place) { return pipeline.empty(place); };
  const auto panel = [&](auto place) { return pipeline.panel(place); };
  const auto full_values = [&](auto place) { return pipeline.full_values(place); };
  const auto empty_values = [&](auto place) { return pipeline.empty_values(place); };
  const auto value_panel = [&](auto place) { return pipeline.value_panel(place); };
  float dp[8][4];
  WideGradient<Shape::kPanels> dk;
  int32_t step = 0;
#pragma unroll 1
  for (int32_t count = 0;; ++count) {
    const PipelineState<2> turn(count);
    pipeline.tile_full(turn).wait();
    const BackwardTile& tile = pipeline.tile(turn);
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    int32_t left = params.base.forward.group * uniform(tile.num_blocks);
    dk.clear();
    const auto start_dp = [&] {
      wait_for_panels<Shape::kValuePanels>(value_at, full_values);
      start_scores_of<T, Shape, Shape::kValuePanels>(dp, pipeline.held_values(), value_at, value_panel);
#pragma unroll
      for (int i = 0; i < Shape::kValuePanels; ++i) value_at.advance();
    };
    pipeline.held_values_full(count).wait();
    start_dp();
    ptx::wgmma_wait_group<0>();
#pragma unroll 1
    while (true) {
      const PipelineState<2> now(step);
      release_panels<Shape::kValuePanels>(done_value_at, empty_values);
      pipeline.deltas_full(now).wait();
      const RowPairs<8> deltas(pipeline.deltas(now.stage));
      pipeline.weights_full(step).wait();
      uint32_t ds[4][4];
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const float2 delta = deltas.of(column);
        const float4 p = ptx::load_shared_f32x4(own_weights + column * 2048);
        const float (&d)[4] = dp[column];
        ds[column / 2][column % 2 * 2] = Element<T>::pack((d[0] - delta.x) * p.x, (d[1] - delta.y) * p.y);
        ds[column / 2][column % 2 * 2 + 1] = Element<T>::pack((d[2] - delta.x) * p.z, (d[3] - delta.y) * p.w);
      }
      __syncwarp();
      if (lane == 0) pipeline.weights_empty(step).arrive();
      if (lane == 0) pipeline.deltas_empty(now).arrive();
      ++step;
      // The other warpgroup has waited for these panels of q before it made P of them, but each copy's reader waits
      // itself.
      wait_for_panels<Shape::kPanels>(at, [&](auto place) { return pipeline.full(place); });
      start_gradient<T, Shape>(dk, ds, at, panel);
      if (--left == 0) break;
      start_dp();
      ptx::wgmma_wait_group<1>();  // dK
      release_panels<Shape::kPanels>(at, empty);
      ptx::wgmma_wait_group<0>();
    }
    ptx::wgmma_wait_group<0>();
    release_panels<Shape::kPanels>(at, empty);
    ptx::named_barrier_sync(1, 256);
    store_of_keys<T, Shape>(pipeline.held(), params.dk, tile, key_block, dk, params.base.softmax_scale, 1,
                            pipeline.held_empty(count));
    if (lane == 0) pipeline.tile_empty(turn).arrive();
  }
  if (threadIdx.x % 128 == 0) ptx::bulk_wait_group();
}

}  // namespace xa::hopper
