// Logits transforms: what is applied to q . k before the mask and the softmax. A transform has
//
//   factor(params, kv_head)   WorkTile::score_factor of a KV head
//   rows(work, row, find)     what `apply` needs to know of 16 rows from row `row` of the work tile on; `find`, by
//                             default find_row(params, work, row), gives the head and the position of a row
//   apply(scores, rows, key)  transforms the scores of these rows and of the block of keys from `key` on
//   log2_unit()               the factor from transformed scores to logits in base 2
//
// Hopper's prefill keeps `rows` in registers for a tile; the portable kernels compute them again for each block.
#pragma once

#include "element.cuh"
#include "log2_units.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "scales.cuh"
#include "work_tile.cuh"

namespace xa {

/// The query head of a row of a tile, and the position of its query among the keys.
struct RowPosition {
  int32_t head;
  int32_t position;
};

__device__ __forceinline__ RowPosition find_row(const AttentionParams& params, const WorkTile& work, int32_t row) {
  const RowMap map(params, work.tile, work.kv_head);
  return {map.head(row), map.rows.query(row) + Visibility::shift_of(params, work.tile)};
}

/// No transform: scores stay q . k. The softmax scale is part of the exponential.
struct logits_none {
  const AttentionParams& params_;

  __device__ __forceinline__ explicit logits_none(const AttentionParams& params, const float* = nullptr)
      : params_(params) {}
  static __device__ __forceinline__ float factor(const AttentionParams&, int32_t) { return 1.0f; }
  __device__ __forceinline__ float log2_unit() const { return params_.softmax_scale_log2; }
  struct Rows {};
  template <typename... Find>
  __device__ __forceinline__ Rows rows(const WorkTile&, int32_t, const Find&...) const {
    return {};
  }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&)[kKeyTiles][4], const Rows&, int32_t) const {}
};

/// Scales of q and K, soft cap and ALiBi: scores become logits in base 2. Soft cap and ALiBi are behind branches that
/// are uniform across the CTA.
struct logits_softcap_alibi {
  const AttentionParams& params_;
  const float* row_factors_;

  /// `row_factors`, if not null, are factors of the scores of each row of the tile, in shared memory (fp8:
  /// query_rows.cuh).
  __device__ __forceinline__ explicit logits_softcap_alibi(const AttentionParams& params,
                                                           const float* row_factors = nullptr)
      : params_(params), row_factors_(row_factors) {}
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t kv_head) {
    return params.score_factor * scale_of(params.q_scale, kv_head) * scale_of(params.k_scale, kv_head);
  }
  __device__ __forceinline__ float log2_unit() const { return 1.0f; }
  /// Of a lane's two rows: the factor of their scores and, with ALiBi, minus the slope of the head in base 2, and the
  /// position of the query.
  struct Rows {
    float factor[2];
    float slope[2];
    int32_t position[2];
  };
  __device__ __forceinline__ Rows rows(const WorkTile& work, int32_t first_row) const {
    return rows(work, first_row, [&](int32_t row) { return find_row(params_, work, row); });
  }
  template <typename Find>
  __device__ __forceinline__ Rows rows(const WorkTile& work, int32_t first_row, const Find& find) const {
    Rows rows = {{work.score_factor, work.score_factor}, {}, {}};
    first_row += threadIdx.x % 32 / 4;
    if (row_factors_ != nullptr) {
      rows.factor[0] *= row_factors_[first_row];
      rows.factor[1] *= row_factors_[first_row + 8];
    }
    if (params_.alibi_slopes != nullptr) {
      const float* const slopes = params_.alibi_slopes + work.tile.sequence * params_.alibi_stride;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const RowPosition row = find(first_row + 8 * half);
        rows.slope[half] = -kLog2E * __ldg(slopes + row.head);
        rows.position[half] = row.position;
      }
    }
    return rows;
  }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4], const Rows& rows, int32_t first_key) const {
    const bool has_alibi = params_.alibi_slopes != nullptr;
    float factor[2] = {rows.factor[0], rows.factor[1]};
    if (params_.softcap_log2 > 0.0f) {
      for_each(scores, [&](float s, int half, int) { return params_.softcap_log2 * tanh_of<T>(s * factor[half]); });
      factor[0] = factor[1] = 1.0f;
    } else if (!has_alibi) {
      for_each(scores, [&](float s, int half, int) { return s * factor[half]; });
    }
    if (has_alibi) scale_and_add_alibi(scores, factor, rows, first_key);
  }

 private:
  template <typename T>
  static __device__ __forceinline__ float tanh_of(float x) {
    if constexpr (Element<T>::kIs16Bit) {
      return ptx::tanh_approx(x);
    } else {
      return tanhf(x);
    }
  }

  /// Replaces each score by function(score, half, column), for the row of its half and its column after the lane's
  /// first.
  template <int kKeyTiles, typename Function>
  static __device__ __forceinline__ void for_each(float (&scores)[kKeyTiles][4], const Function& function) {
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] = function(scores[block][i], i / 2, 8 * block + i % 2);
    }
  }

  /// Multiplies the scores of each row by its factor and adds the ALiBi bias, slope * |position of the query - key|. In
  /// a block whose keys are all on one side of the warp's queries the bias is linear in the column, which takes two
  /// FMAs per score.
  template <int kKeyTiles>
  static __device__ __forceinline__ void scale_and_add_alibi(float (&scores)[kKeyTiles][4], const float (&factor)[2],
                                                             const Rows& rows, int32_t first_key) {
    const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
    const float distance[2] = {difference(rows.position[0], first_column), difference(rows.position[1], first_column)};
    const bool is_before = __all_sync(~0u, rows.position[0] >= first_key + 8 * kKeyTiles - 1) != 0;
    const bool is_after = __all_sync(~0u, rows.position[1] <= first_key) != 0;
    if (is_before || is_after) {
      float slope[2], bias[2];  // of a step of one column, and of the lane's first column
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        slope[half] = is_before ? -rows.slope[half] : rows.slope[half];
        bias[half] = -slope[half] * distance[half];
      }
      for_each(scores, [&](float s, int half, int column) {
        return __fmaf_rn(s, factor[half], __fmaf_rn(slope[half], static_cast<float>(column), bias[half]));
      });
    } else {
      for_each(scores, [&](float s, int half, int column) {
        const float bias = rows.slope[half] * fabsf(distance[half] - static_cast<float>(column));
        return __fmaf_rn(s, factor[half], bias);
      });
    }
  }

  /// a - b, which may exceed the range of int32_t.
  static __device__ __forceinline__ float difference(int32_t a, int32_t b) {
    const uint32_t difference = static_cast<uint32_t>(a) - static_cast<uint32_t>(b);
    return a >= b ? static_cast<float>(difference) : -static_cast<float>(0u - difference);
  }
};

/// A soft cap alone, with scales of q and K, in Hopper's prefill: scores become logits in base 2 divided by the cap,
/// and the exponential multiplies by it. Unlike `logits_softcap_alibi` it has no branches, around which ptxas would not
/// overlap instructions.
struct logits_softcap {
  const AttentionParams& params_;

  __device__ __forceinline__ explicit logits_softcap(const AttentionParams& params) : params_(params) {}
  static __device__ __forceinline__ float factor(const AttentionParams& params, int32_t kv_head) {
    return logits_softcap_alibi::factor(params, kv_head);
  }
  __device__ __forceinline__ float log2_unit() const { return params_.softcap_log2; }
  struct Rows {
    float factor;
  };
  template <typename... Find>
  __device__ __forceinline__ Rows rows(const WorkTile& work, int32_t, const Find&...) const {
    return {work.score_factor};
  }
  template <typename T, int kKeyTiles>
  __device__ __forceinline__ void apply(float (&scores)[kKeyTiles][4], const Rows& rows, int32_t) const {
    static_assert(Element<T>::kIs16Bit, "tanh.approx has 11 bits");
#pragma unroll
    for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] = ptx::tanh_approx(scores[block][i] * rows.factor);
    }
  }
};

}  // namespace xa
