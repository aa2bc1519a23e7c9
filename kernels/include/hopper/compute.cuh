// The compute warpgroups of a prefill CTA, each with 64 rows of the work tile. As in FlashAttention-3 two things
// overlap: within a warpgroup, Q K^T of the next block and P V of this one run during the next block's softmax; and
// while one warpgroup is in its softmax, the tensor cores work for the other ones.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "hopper/bias.cuh"
#include "hopper/convert_query.cuh"
#include "hopper/mask.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/row_scaled_logits.cuh"
#include "hopper/shape.cuh"
#include "hopper/shifted_bias.cuh"
#include "hopper/swizzle_atom.cuh"
#include "hopper/tile_loop.cuh"
#include "hopper/token_scales.cuh"
#include "hopper/wgmma.cuh"
#include "logits_transform.cuh"
#include "output_rows.cuh"
#include "params/hopper_prefill.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Clears the rows of a block of V whose keys no query of the sequence attends to: memory there may hold NaN, and
/// 0 * NaN is NaN. Each warpgroup clears all of them before it uses the block, if the V warp does not (kHasLeanLoop).
template <typename Shape>
__device__ __forceinline__ void clear_invisible_values(uint8_t* values, const PrefillTile& tile, int32_t first_key) {
  using Atom = typename Shape::Atom;
  using Block = typename Shape::ValueBlock;
  constexpr int kChunks = Block::kAtomColumns * Atom::kChunks;
  for (int32_t item = threadIdx.x % 128; item < Shape::kKeys * kChunks; item += 128) {
    const int32_t row = item / kChunks, chunk = item % kChunks, key = first_key + row;
    if (key >= tile.visible_begin && key < tile.visible_end) continue;
    uint8_t* const to = values + row / 8 * Block::kStrideByteOffset +
                        chunk / Atom::kChunks * Block::kLeadingByteOffset + row % 8 * Atom::kRowBytes +
                        chunk % Atom::kChunks * 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async_shared();
}

/// The same of a block that not all rows of the tile attend to, if they have masks of their own: clears the rows of V
/// whose keys no row of the tile attends to.
template <typename Shape>
__device__ __forceinline__ void clear_unattended_values(const HopperPrefillParams& prefill, uint8_t* values,
                                                        const RowMaskTile& tile, int32_t first_key) {
  using Atom = typename Shape::Atom;
  using Block = typename Shape::ValueBlock;
  constexpr int kChunks = Block::kAtomColumns * Atom::kChunks;
  const uint64_t attended[2] = {attended_64(prefill, tile, first_key), attended_64(prefill, tile, first_key + 64)};
  for (int32_t item = threadIdx.x % 128; item < Shape::kKeys * kChunks; item += 128) {
    const int32_t row = item / kChunks, chunk = item % kChunks;
    if (((row < 64 ? attended[0] : attended[1]) >> row % 64 & 1) != 0) continue;
    uint8_t* const to = values + row / 8 * Block::kStrideByteOffset +
                        chunk / Atom::kChunks * Block::kLeadingByteOffset + row % 8 * Atom::kRowBytes +
                        chunk % Atom::kChunks * 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async_shared();
}

/// A compute warpgroup: computes its rows of all tiles of the CTA. With kHasOneStep, the code of a block exists once,
/// not once for each of the ranges of blocks with and without a mask: the first tile of a CTA has less code to load.
template <typename Shape, typename T, typename LogitsTransform, bool kHasOneStep = false>
__device__ __forceinline__ void compute_tiles(const HopperPrefillParams& prefill, const Pipeline<Shape>& pipeline) {
  constexpr int kKeys = Shape::kKeys;
  using KeyState = PipelineState<Shape::kStages>;
  using ValueState = PipelineState<Shape::kValueStages>;
  constexpr bool kTransforms = !std::is_same_v<LogitsTransform, logits_none>;
  // logits_none leaves the softmax scale to the exponent, softcap the cap and row_scaled the factor of a row;
  // softcap_alibi turns scores into logits in base 2.
  constexpr bool kScaleInExponent = !std::is_same_v<LogitsTransform, logits_softcap_alibi>;
  constexpr bool kHasRowUnits = std::is_same_v<LogitsTransform, logits_row_scaled>;
  constexpr bool kRoundsPerBlock = !kTransforms && !Shape::kHasLeanLoop;
  using Atom = typename Shape::Atom;
  using KeyBlock = typename Shape::KeyBlock;
  using ValueBlock = typename Shape::ValueBlock;
  const AttentionParams& params = prefill.attention;
  const int32_t warp = uniform(threadIdx.x / 32), warpgroup = warp / 4, warp_row = first_row_of_warp<Shape>(warp);
  const bool is_lane_0 = threadIdx.x % 32 == 0;
  const auto sync_warpgroup = [&] {
    if constexpr (Shape::kHasWarpgroupBlocks) {
      // Warpgroups come here at different blocks, so each has a barrier instruction of its own.
      if (warpgroup == 0) {
        ptx::named_barrier_sync(1, 128);
      } else if (warpgroup == 1) {
        ptx::named_barrier_sync(2, 128);
      } else {
        ptx::named_barrier_sync(3, 128);
      }
    } else {
      ptx::named_barrier_sync(1 + warpgroup, 128);
    }
  };
  const auto release = [&](const Barrier& barrier) {
    if (is_lane_0) barrier.arrive();
  };

  // Q of f16 is used as it is.
  const bool converts_query = Shape::kConvertsKv && params.q_type == QueryType::Bf16;
  const LogitsTransform transform = [&] {
    if constexpr (Shape::kConvertsKv) {
      return LogitsTransform(params, converts_query ? pipeline.row_factors() : nullptr);
    } else {
      return LogitsTransform(params);
    }
  }();
  // The factor from transformed scores to logits in base 2.
  const float unit = kScaleInExponent ? ptx::opaque(transform.log2_unit()) : 1.0f;
  // Descriptors of the first stages. Addresses in descriptors are in units of 16 bytes.
  constexpr bool kDividesColumns = Shape::kColumnWarpgroups > 1;
  const uint64_t query =
      matrix_descriptor<Atom>(pipeline.query() + (kDividesColumns ? 0 : warpgroup * 8 * Atom::kBytes), 0, Atom::kBytes);
  const uint64_t keys = matrix_descriptor<Atom>(pipeline.keys(0), 0, KeyBlock::kStrideByteOffset);
  const uint64_t values =
      matrix_descriptor<Atom>(pipeline.values(0), ValueBlock::kLeadingByteOffset, ValueBlock::kStrideByteOffset) +
      (kDividesColumns ? warpgroup * (Shape::kOutputColumns / Atom::kColumns * ValueBlock::kLeadingByteOffset >> 4)
                       : 0);

  float scores[kKeys / 8][4];
  uint32_t weights[kKeys / 16][4];
  OnlineSoftmax<Shape::kOutputColumns / 8> state;
  [[maybe_unused]] TokenScaleWeights token_scales;

  // S = Q K^T of a stage of K, as one wgmma group.
  const auto issue_qk = [&](const KeyState& at) {
    constexpr int kSteps = Atom::kColumns / 16;  // per atom column
    const uint64_t block = keys + at.stage * (KeyBlock::kBytes >> 4);
    ptx::wgmma_fence();
    // The descriptors of more columns do not fit the uniform registers: each atom column is then a basic block.
    constexpr int kUnrolledSteps = kDividesColumns ? kSteps : Shape::kHeadDim / 16;
#pragma unroll
    for (int step = 0; step < kUnrolledSteps; ++step) {
      const uint64_t a = query + (step / kSteps * (Shape::kQueryAtomColumnBytes >> 4) + step % kSteps * 2);
      const uint64_t b = block + (step / kSteps * (KeyBlock::kLeadingByteOffset >> 4) + step % kSteps * 2);
      if (step == 0) {
        Wgmma<T, kKeys>::template ss<false>(scores, a, b);
      } else {
        Wgmma<T, kKeys>::template ss<true>(scores, a, b);
      }
    }
    if constexpr (kDividesColumns) {
      uint64_t a = query, b = block;
#pragma unroll 1
      for (int column = 1; column < Shape::kQueryAtomColumns; ++column) {
        a += Shape::kQueryAtomColumnBytes >> 4;
        b += KeyBlock::kLeadingByteOffset >> 4;
        // Each basic block needs one.
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          Wgmma<T, kKeys>::template ss<true>(scores, a + 2 * step, b + 2 * step);
      }
    }
    ptx::wgmma_commit_group();
  };
  // Whether O has products. The first ones replace it, which saves an instruction per register. A kernel with a
  // transform, a bias or bounds of keys has no register for this; the others listed are as fast with zeros, or faster.
  constexpr bool kClearsOutput = Shape::kValueDim <= 64 || kTransforms || Shape::kHasBias || Shape::kTakesKeyRanges ||
                                 Shape::kSplitsKeys || kHasOneStep;
  // ptxas compiles no product of 256 columns for a CTA of 512 threads, because it counts 128 registers per thread.
  constexpr int kOutputParts = Shape::kOutputColumns > 128 && Shape::kThreads > 384 ? 2 : 1;
  int32_t has_output = 1;
  // O = P V with a stage of V, + O if it has products, as one wgmma group.
  const auto issue_pv = [&](const ValueState& at) {
    const uint64_t block = values + at.stage * (ValueBlock::kBytes >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int part = 0; part < kOutputParts; ++part) {
        constexpr int kTiles = Shape::kOutputColumns / 8 / kOutputParts;
        Wgmma<T, 8 * kTiles>::rs(reinterpret_cast<float (&)[kTiles][4]>(state.output[part * kTiles]), weights[step],
                                 block + step * (2 * ValueBlock::kStrideByteOffset >> 4) +
                                     part * (8 * kTiles / Atom::kColumns * ValueBlock::kLeadingByteOffset >> 4),
                                 step > 0 ? 1 : has_output);
      }
    }
    if constexpr (!kClearsOutput) has_output = 1;
    ptx::wgmma_commit_group();
  };
  // Converts P in `scores` to the A operand `weights`: both have the same layout.
  const auto pack_weights = [&] {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &scores[2 * step + i / 2][i % 2 * 2];
        weights[step][i] = Element<T>::pack(pair[0], pair[1]);
      }
    }
  };

  int32_t block_count = 0;
  const auto attend = [&](const typename Shape::Tile& tile, int32_t first, int32_t end, int32_t tile_count,
                          const auto& finalize_rows) {
    if constexpr (!kClearsOutput) has_output = 0;
    if constexpr (Shape::kSplitsKeys || Shape::kHasWarpgroupBlocks) {
      if (!enter_own_blocks(pipeline, tile, warpgroup, tile_count, block_count, first, end)) {
        if constexpr (!kClearsOutput) state.clear_output();
        finalize_rows();
        return;
      }
    }
    if constexpr (Shape::kHasTokenScales) token_scales.reset();
    // In blocks [common_begin, common_end) every row attends to every key.
    const int32_t common_begin = uniform((tile.work.keys.common_begin + kKeys - 1) / kKeys);
    int32_t common_end = uniform(tile.work.keys.common_end / kKeys);
    // With a factor that is not positive all blocks are computed as those with a mask, which transform their scores.
    if (kHasRowUnits && uniform(static_cast<int32_t>(logits_row_scaled::is_identity(tile.work))) == 0) common_end = 0;
    // The block whose scores are computed. `weights` has P of the block before it in the loop, which is block + 1.
    int32_t block = end - 1;
    if constexpr (Shape::kConvertsKv) {
      if (converts_query) {
        pipeline.query_full(tile_count).wait();
        convert_query<Shape>(pipeline, warp_row);
        sync_warpgroup();
      }
    }
    const auto transformed_rows = transform.rows(tile.work, warp_row, FindRow{prefill, tile});
    // Calls `use` with the unit of the rows' scores, one for all or one for each of the lane's rows.
    const auto with_unit = [&](const auto& use) {
      if constexpr (kHasRowUnits) {
        const float units[2] = {transformed_rows.log2_unit(0), transformed_rows.log2_unit(1)};
        use(units);
      } else {
        use(unit);
      }
    };
    const auto update_state = [&] { with_unit([&](const auto& own) { state.update(scores, own); }); };
    // `count` is the block's number in the CTA.
    const auto softmax_block = [&](bool masked, int32_t count) {
      [[maybe_unused]] const PipelineState<Shape::kHasTokenScales ? Shape::kScaleStages : 1> scale_state(count);
      if constexpr (Shape::kHasTokenScales) {
        pipeline.scales_full(scale_state).wait();
        TokenScaleWeights::scale_scores(scores, pipeline.key_scales(scale_state.stage));
      }
      if constexpr (Shape::kShiftsBias) {
        add_shifted_bias<Shape, BiasElement<Shape, T>>(pipeline, prefill, tile, scores, LogitsTransform::factor(params),
                                                       count);
      } else if constexpr (Shape::kHasBias) {
        add_bias<Shape, T>(pipeline, scores, LogitsTransform::factor(params), count);
      } else if (masked || !kHasRowUnits) {
        transform.template apply<T>(scores, transformed_rows, block * kKeys);
      }
      if (masked) mask_scores(scores, prefill, tile, warp_row, block * kKeys);
      update_state();
      if constexpr (Shape::kHasTokenScales) {
        token_scales.scale_weights(scores, pipeline.value_scales(scale_state.stage), masked, state.rescale);
        __syncwarp();
        release(pipeline.scales_empty(scale_state));
      }
    };
    // Clears the invisible rows of V of `block`, if it has any, after its weights have been packed.
    const auto clear_partial_values = [&] {
      const int32_t first_key = block * kKeys;
      const ValueState now(block_count);
      if constexpr (Shape::kTakesRowMasks) {
        if (block >= common_begin && block < common_end) return;
        pipeline.values_full(now).wait();
        clear_unattended_values<Shape>(prefill, pipeline.values_pointer(now.stage), tile, first_key);
      } else {
        if (first_key >= tile.visible_begin && first_key + kKeys <= tile.visible_end) return;
        pipeline.values_full(now).wait();
        clear_invisible_values<Shape>(pipeline.values_pointer(now.stage), tile, first_key);
      }
      sync_warpgroup();
    };
    // Scores and softmax of `block`, overlapped with P V of the block before it.
    const auto step = [&](bool masked) {
      const ValueState now(block_count);
      const KeyState next(block_count + 1);
      pipeline.keys_full(next).wait();
      issue_qk(next);
      pipeline.values_full(now).wait();
      issue_pv(now);
      ptx::wgmma_wait_group<1>();
      if (is_lane_0) pipeline.release_keys(next);
      if (block == first) release(pipeline.query_empty(tile_count));
      softmax_block(masked, block_count + 1);
      ptx::wgmma_wait_group<0>();
      pack_weights();
      if (is_lane_0) pipeline.release_values(now);
      if (state.max_changed()) {
        state.rescale_output();
        if constexpr (kRoundsPerBlock) state.template round_max_weights<T>(scores);
      }
      ++block_count;
      if constexpr (!Shape::kHasLeanLoop) {
        if (masked) clear_partial_values();
      }
    };

    // The first block has no P V to overlap with.
    pipeline.query_full(tile_count).wait();
    const KeyState now(block_count);
    pipeline.keys_full(now).wait();
    issue_qk(now);
    if constexpr (Shape::kStagesOutputInValues) {
      if (stages_output_in_values<Shape>(prefill) && is_lane_0 && tile_count > 0) {
        ptx::bulk_wait_group_read();
        pipeline.output_left(warpgroup, tile_count - 1).arrive();
      }
      __syncwarp();
    }
    // While the products run, and held there: this softmax has nothing to overlap with. With a transform or with masks
    // of the rows' own it would spill.
    constexpr bool kMasksEarly = !kTransforms && !Shape::kTakesKeyRanges && !Shape::kTakesRowMasks;
    [[maybe_unused]] VisibleColumns columns = {};
    if constexpr (kMasksEarly) {
      columns = visible_columns<kKeys / 8>(prefill, tile, warp_row, block * kKeys);
      for (uint32_t& bits : columns.bits) bits = xa::ptx::opaque(bits);
    }
    ptx::wgmma_wait_group<0>();
    if (is_lane_0) pipeline.release_keys(now);
    if (block == first) release(pipeline.query_empty(tile_count));
    const bool masked = block < common_begin || block >= common_end;
    if constexpr (kMasksEarly) {
      if (masked) mask_scores(scores, columns);
      update_state();
    } else if (masked) {
      softmax_block(true, block_count);
    } else {
      softmax_block(false, block_count);
    }
    if constexpr (kRoundsPerBlock) state.template round_max_weights<T>(scores);
    pack_weights();
    if constexpr (!Shape::kHasLeanLoop) clear_partial_values();
    block = block_before(tile, block);
    if constexpr (!kHasOneStep && (!kTransforms || Shape::kConvertsKv || Shape::kValueDim % 128 == 0)) {
      for_each_block(tile, block, first, common_begin, common_end, step);
    } else {
      // With a transform, three copies of the step spill registers at D 96 and 192. At D 64 and 192 one copy is as
      // fast; at D 128 and 256, where nothing spills, it is up to 4 % slower.
#pragma unroll 1
      for (; block >= first; --block) step(block < common_begin || block >= common_end);
    }
    const ValueState last(block_count);
    pipeline.values_full(last).wait();
    issue_pv(last);
    // Overlaps with the last P V.
    if constexpr (kScaleInExponent && !kRoundsPerBlock) {
      with_unit([&](const auto& own) { state.round_max_weight(own, round_to<T>); });
    }
    finalize_rows();
    ptx::wgmma_wait_group<0>();
    if (is_lane_0) pipeline.release_values(last);
    if constexpr (Shape::kHasTokenScales) token_scales.finish(state.output);
    ++block_count;
    if constexpr (Shape::kHasWarpgroupBlocks) {
      pass_blocks(pipeline, block_count, first - uniform(tile.first_block));
    }
  };
  for_each_tile<Shape, T, kClearsOutput>(prefill, pipeline, warp, state, block_count, attend);
}

}  // namespace xa::hopper
