// The compute warpgroups of an fp8 prefill CTA: as compute.cuh, with wgmma of e4m3fn. wgmma is twice as fast as in 16
// bits and the softmax is not, so it is the bottleneck: hence more warpgroups with fewer keys per block.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "fp8_convert.cuh"
#include "hopper/compute.cuh"
#include "hopper/fp8_shape.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/tile_loop.cuh"
#include "hopper/wgmma.cuh"
#include "output_rows.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// OnlineSoftmax with e4m3fn weights, which are multiplied by 2^kWeightLog2: `max` is the largest logit less
/// kWeightLog2. It follows from the largest score, because rounding keeps the order, and is held only after the last
/// block.
template <int kColumnTiles, int kWeightLog2>
struct Fp8OnlineSoftmax : OnlineSoftmax<kColumnTiles> {
  using State = OnlineSoftmax<kColumnTiles>;
  using State::max;
  using State::max_score;
  using State::rescale;
  using State::sum;

  /// Computes the weights P of a block as wgmma's A operand: byte e of weights[step][i] is column
  /// 32 step + 16 (i / 2) + 4t + e of row g + 8 (i % 2), with t = lane % 4 and g = lane / 4. Columns are in the order
  /// of the score accumulators, which is also the order of keys in transposed V (transpose.cuh).
  template <int kKeyTiles>
  __device__ __forceinline__ void update(float (&scores)[kKeyTiles][4], float log2_unit,
                                         uint32_t (&weights)[kKeyTiles / 4][4]) {
    // One integer instruction compares three values. Its result is the largest float unless that is negative. The
    // latency of the vote hides behind the shuffles.
    int32_t largest[2] = {INT32_MIN, INT32_MIN};
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = ptx::max3_as_int(largest[half], scores[block][2 * half], scores[block][2 * half + 1]);
      }
    }
    const bool are_ordered = __all_sync(~0u, largest[0] >= 0 && largest[1] >= 0) != 0;
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
      for (int32_t& x : largest) x = ::max(x, __shfl_xor_sync(~0u, x, distance));
    }
    if (__builtin_expect(!are_ordered, 0)) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        largest[half] = __float_as_int(State::quad_max(State::lane_max(scores, half)));
    }
    float before[2], base[2], block_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      before[half] = max_of(half, log2_unit);
      max_score[half] = fmaxf(max_score[half], __int_as_float(largest[half]));
      const float next = max_of(half, log2_unit);
      // A row without a visible key so far has weights of 0 and a rescale factor of 0.
      base[half] = next == -INFINITY ? 0.0f : next;
    }
#pragma unroll
    for (int step = 0; step < kKeyTiles / 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % 2;
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = scores[4 * step + i / 2 * 2 + e / 2][2 * half + e % 2];
          x[e] = xa::ptx::exp2_approx(__fmaf_rn(score, log2_unit, -base[half]));
        }
        block_sum[half] += (x[0] + x[1]) + (x[2] + x[3]);
        weights[step][i] = xa::ptx::f32_to_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale[half] = xa::ptx::exp2_approx(before[half] - base[half]);
      sum[half] = __fmaf_rn(sum[half], rescale[half], block_sum[half]);
    }
  }
  /// Sets `max`, after the last block.
  __device__ __forceinline__ void set_max(float log2_unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) max[half] = max_of(half, log2_unit);
  }
  __device__ __forceinline__ void round_max_weight(float log2_unit) {
    State::round_max_weight(log2_unit, [](float weight) {
      // The weight is near 2^kWeightLog2, so it is a normal number of e4m3fn. Exponents are biased by 7 there.
      const uint32_t code = xa::ptx::f32_to_e4m3(weight, 0.0f, 0.0f, 0.0f);
      return __uint_as_float((code << 20) + ((127 - 7) << 23));
    });
  }

 private:
  __device__ __forceinline__ float max_of(int half, float log2_unit) const {
    return __fmaf_rn(max_score[half], log2_unit, -kWeightLog2);
  }
};

/// A compute warpgroup: computes its rows of all tiles of the CTA.
template <typename Shape, typename LogitsTransform>
__device__ __forceinline__ void compute_fp8_tiles(const HopperPrefillParams& prefill, const Pipeline<Shape>& pipeline) {
  constexpr int kKeys = Shape::kKeys, kSteps = Shape::kHeadDim / 32;
  using KvState = PipelineState<Shape::kStages>;
  using Atom = typename Shape::Fp8Atom;
  using KeyBlock = typename Shape::KeyBlock;
  using ValueBlock = typename Shape::ValueBlock;
  using TransposedAtom = typename Shape::TransposedAtom;
  // A wgmma is 32 bytes deep.
  constexpr int kStepsPerAtom = Atom::kRowBytes / 32, kStepsPerTransposedAtom = TransposedAtom::kRowBytes / 32;
  const AttentionParams& params = prefill.attention;
  const int32_t warp = uniform(threadIdx.x / 32), warpgroup = warp / 4, warp_row = 16 * warp;
  const int32_t lane = threadIdx.x % 32;
  const auto release = [&](const Barrier& barrier) {
    if (lane == 0) barrier.arrive();
  };

  const LogitsTransform transform(params);
  const uint64_t query = matrix_descriptor<Atom>(pipeline.query() + warpgroup * 8 * Atom::kBytes, 0, Atom::kBytes);
  const uint64_t keys = matrix_descriptor<Atom>(pipeline.keys(0), 0, KeyBlock::kStrideByteOffset);
  const uint64_t values = matrix_descriptor<TransposedAtom>(pipeline.values(0), 0, TransposedAtom::kBytes);

  float scores[kKeys / 8][4];
  uint32_t weights[kKeys / 32][4];
  Fp8OnlineSoftmax<Shape::kValueDim / 8, Shape::kWeightLog2> state;

  // S = Q K^T of a stage of K, as one wgmma group.
  const auto issue_qk = [&](const KvState& at) {
    const uint64_t block = keys + at.stage * (KeyBlock::kBytes >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t a =
          query + (step / kStepsPerAtom * (Shape::kQueryAtomColumnBytes >> 4) + step % kStepsPerAtom * 2);
      const uint64_t b =
          block + (step / kStepsPerAtom * (KeyBlock::kLeadingByteOffset >> 4) + step % kStepsPerAtom * 2);
      if (step == 0) {
        Wgmma<E4m3, kKeys>::template ss<false>(scores, a, b);
      } else {
        Wgmma<E4m3, kKeys>::template ss<true>(scores, a, b);
      }
    }
    ptx::wgmma_commit_group();
  };
  // O += P V with a stage of transposed V, as one wgmma group.
  const auto issue_pv = [&](const KvState& at) {
    const uint64_t block = values + at.stage * (ValueBlock::kBytes >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 32; ++step) {
      Wgmma<E4m3, Shape::kValueDim>::rs(
          state.output, weights[step],
          block + (step / kStepsPerTransposedAtom * (ValueBlock::kLeadingByteOffset >> 4) +
                   step % kStepsPerTransposedAtom * 2));
    }
    ptx::wgmma_commit_group();
  };

  int32_t block_count = 0;
  const auto attend = [&](const typename Shape::Tile& tile, int32_t first, int32_t end, int32_t tile_count,
                          const auto& finalize_rows) {
    if constexpr (Shape::kHasWarpgroupBlocks) {
      if (!enter_own_blocks(pipeline, tile, warpgroup, tile_count, block_count, first, end)) {
        finalize_rows();
        return;
      }
    }
    const float unit = __int_as_float(uniform(__float_as_int(LogitsTransform::log2_unit(tile.work))));
    const bool is_identity = uniform(static_cast<int32_t>(LogitsTransform::is_identity(tile.work))) != 0;
    // In blocks [common_begin, common_end) every row attends to every key and the logits transform is the identity. All
    // other blocks run step(true).
    const int32_t common_begin = uniform((tile.work.keys.common_begin + kKeys - 1) / kKeys);
    const int32_t common_end = is_identity ? uniform(tile.work.keys.common_end / kKeys) : 0;
    int32_t block = end - 1;
    const auto softmax_block = [&](bool masked, uint32_t (&to)[kKeys / 32][4]) {
      if (masked || !LogitsTransform::kUsuallyIdentity)
        transform.template apply<F16>(scores, transform.rows(tile.work, warp_row, FindRow{prefill, tile}),
                                      block * kKeys);
      // ptxas lays out the loop for 1.5 % more speed at D 128.
      if (masked) mask_scores<(Shape::kHeadDim == 128)>(scores, prefill, tile, warp_row, block * kKeys);
      state.update(scores, unit, to);
    };
    // Scores and softmax of `block`, overlapped with P V of the block before it.
    const auto step = [&](bool masked) {
      const KvState now(block_count), next(block_count + 1);
      pipeline.keys_full(next).wait();
      issue_qk(next);
      pipeline.values_full(now).wait();
      issue_pv(now);
      ptx::wgmma_wait_group<1>();
      release(pipeline.keys_empty(next));
      if (block == first) release(pipeline.query_empty(tile_count));
      uint32_t next_weights[kKeys / 32][4];
      softmax_block(masked, next_weights);
      ptx::wgmma_wait_group<0>();
      release(pipeline.values_empty(now));
      // P V was reading `weights` until here.
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) weights[i / 4][i % 4] = ptx::mov_volatile(next_weights[i / 4][i % 4]);
      if (state.max_changed()) state.rescale_output();
      ++block_count;
    };

    pipeline.query_full(tile_count).wait();
    const KvState now(block_count);
    pipeline.keys_full(now).wait();
    issue_qk(now);
    ptx::wgmma_wait_group<0>();
    release(pipeline.keys_empty(now));
    if (block == first) release(pipeline.query_empty(tile_count));
    if (block < common_begin || block >= common_end) {
      softmax_block(true, weights);
    } else {
      softmax_block(false, weights);
    }
    --block;
    for_each_block(tile, block, first, common_begin, common_end, step);
    const KvState last(block_count);
    pipeline.values_full(last).wait();
    issue_pv(last);
    // Overlaps with the last P V.
    // With a unit of 1 the largest weight needs no rounding.
    state.set_max(unit);
    if constexpr (LogitsTransform::kUsuallyIdentity) state.round_max_weight(unit);
    finalize_rows();
    ptx::wgmma_wait_group<0>();
    release(pipeline.values_empty(last));
    ++block_count;
    if constexpr (Shape::kHasWarpgroupBlocks) {
      pass_blocks(pipeline, block_count, first - uniform(tile.first_block));
    }
  };
  for_each_tile<Shape, F16>(prefill, pipeline, warp, state, block_count, attend);
}

}  // namespace xa::hopper
