// The main loop of multi-head latent attention, and the result of a work tile. A block of latent rows is in shared
// memory once, as K and, in its first columns, as V.
#pragma once

#include <cmath>
#include <cstdint>

#include "bwd/products.cuh"
#include "element.cuh"
#include "mla/latent_rows.cuh"
#include "mla/result.cuh"
#include "mla/shape.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::mla {

/// The state of a work tile's rows over the keys so far. Each thread has the maxima of the rows of which it computes
/// scores or output. All threads that have a row compute its maximum from the same numbers, so theirs are equal.
template <typename Shape, typename T, typename Stored, typename LogitsTransform>
class TileAttention {
  using Rows = typename Shape::Rows;
  using Query = QueryFragments<1, kLatentDim, sizeof(T), false>;
  static constexpr int kSteps = Shape::kQueryRowBytes / 32;  // k-blocks of 16 halves or 8 floats
  static constexpr int kRowTiles = Shape::kRowTiles;

 public:
  __device__ __forceinline__ TileAttention(const AttentionParams& params, const WorkTile& work, uint8_t* shared)
      : params_(params), work_(work), shared_(shared), transform_(params) {
    clear(output_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      score_max_[half] = -INFINITY;
      sum_[half] = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) max_[tile][half] = -INFINITY;
    }
  }

  /// Attends to all keys of the work tile.
  __device__ __forceinline__ void attend() {
    constexpr int kStages = Shape::kStages;
    LatentRing<Shape, Stored> ring(params_, work_, ptx::shared_address(shared_ + Shape::kStagesOffset));
    copy_query<Shape, T>(params_, RowMap(params_, work_.tile, work_.kv_head), ptx::shared_address(shared_));
    ptx::cp_async_commit();
#pragma unroll 1
    for (int stage = 0; stage + 1 < kStages; ++stage) ring.fetch();
    const int32_t first = work_.keys.begin / Shape::kKeys * Shape::kKeys;
#pragma unroll 1
    for (int32_t key = first; key < work_.keys.end; key += Shape::kKeys) {
      if constexpr (kStages > 1) {
        ptx::cp_async_wait<kStages - 2>();
        // After this barrier the block is complete, and all warps have read the one before, whose stage is fetched
        // next.
        __syncthreads();
        ring.fetch();
      } else {
        __syncthreads();
        ring.fetch();
        ptx::cp_async_wait<0>();
        __syncthreads();
      }
      attend_block(converted(ring.take()), key);
    }
    // The last blocks' groups are empty. Without a block, the query rows are still being copied.
    ptx::cp_async_wait<0>();
  }

  /// Stores the result of the work tile where the WorkRange says: in the workspace as a partial, or in out and lse. The
  /// output passes through shared memory, in place of query rows and blocks, so that global stores coalesce.
  __device__ __forceinline__ void store_result(const WorkRange& range) {
    __syncthreads();
    store_output();
    store_states();
    __syncthreads();
    store_rows<Shape::kThreads, Shape::kOutputPitch, T>(
        params_, work_, range.partial_row, shared_, transform_.log2_unit(), threadIdx.x, [&](int32_t row) {
          return make_float2(row_states()[Shape::kScoreKeyWarps * Shape::kRows + row], row_sum(row));
        });
  }

 private:
  // Of S = Q K^T.
  static __device__ __forceinline__ int32_t score_row() {
    return static_cast<int32_t>(threadIdx.x / 32) % Shape::kScoreRowWarps * 16;
  }
  static __device__ __forceinline__ int32_t score_key_warp() {
    return static_cast<int32_t>(threadIdx.x / 32) / Shape::kScoreRowWarps;
  }
  static __device__ __forceinline__ bool computes_scores() { return threadIdx.x / 32 < Shape::kScoreWarps; }
  // Of O += P V.
  static __device__ __forceinline__ int32_t first_row() {
    return static_cast<int32_t>(threadIdx.x / 32) % Shape::kRowWarps * 16 * kRowTiles;
  }
  static __device__ __forceinline__ int32_t column_warp() {
    return static_cast<int32_t>(threadIdx.x / 32) / Shape::kRowWarps;
  }
  /// f32 [kScoreKeyWarps + 1, kRows]
  __device__ __forceinline__ float* row_states() const {
    return reinterpret_cast<float*>(shared_ + Shape::kRowStatesOffset);
  }

  /// Shared address of the block in the type of the products.
  __device__ __forceinline__ uint32_t converted(uint32_t block) const {
    if constexpr (Shape::kIsFp8) {
      const uint8_t* const from = shared_ + (block - ptx::shared_address(shared_));
      uint8_t* const to = shared_ + Shape::kConvertedOffset;
      if (params_.kv_is_e5m2 != 0) {
        convert_block<Shape, T, Stored, true>(from, to);
      } else {
        convert_block<Shape, T, Stored, false>(from, to);
      }
      __syncthreads();
      return ptx::shared_address(to);
    } else {
      return block;
    }
  }

  /// Updates the state by the block of latent rows at shared address `block`, which begins at key `key`.
  __device__ __forceinline__ void attend_block(uint32_t block, int32_t key) {
    float scores[1][2][4];
    if (computes_scores()) {
      compute_scores(scores, block + 16 * score_key_warp() * Rows::kPitch, key + 16 * score_key_warp());
      store_maxima(scores[0]);
    }
    __syncthreads();
    if (computes_scores()) {
      compute_probabilities(scores[0]);
      uint8_t* const p = shared_ + Shape::kPOffset + score_row() * Shape::kPPitch;
      store_operand<T, Shape::kPPitch>(p + 16 * score_key_warp() * sizeof(T), scores);
    }
    rescale_output();
    __syncthreads();
    const uint32_t p = ptx::shared_address(shared_ + Shape::kPOffset) + first_row() * Shape::kPPitch;
    constexpr int kFirstChunks = Shape::kColumns * static_cast<int>(sizeof(T)) / 16;
    accumulate<T, Rows>(output_, SharedOperand<Shape::kKeys, Shape::kPPitch>(p), block, column_warp() * kFirstChunks);
  }

  /// The masked scores of the warp's 16 rows and 16 keys, which begin at `key`.
  __device__ __forceinline__ void compute_scores(float (&scores)[1][2][4], uint32_t keys, int32_t key) const {
    const Query query(ptx::shared_address(shared_) + score_row() * Shape::kQueryPitch);
    multiply_rows<T, Rows, kSteps, Element<T>::kIs16Bit ? 6 : 2>(scores, query, keys);
    transform_.template apply<T>(scores[0], transform_.rows(work_, score_row()), key);
    const bool masked = key < work_.keys.common_begin || key + 16 > work_.keys.common_end;
    if (masked) apply_mask(scores[0], params_, work_.tile, score_row(), key);
  }

  /// Stores the maximum of each of the warp's rows for all warps that have the row.
  __device__ __forceinline__ void store_maxima(const float (&scores)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]),
                        fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      const int32_t row = score_row() + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
      if (threadIdx.x % 4 == 0) row_states()[score_key_warp() * Shape::kRows + row] = max;
    }
  }
  /// The maximum of a row in this block, or `max` if that is larger.
  __device__ __forceinline__ float raised(float max, int32_t row) const {
#pragma unroll
    for (int warp = 0; warp < Shape::kScoreKeyWarps; ++warp) max = fmaxf(max, row_states()[warp * Shape::kRows + row]);
    return max;
  }

  /// Turns scores into probabilities that are not normalised, and adds them to the sums.
  __device__ __forceinline__ void compute_probabilities(float (&scores)[2][4]) {
    const float unit = transform_.log2_unit();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = score_row() + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
      const float max = raised(score_max_[half], row);
      // The maximum is subtracted first, so that it may be of any size.
      const float shift = max == -INFINITY ? 0.0f : max;
      float block_sum = 0.0f;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[block][i] = ptx::exp2_approx((scores[block][i] - shift) * unit);
          block_sum += scores[block][i];
        }
      }
      sum_[half] = sum_[half] * merge_weight(score_max_[half], max, unit) + block_sum;
      score_max_[half] = max;
    }
  }

  /// Raises the maxima of the output's rows. If none rises, the output stays bitwise unchanged.
  __device__ __forceinline__ void rescale_output() {
    float factor[kRowTiles][2];
    bool rises = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row() + 16 * tile + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
        const float max = raised(max_[tile][half], row);
        factor[tile][half] = merge_weight(max_[tile][half], max, transform_.log2_unit());
        rises |= factor[tile][half] != 1.0f;
        max_[tile][half] = max;
      }
    }
    if (__any_sync(~0u, rises) == 0) return;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < Shape::kColumns / 8; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output_[tile][column][i] *= factor[tile][i / 2];
      }
    }
  }

  /// Stores the output as f32.
  __device__ __forceinline__ void store_output() const {
    const int32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row() + 16 * tile + 8 * half + g;
        float* const to =
            reinterpret_cast<float*>(shared_ + row * Shape::kOutputPitch) + column_warp() * Shape::kColumns;
#pragma unroll
        for (int column = 0; column < Shape::kColumns / 8; ++column) {
          const float (&o)[4] = output_[tile][column];
          store_columns(to + 8 * column + 2 * t, make_float2(o[2 * half], o[2 * half + 1]));
        }
      }
    }
  }

  /// Stores the sums of the warps' rows, for `row_sum`, and after these the maxima.
  __device__ __forceinline__ void store_states() const {
    if (!computes_scores()) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int32_t row = score_row() + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
      if (threadIdx.x % 4 != 0) continue;
      row_states()[score_key_warp() * Shape::kRows + row] = sum;
      if (score_key_warp() == 0) row_states()[Shape::kScoreKeyWarps * Shape::kRows + row] = score_max_[half];
    }
  }
  __device__ __forceinline__ float row_sum(int32_t row) const {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Shape::kScoreKeyWarps; ++warp) sum += row_states()[warp * Shape::kRows + row];
    return sum;
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  uint8_t* const shared_;
  const LogitsTransform transform_;
  float output_[kRowTiles][Shape::kColumns / 8][4];
  float max_[kRowTiles][2];  // of the rows of the output
  float score_max_[2];       // of the rows of the scores
  float sum_[2];             // of this lane's columns of these rows
};

}  // namespace xa::mla
