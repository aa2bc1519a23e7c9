// From products to weights: q . k becomes p, and dout . v becomes the gradient of the score, ds, without the scale of
// q . k, by which sums are multiplied at the end.
#pragma once

#include <cmath>
#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "bwd/sequence_segment.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"
#include "ptx.cuh"

namespace xa {

/// Scores are q . k but for the scale.
struct bwd_logits_none {
  static constexpr bool kModified = false;  // whether rows' positions and slopes are wanted
};

/// With a soft cap, a bias or both, each behind a branch that is the same for the CTA, around all scores of a warp.
struct bwd_logits_softcap_alibi {
  static constexpr bool kModified = true;
};

/// Calls `work(tile, block, i, known)` for each of a warp's scores: `known` is what `describe` makes of the query row
/// of its column where keys are held, else of that of its row. `queries` are those of the columns, or of the warp's
/// rows.
template <bool kHoldsKeys, int kTiles, int kBlocks, typename Describe, typename Work>
__device__ __forceinline__ void for_scores(const QueryRow* queries, const Describe& describe, const Work& work) {
  // Derived again here where registers are dearest.
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
  if constexpr (kHoldsKeys) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const auto known = describe(queries[8 * block + 2 * t + side]);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          work(tile, block, side, known);
          work(tile, block, 2 + side, known);
        }
      }
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto known = describe(queries[16 * tile + 8 * half + g]);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          work(tile, block, 2 * half, known);
          work(tile, block, 2 * half + 1, known);
        }
      }
    }
  }
}

struct PlacedRow : QueryRow {
  float distance;  // of its query from the first key of this thread's scores; of rows of no sequence without a meaning
};

/// Weights and gradients of a warp's scores, whatever their rows see. `first_key` is as for `weigh`.
template <typename T, bool kHoldsKeys, bool kCapped, bool kBiased, int kTiles, int kBlocks>
__device__ __forceinline__ void weigh_as(float (&score)[kTiles][kBlocks][4], float (&gradient)[kTiles][kBlocks][4],
                                         const AttentionParams& params, const QueryRow* queries, int32_t first_key) {
  constexpr float kTwoLog2E = 2.88539008177792681f;
  const float cap = params.softcap_log2;
  const int32_t lane = ptx::thread() % 32;
  const uint32_t nearest = first_key + (kHoldsKeys ? lane / 4 : lane % 4 * 2);
  const auto describe = [&](const QueryRow& row) {
    const auto distance = static_cast<int32_t>(static_cast<uint32_t>(row.position) - nearest);
    PlacedRow placed = {row, static_cast<float>(distance)};
    if constexpr (kCapped && Element<T>::kIs16Bit) placed.negative_lse += cap;
    return placed;
  };
  for_scores<kHoldsKeys, kTiles, kBlocks>(queries, describe, [&](int tile, int block, int i, const PlacedRow& row) {
    float &p = score[tile][block][i], &ds = gradient[tile][block][i];
    float logit, slope = 1.0f;
    if constexpr (!kCapped) {
      logit = __fmaf_rn(p, params.softmax_scale_log2, row.negative_lse);
    } else if constexpr (Element<T>::kIs16Bit) {
      // Within 2^-22. The tanh of the hardware is not enough: weights are relative to a sum that others have computed.
      // tanh x is 1 - 2 r, its derivative 4 r (1 - r).
      const float r = ptx::reciprocal_approx(1.0f + ptx::exp2_approx(p * (params.score_factor * kTwoLog2E)));
      logit = __fmaf_rn(-2.0f * cap, r, row.negative_lse);
      slope = __fmaf_rn(-r, r, r);
    } else {
      const float bent = tanhf(p * params.score_factor);
      logit = __fmaf_rn(cap, bent, row.negative_lse);
      slope = 1.0f - bent * bent;
    }
    if constexpr (kBiased) {
      const int32_t key = kHoldsKeys ? 16 * tile + 8 * (i / 2) : 8 * block + i % 2;
      logit = __fmaf_rn(row.negative_slope, fabsf(row.distance - static_cast<float>(key)), logit);
    }
    p = ptx::exp2_approx(logit);
    if constexpr (!kCapped) {
      ds = p * (ds - row.delta);
    } else if constexpr (Element<T>::kIs16Bit) {
      ds = p * (slope * __fmaf_rn(4.0f, ds, -4.0f * row.delta));
    } else {
      ds = p * (slope * (ds - row.delta));
    }
  });
}

/// Makes weights of a warp's products `score` and `gradient`, of rows held and columns streamed. `first_key` is the key
/// of the warp's first row where keys are held, else of its first column.
template <typename T, bool kHoldsKeys, typename Weights, int kTiles, int kBlocks>
__device__ __forceinline__ void weigh(float (&score)[kTiles][kBlocks][4], float (&gradient)[kTiles][kBlocks][4],
                                      const AttentionParams& params, const QueryRow* queries, int32_t first_key) {
  if constexpr (Weights::kModified) {
    const bool capped = params.softcap_log2 > 0.0f;
    if (params.alibi_slopes != nullptr) {
      if (capped) return weigh_as<T, kHoldsKeys, true, true>(score, gradient, params, queries, first_key);
      return weigh_as<T, kHoldsKeys, false, true>(score, gradient, params, queries, first_key);
    }
    if (capped) return weigh_as<T, kHoldsKeys, true, false>(score, gradient, params, queries, first_key);
  }
  weigh_as<T, kHoldsKeys, false, false>(score, gradient, params, queries, first_key);
}

/// Clears weights that a warp's rows do not have: `span_of` tells the columns of one, which are counted as the streamed
/// rows of a pass, from `first_column` on. By selection: what is hidden may be NaN.
template <typename SpanOf, int kTiles, int kBlocks>
__device__ __forceinline__ void hide(float (&p)[kTiles][kBlocks][4], float (&ds)[kTiles][kBlocks][4],
                                     const SpanOf& span_of, int32_t first_column) {
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = 16 * tile + 8 * half + g;
      const Span span = span_of(row);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int32_t column = first_column + 8 * block + 2 * t + i % 2;
          const bool hidden =
              static_cast<uint32_t>(column - span.begin) >= static_cast<uint32_t>(span.end - span.begin);
          p[tile][block][i] = hidden ? 0.0f : p[tile][block][i];
          ds[tile][block][i] = hidden ? 0.0f : ds[tile][block][i];
        }
      }
    }
  }
}

}  // namespace xa
