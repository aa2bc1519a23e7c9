// The compute warpgroups of a backward CTA up to 128 columns. Each has 64 keys of the tile's block and keeps their dK
// and dV in registers while queries stream past. Scores and their gradients are transposed, [keys, queries], so that
// the accumulators of S^T and dP^T are operand A of dV and dK in the registers where they are. Only dS goes through
// shared memory: each warpgroup computes half of dQ, from the dS of both.
//
// The products of a step are, in order: dP; then dV, dQ of the previous step, dK, and S of the next step. Half of P is
// computed while dP runs and the other half between the columns of dS, because exponentials have the lowest rate.
//
// As dQ is one step late, a warpgroup does not wait for the dS that the other one is computing. Named barriers keep the
// two half a step apart (FlashAttention-3's warp_scheduler_barrier): each starts its products from dV to S while the
// other one computes P and dS.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper_bwd/bias.cuh"
#include "hopper_bwd/key_ranges.cuh"
#include "hopper_bwd/logits_transform.cuh"
#include "hopper_bwd/masks.cuh"
#include "hopper_bwd/pipeline.cuh"
#include "hopper_bwd/products.cuh"
#include "hopper_bwd/ragged_rows.cuh"
#include "hopper_bwd/shape.cuh"
#include "hopper_bwd/widened_gradient.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

/// lse or delta of a block of queries in shared memory. A lane needs those of its two columns of each 8-column tile, as
/// all lanes of equal lane % 4 do. Each lane reads them all: reading an eighth and exchanging by `shfl` takes two
/// instructions instead of one, and lanes wait for each other.
class RowStatPairs {
 public:
  __device__ __forceinline__ explicit RowStatPairs(uint32_t from) : own_(from + threadIdx.x % 4 * 8) {}
  /// Those of columns 2 (lane % 4) and 2 (lane % 4) + 1 of a tile.
  __device__ __forceinline__ float2 pair(int tile) const { return ptx::load_shared_f32x2(own_ + 32 * tile); }

 private:
  uint32_t own_;
};

/// Named barrier of warpgroup 0; that of warpgroup 1 is the next one. Barriers 1 to 3 synchronise the tiles and their
/// epilogues.
constexpr int kWarpSchedulerBarrier = 4;

/// Computes all tiles of the CTA. Executed by each of the two warpgroups.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_tiles(const HopperBackwardParams& params,
                                              const BackwardPipeline<Shape>& pipeline, int32_t warpgroup) {
  using Atom = typename Shape::Atom;
  constexpr int kQueries = Shape::kQueries, kHeadDim = Shape::kHeadDim;
  constexpr int kQueryTiles = kQueries / 8, kColumnTiles = kHeadDim / 8;
  // dP is computed for so many queries at a time. With a bias, registers are left for half of 128 queries.
  constexpr int kPartQueries = Shape::kHasBias ? 64 : kQueries, kPartTiles = kPartQueries / 8;
  // A soft cap needs registers that 128 queries per step hardly leave.
  constexpr bool kFewRegistersLeft = Shape::kHasSoftcap && kQueries == 128;
  constexpr int kStepsPerAtom = Atom::kColumns / 16;
  using DsAtom = typename Shape::DsAtom;
  // Advances of a matrix descriptor by 16 rows and by 16 columns, in units of 16 bytes.
  constexpr uint64_t kRowStep = 2 * Atom::kBytes >> 4, kDsRowStep = 2 * DsAtom::kBytes >> 4, kColumnStep = 2;
  const AttentionParams& forward = params.base.forward;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const bool is_leader = threadIdx.x % 128 == 0;
  const auto release = [&](const Barrier& barrier) {
    if (lane == 0) barrier.arrive();
  };
  const auto descriptor = [](uint32_t address, uint32_t atom_column_bytes) {
    return matrix_descriptor<Atom>(address, atom_column_bytes, Atom::kBytes);
  };
  const uint32_t own_rows = warpgroup * 8 * Atom::kBytes;
  const uint64_t own_keys = descriptor(pipeline.keys() + own_rows, 0);
  const uint64_t own_values = descriptor(pipeline.values() + own_rows, 0);
  const uint64_t queries = descriptor(pipeline.queries(0), Shape::kQueryAtomColumnBytes);
  const uint64_t douts = descriptor(pipeline.douts(0), Shape::kQueryAtomColumnBytes);
  // The operands of this warpgroup's half of dQ: all 64 queries and the first or the last kDqColumns columns of K; with
  // 128 queries, the warpgroup's 64 of them and all of K.
  constexpr int kDqTiles = Shape::kDqColumns / 8;
  constexpr int kSecondAtomColumn = Shape::kAtomColumns - Shape::kDqColumns / Atom::kColumns;
  const uint64_t all_keys = descriptor(pipeline.keys() + warpgroup * (kSecondAtomColumn * Shape::kKeyAtomColumnBytes),
                                       Shape::kKeyAtomColumnBytes);
  const uint64_t all_ds = matrix_descriptor<DsAtom>(
      pipeline.ds(0) + (Shape::kSplitsDqColumns ? 0 : warpgroup * Shape::kDsAtomColumnBytes), 0, DsAtom::kBytes);
  // The row of the warpgroup's 64 whose address this lane passes to stmatrix.
  const int32_t matrix_row = 16 * warp + lane % 16;
  const uint32_t own_ds = pipeline.ds(0) + warpgroup * 8 * DsAtom::kBytes + DsAtom::offset(matrix_row, lane / 16);
  // Skips the columns of dQ that the second warpgroup repeats.
  const int32_t first_column = warpgroup * (Shape::kRepeatedDqColumns / 8);
  const uint32_t own_dq =
      pipeline.dq(warpgroup) + warp * (kDqTiles - first_column) * 512 - first_column * 512 + lane * 16;
  using Bias = std::conditional_t<Shape::kHasF32Bias, F32StepBias<Shape>, StepBias>;
  const Bias first_bias(pipeline.bias(0, warpgroup), warp, lane);

  float dk[kColumnTiles][4], dv[kColumnTiles][4], scores[kQueryTiles][4];
  RingPipelineState<Shape::kQueryStages> query_state;
  int32_t step = 0;

  const auto warp_scheduler_barrier_sync = [&] { ptx::named_barrier_sync(kWarpSchedulerBarrier + warpgroup, 256); };
  const auto warp_scheduler_barrier_arrive = [&] {
    ptx::named_barrier_arrive(kWarpSchedulerBarrier + 1 - warpgroup, 256);
  };
  const auto start_s = [&](int32_t stage) {
    const uint64_t block = queries + static_cast<uint32_t>(stage * (Shape::kQueryBytes >> 4));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint64_t a =
          own_keys + (k / kStepsPerAtom * (Shape::kKeyAtomColumnBytes >> 4) + k % kStepsPerAtom * kColumnStep);
      const uint64_t b =
          block + (k / kStepsPerAtom * (Shape::kQueryAtomColumnBytes >> 4) + k % kStepsPerAtom * kColumnStep);
      if (k == 0) {
        BackwardWgmma<T, kQueries>::template ss<false>(scores, a, b);
      } else {
        BackwardWgmma<T, kQueries>::template ss<true>(scores, a, b);
      }
    }
    ptx::wgmma_commit_group();
  };

  if (warpgroup == 1) warp_scheduler_barrier_arrive();
#pragma unroll 1
  for (int32_t tile_count = 0;; ++tile_count) {
    const PipelineState<2> tile_state(tile_count);
    pipeline.tile_full(tile_state).wait();
    const BackwardTile& tile = pipeline.tile(tile_state);
    const int32_t key_block = uniform(tile.key_block);
    if (key_block < 0) break;
    const int32_t first_block = uniform(tile.first_block), num_blocks = uniform(tile.num_blocks);
    const bool ascends = uniform(tile.queries_ascend) != 0;
    BlockRange unmasked = {INT32_MIN, INT32_MAX}, visible = unmasked;
    {
      const int32_t first_key = key_block * Shape::kKeys + 64 * warpgroup, shift = uniform(tile.shift);
      if (forward.window_right >= 0) {
        unmasked.begin = -floor_div(-(first_key + 63 - shift - forward.window_right), kQueries);
        visible.begin = floor_div(first_key - shift - forward.window_right, kQueries);
      }
      if (forward.window_left >= 0) {
        unmasked.end = floor_div(first_key - shift + forward.window_left + 1, kQueries);
        visible.end = floor_div(first_key + 63 - shift + forward.window_left, kQueries) + 1;
      }
      if constexpr (Shape::kMasksQueriesPastEnd) unmasked.end = min(unmasked.end, uniform(tile.num_queries) / kQueries);
      if (!Shape::kHasBias && first_key + 64 > uniform(tile.num_keys)) unmasked.end = INT32_MIN;
      if (first_key >= uniform(tile.num_keys)) visible.end = INT32_MIN;
    }
    const int32_t first_own_key = key_block * Shape::kKeys + 64 * warpgroup;
    // The keys of the warp that some row attends to: others may hold NaN.
    uint32_t attended = 0xffff;
    if constexpr (Shape::kHasKeyRanges) {
      attended = attended_by_some_row(params, uniform(tile.key_block_index), 4 * warpgroup + warp);
    }
    int32_t block = ascends ? first_block : first_block + num_blocks - 1;
    const int32_t last_block = ascends ? first_block + num_blocks - 1 : first_block;
    const int32_t num_heads = uniform(tile.num_heads);
    int32_t heads_left = num_heads;  // query heads left in this block
    const auto is_last_step = [&] { return heads_left == 1 && block == last_block; };
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[column][i] = dv[column][i] = 0.0f;
    }
    pipeline.keys_full(tile_count).wait();
    pipeline.query_full(query_state).wait();
    start_s(query_state.stage);
    // Products that are pending when the loop is entered would be serialised by ptxas.
    ptx::wgmma_wait_group<0>();
    if constexpr (Shape::kHasKeyRanges) {
      if (attended != 0xffff) {
        pipeline.values_full(tile_count).wait();
        clear_unattended_keys<Shape>(pipeline.keys(), pipeline.values(), 4 * warpgroup + warp, attended);
        ptx::fence_proxy_async_shared();
      }
    }
    // The previous tile's gradients have been stored from the buffers of dS and dQ.
    if (is_leader) ptx::bulk_wait_group_read();
    if constexpr (Shape::kHasBias) {
      // Fewer than 8, of the sequence's first keys.
      if (first_own_key + warp == 0) {
        pipeline.values_full(tile_count).wait();
        clear_hidden_keys<Shape>(pipeline.keys(), pipeline.values(), tile.hidden_keys);
        ptx::fence_proxy_async_shared();
      }
    }
    ptx::named_barrier_sync(1, 256);
    pipeline.values_full(tile_count).wait();
    int32_t dk_query_stage = -1;  // stage of Q that a pending dK reads, or -1
    int32_t steps_done = 0;       // steps of this tile
    float dq[kDqTiles][4];
    // Starts dQ of the previous step. The first step of a tile has none, but computes a dQ that is not used: a branch
    // around wgmma makes ptxas serialise all products.
    const auto start_dq = [&] {
      const uint64_t from = all_ds + static_cast<uint32_t>((step + 1) % 2 * (Shape::kDsBytes >> 4));
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < Shape::kKeys / 16; ++k) {
        if (k == 0) {
          BackwardWgmma<T, Shape::kDqColumns>::template ss_mn_major<false>(dq, from, all_keys);
        } else {
          BackwardWgmma<T, Shape::kDqColumns>::template ss_mn_major<true>(dq, from + k * kDsRowStep,
                                                                          all_keys + k * kRowStep);
        }
      }
      ptx::wgmma_commit_group();
    };
    const auto fence_stores = [&] {
      ptx::fence_proxy_async_shared();
      __syncwarp();
    };
    const auto store_dq = [&](int32_t dq_step) {
      pipeline.dq_empty(dq_step, warpgroup).producer_wait();
#pragma unroll
      for (int column = 0; column < kDqTiles; ++column) {
        if (column < Shape::kRepeatedDqColumns / 8 && warpgroup == 1) continue;
        xa::ptx::store_shared_16(own_dq + column * 512,
                                 make_uint4(__float_as_uint(dq[column][0]), __float_as_uint(dq[column][1]),
                                            __float_as_uint(dq[column][2]), __float_as_uint(dq[column][3])));
      }
    };
    // Called when dK of the previous step is complete: releases its stage of Q, and passes this warpgroup's half of dQ,
    // of the step before that, to the dQ warps. A fence directly after the stores of dQ would wait for them, and stores
    // to shared memory wait for wgmma with both operands in shared memory.
    const auto finish_previous_step = [&] {
      if (dk_query_stage >= 0) release(pipeline.query_empty({dk_query_stage, 0}));
      fence_stores();
      if (steps_done > 1) release(pipeline.dq_full(PipelineState<2>(step - 2), warpgroup));
    };
    // In a block where no query attends to the warpgroup's keys, dS is 0 and only its half of dQ is computed.
    const auto compute_step = [&](auto fully_masked) {
      constexpr bool kFullyMasked = decltype(fully_masked)::value;
      const PipelineState<2> step_state(step);
      float dp[kPartTiles][4];
      uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
      const Bias step_bias(first_bias, Shape::kBiasStages > 1 ? pipeline.bias(step, 0) - pipeline.bias(0, 0) : 0);
      [[maybe_unused]] const bool stores_dbias = Shape::kHasBias && with_bias(params).stores_dbias != 0;
      const uint64_t dout = douts + step_state.stage * (Shape::kQueryBytes >> 4);
      pipeline.dout_full(step_state).wait();
      if constexpr (!kFullyMasked) {
        const RowStatPairs lses(pipeline.lses(query_state.stage)), deltas(pipeline.deltas(step_state.stage));
        if constexpr (Shape::kInitializesDpWithDelta) {
#pragma unroll
          for (int column = 0; column < kPartTiles; ++column) {
            const float2 delta = deltas.pair(column);
            dp[column][0] = dp[column][2] = delta.x;
            dp[column][1] = dp[column][3] = delta.y;
          }
        }
        const auto start_dp = [&](int part) {
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < kHeadDim / 16; ++k) {
            const uint64_t a =
                own_values + (k / kStepsPerAtom * (Shape::kKeyAtomColumnBytes >> 4) + k % kStepsPerAtom * kColumnStep);
            const uint64_t b =
                dout + (part * (kPartQueries * Atom::kRowBytes >> 4) +
                        k / kStepsPerAtom * (Shape::kQueryAtomColumnBytes >> 4) + k % kStepsPerAtom * kColumnStep);
            if constexpr (Shape::kInitializesDpWithDelta) {
              BackwardWgmma<T, kPartQueries>::ss_subtract(dp, a, b);
            } else if (k == 0) {
              BackwardWgmma<T, kPartQueries>::template ss<false>(dp, a, b);
            } else {
              BackwardWgmma<T, kPartQueries>::template ss<true>(dp, a, b);
            }
          }
          ptx::wgmma_commit_group();
        };
        ptx::wgmma_wait_group<0>();  // dK of the previous step, S
        finish_previous_step();
        start_dp(0);
        // The compiler moves nothing across a branch. Exponentials before the start of dP would not overlap with it,
        // and would spill.
        if constexpr (Shape::kHasBias) pipeline.bias_full(step, warpgroup).wait();
        const auto mask = [&](int column, int i) {
          scores[column][i] = -INFINITY;
          if constexpr (Shape::kHasF32Bias) {
            step_bias.store(column, i, 0.0f);
          } else if constexpr (Shape::kHasBias) {
            clear_bias(pipeline.bias(step, warpgroup), column, i);
          }
        };
        if constexpr (Shape::kHasKeyRanges) {
          const uint32_t stats = pipeline.lses(query_state.stage);
          if (!StepKeys(stats + Shape::kBlockKeysOffset).all_attend(first_own_key)) {
            for_masked_by_ranges<Shape>(stats + Shape::kRowKeysOffset, key_block, mask);
          }
        } else if (!unmasked.contains(block)) {
          for_masked<Shape>(forward, tile, block, mask);
          if constexpr (Shape::kHasBias && !Shape::kHasF32Bias) __syncwarp();
        }
        const auto transform =
            logits_transform<Shape>(forward, tile, block, pipeline.lses(query_state.stage) + Shape::kSlopeOffset);
        // Computes P of a column tile in place of its scores. With a soft cap P is packed at once, and P times the
        // derivative of the logit is left in place of the scores.
        const auto compute_p_column = [&](int column) {
          const float2 lse = lses.pair(column);
          float (&s)[4] = scores[column];
          if constexpr (Shape::kHasSoftcap) {
            float p_f32[4];
            transform.softcap(s[0], s[2], lse.x, p_f32[0], p_f32[2]);
            transform.softcap(s[1], s[3], lse.y, p_f32[1], p_f32[3]);
            p[column / 2][column % 2 * 2] = Element<T>::pack(p_f32[0], p_f32[1]);
            p[column / 2][column % 2 * 2 + 1] = Element<T>::pack(p_f32[2], p_f32[3]);
          } else if constexpr (Shape::kHasAlibi) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              s[i] = transform.alibi(s[i], i % 2 == 0 ? lse.x : lse.y, 8 * column + i % 2 - i / 2 * 8);
            }
          } else if constexpr (Shape::kHasF32Bias) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              s[i] = transform.biased(s[i], step_bias.load(column, i), i % 2 == 0 ? lse.x : lse.y);
            }
          } else if constexpr (Shape::kHasBias) {
            uint32_t bias[2];
            step_bias.load(column, bias);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float2 x = unpack<T>(bias[half]);
              s[2 * half] = transform.biased(s[2 * half], x.x, lse.x);
              s[2 * half + 1] = transform.biased(s[2 * half + 1], x.y, lse.y);
            }
          } else {
            const float scale = forward.softmax_scale_log2;
            s[0] = xa::ptx::exp2_approx(__fmaf_rn(s[0], scale, -lse.x));
            s[1] = xa::ptx::exp2_approx(__fmaf_rn(s[1], scale, -lse.y));
            s[2] = xa::ptx::exp2_approx(__fmaf_rn(s[2], scale, -lse.x));
            s[3] = xa::ptx::exp2_approx(__fmaf_rn(s[3], scale, -lse.y));
          }
        };
        // These columns overlap with dP, the remaining ones with the computation of dS.
        constexpr int kFirst = kFewRegistersLeft ? 3 : kPartTiles < kQueryTiles ? 2 : kPartTiles / 2;
#pragma unroll
        for (int column = 0; column < kQueryTiles; ++column) {
          const int in_part = column % kPartTiles;
          if (in_part == 0) {
            if (column > 0) start_dp(column / kPartTiles);
#pragma unroll
            for (int i = 0; i < kFirst; ++i) compute_p_column(column + i);
            ptx::wgmma_wait_group<0>();  // dP
          }
          if (in_part + kFirst < kPartTiles) compute_p_column(column + kFirst);
          float (&d)[4] = dp[in_part];
          const float (&s)[4] = scores[column];
          if constexpr (Shape::kInitializesDpWithDelta) {
#pragma unroll
            for (int i = 0; i < 4; ++i) d[i] *= -s[i];
          } else {
            const float2 delta = deltas.pair(column);
            d[0] = (d[0] - delta.x) * s[0];
            d[1] = (d[1] - delta.y) * s[1];
            d[2] = (d[2] - delta.x) * s[2];
            d[3] = (d[3] - delta.y) * s[3];
          }
          if constexpr (!Shape::kHasSoftcap) {
            p[column / 2][column % 2 * 2] = Element<T>::pack(s[0], s[1]);
            p[column / 2][column % 2 * 2 + 1] = Element<T>::pack(s[2], s[3]);
          }
          ds[column / 2][column % 2 * 2] = Element<T>::pack(d[0], d[1]);
          ds[column / 2][column % 2 * 2 + 1] = Element<T>::pack(d[2], d[3]);
          if constexpr (Shape::kHasF32Bias) {
#pragma unroll
            for (int i = 0; i < 4; ++i) step_bias.store(column, i, d[i], stores_dbias);
          }
        }
        if constexpr (Shape::kHasSoftcap) {
          // Under a soft cap a score of -inf gives a finite logit: its P is cleared here. Its derivative is 0, so dS
          // is.
          if (!unmasked.contains(block)) {
            for_masked<Shape>(forward, tile, block, [&](int column, int i) {
              p[column / 2][column % 2 * 2 + i / 2] &= i % 2 == 0 ? 0xffff0000 : 0x0000ffff;
            });
          }
        }
      } else {
        ptx::wgmma_wait_group<0>();
        finish_previous_step();
#pragma unroll
        for (auto& matrices : ds) {
#pragma unroll
          for (uint32_t& pair : matrices) pair = 0;
        }
      }
      if (is_last_step()) release(pipeline.values_empty(tile_count));
      // Both warpgroups have finished dQ of the step before, so the stage that this step's dS will occupy is free.
      if (steps_done > 0) pipeline.ds_full(PipelineState<2>(step - 1)).wait();
      if constexpr (Shape::kHasBias && !kFullyMasked) {
        clear_absent_keys<Shape>(tile, p, ds, [&](int half) {
          if constexpr (Shape::kHasF32Bias) {
#pragma unroll
            for (int i = 0; i < kQueryTiles * 2; ++i) step_bias.store(i / 2, half * 2 + i % 2, 0.0f);
          }
        });
      }
#pragma unroll
      for (int k = 0; k < kQueries / 16; ++k) {
        const uint32_t atom_column = step_state.stage * Shape::kDsBytes + k / 4 * Shape::kDsAtomColumnBytes;
        // The swizzle XORs the index of a 16-byte chunk with the row.
        ptx::stmatrix_x4((own_ds + atom_column) ^ (k % 4 * 2 << 4), ds[k]);
        if constexpr (Shape::kHasBias && !Shape::kHasF32Bias) {
          if (stores_dbias) step_bias.store(k, ds[k]);
        }
      }
      warp_scheduler_barrier_sync();
      if constexpr (!kFullyMasked) {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kQueries / 16; ++k) BackwardWgmma<T, kHeadDim>::rs(dv, p[k], dout + k * kRowStep);
        ptx::wgmma_commit_group();
      }
      start_dq();
      if constexpr (!kFullyMasked) {
        const uint64_t from = queries + static_cast<uint32_t>(query_state.stage * (Shape::kQueryBytes >> 4));
#pragma unroll
        for (int k = 0; k < kQueries / 16; ++k) BackwardWgmma<T, kHeadDim>::rs(dk, ds[k], from + k * kRowStep);
      }
      ptx::wgmma_commit_group();  // committed without dK too, so that all steps end alike
      fence_stores();
      if constexpr (Shape::kHasBias) release(pipeline.bias_empty(step, warpgroup));
      ptx::wgmma_wait_group<1>();  // dV, dQ
      release(pipeline.ds_full(step_state));
      release(pipeline.dout_empty(step_state));
      dk_query_stage = query_state.stage;
      query_state.advance();
    };
    const auto end_step = [&] {
      store_dq(steps_done > 0 ? step - 1 : step);
      ++step;
      ++steps_done;
    };
#pragma unroll 1
    while (true) {
      // With 128 queries per step hardly any block attends to the keys of one warpgroup only. With a bias, dS of all
      // blocks goes to memory.
      bool is_visible = kQueries == 128 || Shape::kHasBias;
      if constexpr (Shape::kHasKeyRanges && kQueries != 128) {
        is_visible = StepKeys(pipeline.lses(query_state.stage) + Shape::kBlockKeysOffset).some_attend(first_own_key);
      } else {
        is_visible = is_visible || visible.contains(block);
      }
      if (is_visible) {
        compute_step(std::false_type{});
      } else {
        compute_step(std::true_type{});
      }
      if constexpr (!Shape::kStoresDqDuringS) end_step();
      if (is_last_step()) break;
      if (--heads_left == 0) {
        heads_left = num_heads;
        block += ascends ? 1 : -1;
      }
      pipeline.query_full(query_state).wait();
      start_s(query_state.stage);
      warp_scheduler_barrier_arrive();
      if constexpr (Shape::kStoresDqDuringS) end_step();
    }
    if constexpr (Shape::kStoresDqDuringS) end_step();
    warp_scheduler_barrier_arrive();
    ptx::wgmma_wait_group<0>();  // dK
    finish_previous_step();
    pipeline.ds_full(PipelineState<2>(step - 1)).wait();
    start_dq();
    ptx::wgmma_wait_group<0>();
    release(pipeline.keys_empty(tile_count));
    store_dq(step - 1);
    fence_stores();
    release(pipeline.dq_full(PipelineState<2>(step - 1), warpgroup));
    if (params.widens_key_gradients != 0) {
      store_widened_gradient<Shape>(dk, params.base.softmax_scale, params.base.dk, forward, tile, forward.head_dim);
      store_widened_gradient<Shape>(dv, 1.0f, params.base.dv, forward, tile, forward.value_dim);
      __syncwarp();
      release(pipeline.tile_empty(tile_state));
      continue;
    }
    // The buffers of dS and dQ become the staging of dK and dV.
    pipeline.dq_empty(step, warpgroup).producer_wait();
    ptx::named_barrier_sync(1, 256);
    constexpr uint32_t kGradientBytes = 64 * kHeadDim * 2;
    // Computed here, because no register is left for it in the loop.
    const int32_t own = kFewRegistersLeft ? xa::ptx::opaque(warpgroup) : warpgroup;
    const uint32_t dk_staging = pipeline.ds(0) + own * kGradientBytes;
    const uint32_t dv_staging = pipeline.dq(0) + own * kGradientBytes;
    const uint32_t matrix_offset = Atom::offset(matrix_row, lane / 16);
    const float scale = params.base.softmax_scale;
#pragma unroll
    for (int column = 0; column < kColumnTiles; column += 2) {
      uint32_t dk_pairs[4], dv_pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&k)[4] = dk[column + i / 2];
        const float (&v)[4] = dv[column + i / 2];
        dk_pairs[i] = Element<T>::pack(k[i % 2 * 2] * scale, k[i % 2 * 2 + 1] * scale);
        dv_pairs[i] = Element<T>::pack(v[i % 2 * 2], v[i % 2 * 2 + 1]);
      }
      const uint32_t atom_column = column / Atom::kChunks * (64 * Atom::kRowBytes);
      ptx::stmatrix_x4((dk_staging + matrix_offset + atom_column) ^ (column % Atom::kChunks << 4), dk_pairs);
      ptx::stmatrix_x4((dv_staging + matrix_offset + atom_column) ^ (column % Atom::kChunks << 4), dv_pairs);
    }
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(2 + warpgroup, 128);
    if (is_leader) {
      const RaggedRows rows(tile.first_key, tile.num_keys);
      const int32_t row = rows.base + key_block * Shape::kKeys + 64 * warpgroup;
#pragma unroll
      for (int atom_column = 0; atom_column < Shape::kAtomColumns; ++atom_column) {
        const uint32_t from = atom_column * (64 * Atom::kRowBytes);
        ptx::tma_store(dk_staging + from, params.dk, atom_column * Atom::kColumns, tile.kv_head, row, rows.end,
                       RaggedRows::kEnd);
        ptx::tma_store(dv_staging + from, params.dv, atom_column * Atom::kColumns, tile.kv_head, row, rows.end,
                       RaggedRows::kEnd);
      }
      ptx::bulk_commit_group();
    }
    __syncwarp();
    release(pipeline.tile_empty(tile_state));
  }
  if (warpgroup == 0) warp_scheduler_barrier_sync();
  if (is_leader) ptx::bulk_wait_group();
}

}  // namespace xa::hopper
