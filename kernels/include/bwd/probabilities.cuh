// From products to P and dS: q . k becomes the probability p, and dout . v becomes ds, the gradient of the logit. The
// softmax scale is missing from ds; the gradients are multiplied by it when they are stored.
#pragma once

#include <cmath>
#include <cstdint>

#include "bwd/bias_rows.cuh"
#include "bwd/key_order.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/sequence_segment.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"
#include "ptx.cuh"

namespace xa {

/// Logits are q . k times the scale.
struct bwd_logits_none {
  static constexpr bool kTransforms = false;
};

/// With a soft cap, ALiBi or both, or neither: a branch that is uniform across the CTA chooses code for all scores of a
/// warp. (A branch per score takes up to twice as long.)
struct bwd_logits_softcap_alibi {
  static constexpr bool kTransforms = true;
};

/// Calls `work(tile, block, i, stats)` for each score of a warp's accumulators, `stats` being what `describe` makes of
/// the statistics of its query row. Query rows are the columns of the scores in the dK/dV kernel (kHoldsKeys) and their
/// rows in the dQ kernel; `queries` are the statistics of those columns, or of the warp's rows.
template <bool kHoldsKeys, int kTiles, int kBlocks, typename Describe, typename Work>
__device__ __forceinline__ void for_scores(const QueryRowStats* queries, const Describe& describe, const Work& work) {
  // The lane is read again here rather than kept: registers are scarcest in this loop.
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
  if constexpr (kHoldsKeys) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const auto stats = describe(queries[8 * block + 2 * t + side]);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          work(tile, block, side, stats);
          work(tile, block, 2 + side, stats);
        }
      }
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto stats = describe(queries[16 * tile + 8 * half + g]);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          work(tile, block, 2 * half, stats);
          work(tile, block, 2 * half + 1, stats);
        }
      }
    }
  }
}

struct PlacedRowStats : QueryRowStats {
  float distance;  // of its query from the first key of this thread's scores; arbitrary outside of the segment
};

/// `p_and_ds` for one logits transform.
template <typename T, bool kHoldsKeys, bool kHasSoftcap, bool kHasAlibi, bool kAfterCap, int kTiles, int kBlocks,
          typename Bias>
__device__ __forceinline__ void p_and_ds_with(float (&score)[kTiles][kBlocks][4], float (&gradient)[kTiles][kBlocks][4],
                                              const AttentionParams& params, const QueryRowStats* queries,
                                              int32_t first_key, const Bias& bias) {
  constexpr float kTwoLog2E = 2.88539008177792681f;
  constexpr bool kAddsBias = Bias::kExists && (kHasSoftcap || Bias::kIsLate);
  const float cap = params.softcap_log2;
  const int32_t lane = ptx::thread() % 32;
  const uint32_t nearest = first_key + (kHoldsKeys ? lane / 4 : lane % 4 * 2);
  const auto describe = [&](const QueryRowStats& row) {
    const auto distance = static_cast<int32_t>(static_cast<uint32_t>(row.position) - nearest);
    PlacedRowStats placed = {row, static_cast<float>(distance)};
    if constexpr (kHasSoftcap && Element<T>::kIs16Bit) placed.negative_lse += cap;
    return placed;
  };
  for_scores<kHoldsKeys, kTiles, kBlocks>(queries, describe, [&](int tile, int block, int i, const auto& row) {
    float &p = score[tile][block][i], &ds = gradient[tile][block][i];
    float logit;
    [[maybe_unused]] float slope = 1.0f;
    if constexpr (!kHasSoftcap) {
      logit = __fmaf_rn(p, params.softmax_scale_log2, row.negative_lse);
    } else if constexpr (Element<T>::kIs16Bit) {
      // With r = 1 / (1 + exp(2 x)), tanh x is 1 - 2 r and its derivative 4 r (1 - r), here to within 2^-22.
      // tanh.approx is not accurate enough: p is normalised by the lse that the forward pass has computed.
      const float r = ptx::reciprocal_approx(1.0f + ptx::exp2_approx(p * (params.score_factor * kTwoLog2E)));
      logit = __fmaf_rn(-2.0f * cap, r, row.negative_lse);
      slope = __fmaf_rn(-r, r, r);
    } else {
      const float tanh_logit = tanhf(p * params.score_factor);
      logit = __fmaf_rn(cap, tanh_logit, row.negative_lse);
      slope = 1.0f - tanh_logit * tanh_logit;
    }
    [[maybe_unused]] const int32_t key = kHoldsKeys ? 16 * tile + 8 * (i / 2) : 8 * block + i % 2;
    if constexpr (kHasAlibi) {
      logit = __fmaf_rn(row.negative_slope, fabsf(row.distance - static_cast<float>(key)), logit);
    }
    float factor;  // of p in ds
    if constexpr (!kHasSoftcap || kAfterCap) {
      factor = ds - row.delta;
    } else if constexpr (Element<T>::kIs16Bit) {
      factor = slope * __fmaf_rn(4.0f, ds, -4.0f * row.delta);
    } else {
      factor = slope * (ds - row.delta);
    }
    p = kAddsBias ? logit : ptx::exp2_approx(logit);
    ds = kAddsBias ? factor : p * factor;
  });
  if constexpr (kAddsBias) {
    bias.add(score);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[tile][block][i] = ptx::exp2_approx(score[tile][block][i]);
          gradient[tile][block][i] *= score[tile][block][i];
        }
      }
    }
  }
}

/// Turns a warp's products in place: `score` into P and `gradient` (dout . v) into dS. Masks are not applied. `score`
/// is q . k, plus the bias unless that is late or there is a soft cap. `first_key` is the key of the warp's first row
/// in the dK/dV kernel (kHoldsKeys), of its first column in the dQ kernel. With kAfterCap, dS is the gradient of what
/// is added after the soft cap.
template <typename T, bool kHoldsKeys, typename LogitsTransform, bool kAfterCap = false, int kTiles, int kBlocks,
          typename Bias = NoBias>
__device__ __forceinline__ void p_and_ds(float (&score)[kTiles][kBlocks][4], float (&gradient)[kTiles][kBlocks][4],
                                         const AttentionParams& params, const QueryRowStats* queries, int32_t first_key,
                                         const Bias& bias = {}) {
  if constexpr (LogitsTransform::kTransforms) {
    const bool has_softcap = params.softcap_log2 > 0.0f;
    if (params.alibi_slopes != nullptr) {
      if (has_softcap)
        return p_and_ds_with<T, kHoldsKeys, true, true, kAfterCap>(score, gradient, params, queries, first_key, bias);
      return p_and_ds_with<T, kHoldsKeys, false, true, kAfterCap>(score, gradient, params, queries, first_key, bias);
    }
    if (has_softcap)
      return p_and_ds_with<T, kHoldsKeys, true, false, kAfterCap>(score, gradient, params, queries, first_key, bias);
  }
  p_and_ds_with<T, kHoldsKeys, false, false, kAfterCap>(score, gradient, params, queries, first_key, bias);
}

/// Sets P and dS to 0 outside of each row's visible columns, `columns_of(row)` for row `row` of the warp; the
/// accumulators begin at column `first_column` and have the order `Keys`. Selects instead of multiplying, because
/// masked values may be NaN.
template <typename Keys = KeysInOrder, typename ColumnsOf, int kTiles, int kBlocks>
__device__ __forceinline__ void mask(float (&p)[kTiles][kBlocks][4], float (&ds)[kTiles][kBlocks][4],
                                     const ColumnsOf& columns_of, int32_t first_column) {
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = 16 * tile + 8 * half + g;
      const ColumnRange columns = columns_of(row);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int32_t column = first_column + Keys::of_lane(t) + Keys::offset(block, i % 2);
          const bool masked =
              static_cast<uint32_t>(column - columns.begin) >= static_cast<uint32_t>(columns.end - columns.begin);
          p[tile][block][i] = masked ? 0.0f : p[tile][block][i];
          ds[tile][block][i] = masked ? 0.0f : ds[tile][block][i];
        }
      }
    }
  }
}

}  // namespace xa
