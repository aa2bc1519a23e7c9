// The warpgroups of a backward CTA that compute. Each has 64 keys of the block and keeps their dK and dV in registers
// while queries stream past. Scores and their gradients are transposed, [keys, queries], so that as they leave the
// tensor cores they are operands of dV and dK; only dS goes through shared memory, for dQ, of which each warpgroup
// makes half out of the dS of both.
//
// Products of a step, in order: dP, beside which half of P is made, the other half between the columns of dS, as
// exponentials are what takes longest; when both are there, dV, dQ of the step before, dK, and S of the next step.
//
// As dQ is a step behind, a warpgroup does not wait for the dS that the other one is about to make, and the two are
// kept half a step apart: each starts its products from dV to S in its turn, while the other one makes P and dS.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper_bwd/modified_weights.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/products.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// Blocks of queries [begin, end) of a tile in which a warpgroup's keys need no mask, or whose queries see some of
/// them.
struct BlockRange {
  int32_t begin;
  int32_t end;

  __device__ __forceinline__ bool holds(int32_t block) const { return block >= begin && block < end; }
};

__device__ __forceinline__ int32_t floor_div(int32_t x, int32_t y) { return x >= 0 ? x / y : -((-x + y - 1) / y); }

/// Calls `hide(column, element)` for what does not see each other of scores [64 keys, kQueries]. Few blocks need it, so
/// what it takes is derived again each time.
template <typename Shape, typename Hide>
__device__ __forceinline__ void for_unseen(const AttentionParams& forward, const BackwardTile& tile, int32_t block,
                                           const Hide& hide) {
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, lane = thread % 32;
  const int32_t key = tile.key_block * Shape::kKeys + thread / 32 * 16 + lane / 4;
  const int32_t first_query = block * Shape::kQueries + 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t mine = key + 8 * half, position = mine - tile.shift - first_query;
    // Queries that see the key, counted from this lane's first one. Keys past the last one are zeros, whose weights may
    // be anything.
    int32_t begin = forward.window_right < 0 ? INT32_MIN : position - forward.window_right;
    int32_t end = forward.window_left < 0 ? INT32_MAX : position + forward.window_left + 1;
    if (mine >= tile.num_keys) begin = INT32_MAX;
    // The weight of a query past the last one is a number too, but not with every bias.
    if constexpr (Shape::kBiased) end = min(end, tile.num_queries - first_query);
#pragma unroll
    for (int column = 0; column < Shape::kQueries / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t query = 8 * column + i;
        if (query < begin || query >= end) hide(column, 2 * half + i);
      }
    }
  }
}

/// Numbers of a block of rows, of which a lane needs those of its two columns of each tile, as all lanes with its lane
/// % 4 do. Each lane reads all that it needs: lanes that read an eighth and exchange it by `shfl` take two instructions
/// where this takes one, and wait for each other.
class ReadRowPairs {
 public:
  __device__ __forceinline__ explicit ReadRowPairs(uint32_t from) : own_(from + threadIdx.x % 4 * 8) {}
  /// Those of columns 2 (lane % 4) and the next of a tile.
  __device__ __forceinline__ float2 of(int tile) const { return ptx::load_shared_f32x2(own_ + 32 * tile); }

 private:
  uint32_t own_;
};

/// Those of a block of queries and this lane's two keys; queries are counted from its first one. `slope`: where the
/// slope of the head is, or 0.
template <typename Shape>
__device__ __forceinline__ ModifiedWeights<Shape> modified_weights(const AttentionParams& forward,
                                                                   const BackwardTile& tile, int32_t block,
                                                                   uint32_t slope) {
  if constexpr (!Shape::kBiased) return {forward, 0, 0.0f};
  const int32_t thread = xa::ptx::opaque(threadIdx.x) - 128, lane = thread % 32;
  const int32_t key = tile.key_block * Shape::kKeys + thread / 32 * 16 + lane / 4;
  const int32_t distance = block * Shape::kQueries + 2 * (lane % 4) + tile.shift - key;
  return {forward, distance, ptx::load_shared_f32(slope)};
}

/// Of warpgroup 0; that of warpgroup 1 is the next one. Those before are of all tiles and of their gradients.
constexpr int kTurnBarrier = 4;

/// Computes all tiles of the CTA. The work of a warpgroup, number `warpgroup` of two.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_tiles(const HopperBackwardParams& params,
                                              const BackwardPipeline<Shape>& pipeline, int32_t warpgroup) {
  using Panel = typename Shape::Panel;
  constexpr int kQueries = Shape::kQueries, kHeadDim = Shape::kHeadDim;
  constexpr int kQueryTiles = kQueries / 8, kColumnTiles = kHeadDim / 8;
  // A cap takes registers that 128 queries a step hardly leave.
  constexpr bool kTightlyCapped = Shape::kCapped && kQueries == 128;
  constexpr int kStepsOfPanel = Panel::kColumns / 16;
  using ScorePanel = typename Shape::ScorePanel;
  // A step down 16 rows of a panel, a step along 16 of its columns, in descriptors.
  constexpr uint64_t kDown = 2 * Panel::kBytes >> 4, kScoresDown = 2 * ScorePanel::kBytes >> 4, kAlong = 2;
  const AttentionParams& forward = params.base.forward;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const bool leads = threadIdx.x % 128 == 0;
  const auto release = [&](const Barrier& barrier) {
    if (lane == 0) barrier.arrive();
  };
  const auto descriptor = [](uint32_t address, uint32_t panel_bytes) {
    return matrix_descriptor<Panel>(address, panel_bytes, Panel::kBytes);
  };
  const uint32_t own_rows = warpgroup * 8 * Panel::kBytes;
  const uint64_t own_keys = descriptor(pipeline.keys() + own_rows, 0);
  const uint64_t own_values = descriptor(pipeline.values() + own_rows, 0);
  const uint64_t queries = descriptor(pipeline.queries(0), Shape::kQueryPanelBytes);
  const uint64_t douts = descriptor(pipeline.douts(0), Shape::kQueryPanelBytes);
  // Of dQ: all 64 queries and the first or the last 64 columns, at D 64 this warpgroup's 64 queries.
  constexpr int kSecondPanel = Shape::kPanels - 64 / Panel::kColumns;
  const uint64_t all_keys =
      descriptor(pipeline.keys() + warpgroup * (kSecondPanel * Shape::kKeyPanelBytes), Shape::kKeyPanelBytes);
  const uint64_t all_scores = matrix_descriptor<ScorePanel>(
      pipeline.scores(0) + (Shape::kSharesColumns ? 0 : warpgroup * Shape::kScorePanelBytes), 0, ScorePanel::kBytes);
  // Where this lane gives stmatrix a row of its warp's 16.
  const int32_t matrix_row = 16 * warp + lane % 16;
  const uint32_t own_scores =
      pipeline.scores(0) + warpgroup * 8 * ScorePanel::kBytes + ScorePanel::offset(matrix_row, lane / 16);
  // dQ without the columns that the second warpgroup makes in vain.
  const int32_t first_column = warpgroup * (Shape::kRepeatedColumns / 8);
  const uint32_t own_sums = pipeline.sums(warpgroup) + warp * (8 - first_column) * 512 - first_column * 512 + lane * 16;

  float dk[kColumnTiles][4], dv[kColumnTiles][4], scores[kQueryTiles][4];
  RingPosition<Shape::kQueryStages> at;
  int32_t step = 0;

  const auto wait_for_turn = [&] { ptx::named_barrier_sync(kTurnBarrier + warpgroup, 256); };
  const auto pass_turn = [&] { ptx::arrive(kTurnBarrier + 1 - warpgroup, 256); };
  const auto start_scores = [&](int32_t stage) {
    const uint64_t block = queries + static_cast<uint32_t>(stage * (Shape::kQueryBytes >> 4));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint64_t a = own_keys + (k / kStepsOfPanel * (Shape::kKeyPanelBytes >> 4) + k % kStepsOfPanel * kAlong);
      const uint64_t b = block + (k / kStepsOfPanel * (Shape::kQueryPanelBytes >> 4) + k % kStepsOfPanel * kAlong);
      if (k == 0) {
        BackwardProduct<T, kQueries>::template along<false>(scores, a, b);
      } else {
        BackwardProduct<T, kQueries>::template along<true>(scores, a, b);
      }
    }
    ptx::wgmma_commit_group();
  };

  if (warpgroup == 1) pass_turn();
#pragma unroll 1
  for (int32_t count = 0;; ++count) {
    const PipelineState<2> turn(count);
    pipeline.tile_full(turn).wait();
    const BackwardTile& tile = pipeline.tile(turn);
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    const int32_t first_block = uniform(tile.first_block), num_blocks = uniform(tile.num_blocks);
    const bool ascends = uniform(tile.ascends) != 0;
    BlockRange plain = {INT32_MIN, INT32_MAX}, seen = plain;
    {
      const int32_t first_key = key_block * Shape::kKeys + 64 * warpgroup, shift = uniform(tile.shift);
      if (forward.window_right >= 0) {
        plain.begin = -floor_div(-(first_key + 63 - shift - forward.window_right), kQueries);
        seen.begin = floor_div(first_key - shift - forward.window_right, kQueries);
      }
      if (forward.window_left >= 0) {
        plain.end = floor_div(first_key - shift + forward.window_left + 1, kQueries);
        seen.end = floor_div(first_key + 63 - shift + forward.window_left, kQueries) + 1;
      }
      if constexpr (Shape::kBiased) plain.end = min(plain.end, uniform(tile.num_queries) / kQueries);
      if (first_key + 64 > uniform(tile.num_keys)) plain.end = INT32_MIN;
      if (first_key >= uniform(tile.num_keys)) seen.end = INT32_MIN;
    }
    int32_t block = ascends ? first_block : first_block + num_blocks - 1;
    const int32_t last_block = ascends ? first_block + num_blocks - 1 : first_block;
    int32_t heads_left = forward.group;  // of the block
    const auto is_last_step = [&] { return heads_left == 1 && block == last_block; };
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[column][i] = dv[column][i] = 0.0f;
    }
    pipeline.keys_full(count).wait();
    pipeline.query_full(at).wait();
    start_scores(at.stage);
    // Under way into the loop, products would be done one after the other.
    ptx::wgmma_wait_group<0>();
    // The gradients of the tile before have left the places of dS and of dQ.
    if (leads) ptx::bulk_wait_group_read();
    ptx::named_barrier_sync(1, 256);
    pipeline.values_full(count).wait();
    int32_t held = -1;     // the stage of Q that dK is still being made from
    int32_t num_done = 0;  // steps of this tile
    float dq[8][4];
    // Of the step before. That the first step of a tile has none is not asked: a branch around products makes all of
    // them wait for each other. It makes dQ of any dS, which is not used.
    const auto start_dq = [&] {
      const uint64_t from = all_scores + static_cast<uint32_t>((step + 1) % 2 * (Shape::kScoreBytes >> 4));
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < Shape::kKeys / 16; ++k) {
        if (k == 0) {
          BackwardProduct<T, 64>::template across<false>(dq, from, all_keys);
        } else {
          BackwardProduct<T, 64>::template across<true>(dq, from + k * kScoresDown, all_keys + k * kDown);
        }
      }
      ptx::wgmma_commit_group();
    };
    const auto fence_stores = [&] {
      ptx::fence_proxy_async_shared();
      __syncwarp();
    };
    const auto store_sums = [&](int32_t of_step) {
      pipeline.sums_empty(of_step, warpgroup).producer_wait();
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        if (column < Shape::kRepeatedColumns / 8 && warpgroup == 1) continue;
        xa::ptx::store_shared_16(own_sums + column * 512,
                                 make_uint4(__float_as_uint(dq[column][0]), __float_as_uint(dq[column][1]),
                                            __float_as_uint(dq[column][2]), __float_as_uint(dq[column][3])));
      }
    };
    // Once dK of the step before is there: releases its block of Q, and hands its half of dQ, of the step before that
    // one, to the warp that adds it to its sums. A fence behind the stores of dQ themselves would wait for them, and
    // stores to shared memory wait for products both of whose operands come from there.
    const auto finish_step_before = [&] {
      if (held >= 0) release(pipeline.query_empty({held, 0}));
      fence_stores();
      if (num_done > 1) release(pipeline.sums_full(PipelineState<2>(step - 2), warpgroup));
    };
    // Where the keys are `hidden` from all queries, dS is 0, and of the products only the half of dQ is left.
    const auto take_step = [&](auto hidden) {
      constexpr bool kHidden = decltype(hidden)::value;
      const PipelineState<2> now(step);
      float dp[kQueryTiles][4];
      uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
      const uint64_t dout = douts + now.stage * (Shape::kQueryBytes >> 4);
      pipeline.dout_full(now).wait();
      if constexpr (!kHidden) {
        const ReadRowPairs lses(pipeline.lses(at.stage)), deltas(pipeline.deltas(now.stage));
        if constexpr (Shape::kStartsFromDelta) {
#pragma unroll
          for (int column = 0; column < kQueryTiles; ++column) {
            const float2 delta = deltas.of(column);
            dp[column][0] = dp[column][2] = delta.x;
            dp[column][1] = dp[column][3] = delta.y;
          }
        }
        ptx::wgmma_wait_group<0>();  // dK of the step before, S
        finish_step_before();
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
          const uint64_t a =
              own_values + (k / kStepsOfPanel * (Shape::kKeyPanelBytes >> 4) + k % kStepsOfPanel * kAlong);
          const uint64_t b = dout + (k / kStepsOfPanel * (Shape::kQueryPanelBytes >> 4) + k % kStepsOfPanel * kAlong);
          if constexpr (Shape::kStartsFromDelta) {
            BackwardProduct<T, kQueries>::subtract_along(dp, a, b);
          } else if (k == 0) {
            BackwardProduct<T, kQueries>::template along<false>(dp, a, b);
          } else {
            BackwardProduct<T, kQueries>::template along<true>(dp, a, b);
          }
        }
        ptx::wgmma_commit_group();
        // The compiler moves nothing across a branch: exponentials ahead of the products would not be beside them, and
        // spill.
        if (!plain.holds(block)) {
          for_unseen<Shape>(forward, tile, block, [&](int column, int i) { scores[column][i] = -INFINITY; });
        }
        const auto modified =
            modified_weights<Shape>(forward, tile, block, pipeline.lses(at.stage) + Shape::kSlopeOffset);
        // Makes weights of the scores of a column; under a soft cap packed ones, and leaves what makes dS of dP in
        // their place.
        const auto make_weights = [&](int column) {
          const float2 lse = lses.of(column);
          float (&s)[4] = scores[column];
          if constexpr (Shape::kCapped) {
            float weights[4];
            modified.bend(s[0], s[2], lse.x, weights[0], weights[2]);
            modified.bend(s[1], s[3], lse.y, weights[1], weights[3]);
            p[column / 2][column % 2 * 2] = Element<T>::pack(weights[0], weights[1]);
            p[column / 2][column % 2 * 2 + 1] = Element<T>::pack(weights[2], weights[3]);
          } else if constexpr (Shape::kBiased) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              s[i] = modified.add_bias(s[i], i % 2 == 0 ? lse.x : lse.y, 8 * column + i % 2 - i / 2 * 8);
            }
          } else {
            const float scale = forward.softmax_scale_log2;
            s[0] = xa::ptx::exp2_approx(__fmaf_rn(s[0], scale, -lse.x));
            s[1] = xa::ptx::exp2_approx(__fmaf_rn(s[1], scale, -lse.y));
            s[2] = xa::ptx::exp2_approx(__fmaf_rn(s[2], scale, -lse.x));
            s[3] = xa::ptx::exp2_approx(__fmaf_rn(s[3], scale, -lse.y));
          }
        };
        // While dP is under way; the others beside dS.
        constexpr int kFirst = kTightlyCapped ? 3 : kQueryTiles / 2;
#pragma unroll
        for (int column = 0; column < kFirst; ++column) make_weights(column);
        ptx::wgmma_wait_group<0>();  // dP
#pragma unroll
        for (int column = 0; column < kQueryTiles; ++column) {
          if (column + kFirst < kQueryTiles) make_weights(column + kFirst);
          float (&d)[4] = dp[column];
          const float (&s)[4] = scores[column];
          if constexpr (Shape::kStartsFromDelta) {
#pragma unroll
            for (int i = 0; i < 4; ++i) d[i] *= -s[i];
          } else {
            const float2 delta = deltas.of(column);
            d[0] = (d[0] - delta.x) * s[0];
            d[1] = (d[1] - delta.y) * s[1];
            d[2] = (d[2] - delta.x) * s[2];
            d[3] = (d[3] - delta.y) * s[3];
          }
          if constexpr (!Shape::kCapped) {
            p[column / 2][column % 2 * 2] = Element<T>::pack(s[0], s[1]);
            p[column / 2][column % 2 * 2 + 1] = Element<T>::pack(s[2], s[3]);
          }
          ds[column / 2][column % 2 * 2] = Element<T>::pack(d[0], d[1]);
          ds[column / 2][column % 2 * 2 + 1] = Element<T>::pack(d[2], d[3]);
        }
        if constexpr (Shape::kCapped) {
          // A cap leaves hidden scores a weight of at most 1, but no derivative.
          if (!plain.holds(block)) {
            for_unseen<Shape>(forward, tile, block, [&](int column, int i) {
              p[column / 2][column % 2 * 2 + i / 2] &= i % 2 == 0 ? 0xffff0000 : 0x0000ffff;
            });
          }
        }
      } else {
        ptx::wgmma_wait_group<0>();
        finish_step_before();
#pragma unroll
        for (auto& matrices : ds) {
#pragma unroll
          for (uint32_t& pair : matrices) pair = 0;
        }
      }
      if (is_last_step()) release(pipeline.values_empty(count));
      // Both have made dQ of the step before that one, whose dS lay where this one's will.
      if (num_done > 0) pipeline.scores_full(PipelineState<2>(step - 1)).wait();
#pragma unroll
      for (int k = 0; k < kQueries / 16; ++k) {
        const uint32_t panel = now.stage * Shape::kScoreBytes + k / 4 * Shape::kScorePanelBytes;
        // A chunk's place is its number within the row, by XOR.
        ptx::stmatrix_x4((own_scores + panel) ^ (k % 4 * 2 << 4), ds[k]);
      }
      wait_for_turn();
      if constexpr (!kHidden) {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQueries / 16; ++k) BackwardProduct<T, kHeadDim>::weigh(dv, p[k], dout + k * kDown);
        ptx::wgmma_commit_group();
      }
      start_dq();
      if constexpr (!kHidden) {
        const uint64_t from = queries + static_cast<uint32_t>(at.stage * (Shape::kQueryBytes >> 4));
#pragma unroll
        for (int k = 0; k < kQueries / 16; ++k) BackwardProduct<T, kHeadDim>::weigh(dk, ds[k], from + k * kDown);
      }
      ptx::wgmma_commit_group();  // without dK too, so that all steps end alike
      fence_stores();
      ptx::wgmma_wait_group<1>();  // dV, dQ
      release(pipeline.scores_full(now));
      release(pipeline.dout_empty(now));
      held = at.stage;
      at.advance();
    };
    const auto end_step = [&] {
      store_sums(num_done > 0 ? step - 1 : step);
      ++step;
      ++num_done;
    };
#pragma unroll 1
    while (true) {
      // At 128 queries a step hardly any block of them sees only one warpgroup's keys.
      if (kQueries == 128 || seen.holds(block)) {
        take_step(std::false_type{});
      } else {
        take_step(std::true_type{});
      }
      if constexpr (!Shape::kStoresBesideScores) end_step();
      if (is_last_step()) break;
      if (--heads_left == 0) {
        heads_left = forward.group;
        block += ascends ? 1 : -1;
      }
      pipeline.query_full(at).wait();
      start_scores(at.stage);
      pass_turn();
      if constexpr (Shape::kStoresBesideScores) end_step();
    }
    if constexpr (Shape::kStoresBesideScores) end_step();
    pass_turn();
    ptx::wgmma_wait_group<0>();  // dK
    finish_step_before();
    pipeline.scores_full(PipelineState<2>(step - 1)).wait();
    start_dq();
    ptx::wgmma_wait_group<0>();
    release(pipeline.keys_empty(count));
    store_sums(step - 1);
    fence_stores();
    release(pipeline.sums_full(PipelineState<2>(step - 1), warpgroup));
    // dK and dV leave through the places of dS and dQ.
    pipeline.sums_empty(step, warpgroup).producer_wait();
    ptx::named_barrier_sync(1, 256);
    constexpr uint32_t kGradientBytes = 64 * kHeadDim * 2;
    const uint32_t keys_to = pipeline.scores(0) + warpgroup * kGradientBytes;
    const uint32_t values_to = pipeline.sums(0) + warpgroup * kGradientBytes;
    const uint32_t matrix_offset = Panel::offset(matrix_row, lane / 16);
    const float scale = params.base.softmax_scale;
#pragma unroll
    for (int column = 0; column < kColumnTiles; column += 2) {
      uint32_t of_key[4], of_value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&k)[4] = dk[column + i / 2];
        const float (&v)[4] = dv[column + i / 2];
        of_key[i] = Element<T>::pack(k[i % 2 * 2] * scale, k[i % 2 * 2 + 1] * scale);
        of_value[i] = Element<T>::pack(v[i % 2 * 2], v[i % 2 * 2 + 1]);
      }
      const uint32_t panel = column / Panel::kChunks * (64 * Panel::kRowBytes);
      ptx::stmatrix_x4((keys_to + matrix_offset + panel) ^ (column % Panel::kChunks << 4), of_key);
      ptx::stmatrix_x4((values_to + matrix_offset + panel) ^ (column % Panel::kChunks << 4), of_value);
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(2 + warpgroup, 128);
    if (leads) {
      const RaggedRows rows(tile.first_key, tile.num_keys);
      const int32_t row = rows.base + key_block * Shape::kKeys + 64 * warpgroup;
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        const uint32_t from = panel * (64 * Panel::kRowBytes);
        ptx::tma_store(keys_to + from, params.dk, panel * Panel::kColumns, tile.kv_head, row, rows.end,
                       RaggedRows::kEnd);
        ptx::tma_store(values_to + from, params.dv, panel * Panel::kColumns, tile.kv_head, row, rows.end,
                       RaggedRows::kEnd);
      }
      ptx::bulk_commit();
    }
    __syncwarp();
    release(pipeline.tile_empty(turn));
  }
  if (warpgroup == 0) wait_for_turn();
  if (leads) ptx::bulk_wait_group();
}

}  // namespace xa::hopper
