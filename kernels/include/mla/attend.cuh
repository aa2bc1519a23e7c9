// The main loop of multi-head latent attention, and the result of a work tile. A block of latent rows is in shared
// memory once, as K and, in its first columns, as V.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "bwd/products.cuh"
#include "element.cuh"
#include "mla/latent_rows.cuh"
#include "mla/quad_rows.cuh"
#include "mla/result.cuh"
#include "mla/shape.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa::mla {

/// The state of a work tile's rows over a group's keys so far. Each thread has the maxima of the rows of which it
/// computes scores or output. All threads that have a row compute its maximum from the same numbers, so theirs are
/// equal.
template <typename Shape, typename T, typename Stored, typename LogitsTransform>
class TileAttention {
  using Rows = typename Shape::Rows;
  using StoredRows = typename Shape::StoredRows;
  using Ring = std::conditional_t<Shape::kConvertsFragments, QuadRing<Shape, Stored>, LatentRing<Shape, Stored>>;
  /// The rows that are multiplied.
  using BlockRows = std::conditional_t<Shape::kConvertsFragments, StoredRows, Rows>;
  using Query = QueryFragments<1, kLatentDim, sizeof(T), false>;
  static constexpr int kSteps = Shape::kQueryRowBytes / 32;  // k-blocks of 16 halves or 8 floats
  static constexpr int kRowTiles = Shape::kRowTiles;
  /// Maxima rise by more than this power of two, so that few blocks rescale the output. P is at most 2^kRise.
  static constexpr float kRise = 8.0f;

 public:
  __device__ __forceinline__ TileAttention(const AttentionParams& params, const WorkTile& work, uint8_t* shared)
      : params_(params),
        work_(work),
        shared_(shared + group() * Shape::kGroupBytes),
        query_(shared),
        transform_(params) {
    clear(output_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      score_max_[half] = -INFINITY;
      sum_[half] = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) max_[tile][half] = -INFINITY;
    }
  }

  /// Attends to the group's keys of the work tile.
  __device__ __forceinline__ void attend() {
    constexpr int kStages = Shape::kStages, kAhead = kStages > 1 ? kStages - 1 : 1;
    const int32_t first = (work_.keys.begin / Shape::kKeys + group()) * Shape::kKeys;
    Ring ring(params_, work_, ptx::shared_address(shared_), first);
    load_query();
    ptx::cp_async_commit();
#pragma unroll 1
    for (int stage = 0; stage < kAhead; ++stage) ring.fetch();
    // All groups have stored query rows.
    if constexpr (Shape::kKeyGroups > 1) __syncthreads();
#pragma unroll 1
    for (uint32_t key = first; key < static_cast<uint32_t>(work_.keys.end); key += Shape::kKeys * Shape::kKeyGroups) {
      ptx::cp_async_wait<kAhead - 1>();
      // After this barrier the block is complete, and all warps have read the one before, whose stage is fetched next.
      sync_group();
      if constexpr (kStages > 1) ring.fetch();
      attend_block(converted(ring.take()), key);
      if constexpr (kStages == 1) {
        sync_group();
        ring.fetch();
      }
    }
    // The last blocks' groups are empty. Without a block, the query rows are still being copied.
    ptx::cp_async_wait<0>();
  }

  /// Stores the result of the work tile where the WorkRange says: in the workspace as a partial, or in out and lse. The
  /// output passes through shared memory, so that global stores coalesce and groups are merged.
  __device__ __forceinline__ void store_result(const WorkRange& range) {
    __syncthreads();
    store_output();
    store_states();
    __syncthreads();
    const float unit = transform_.log2_unit();
    const auto merged = [&](int32_t row, int32_t column) {
      PartialState part = part_of(0, row, column);
#pragma unroll
      for (int i = 1; i < Shape::kKeyGroups; ++i) merge(part, part_of(i, row, column), unit);
      return part;
    };
    store_rows<Shape::kThreads, RowWriter<T, Shape::kConvertsFragments>>(params_, work_, range.partial_row, unit,
                                                                         threadIdx.x, merged);
  }

 private:
  static __device__ __forceinline__ int32_t group() {
    return static_cast<int32_t>(threadIdx.x / 32) / Shape::kGroupWarps;
  }
  /// The warp's index in its group.
  static __device__ __forceinline__ int32_t warp() {
    return static_cast<int32_t>(threadIdx.x / 32) % Shape::kGroupWarps;
  }
  /// Waits for the warps of the group.
  static __device__ __forceinline__ void sync_group() {
    if constexpr (Shape::kKeyGroups > 1) {
      ptx::barrier_sync<32 * Shape::kGroupWarps>(1 + group());
    } else {
      __syncthreads();
    }
  }
  // Of S = Q K^T.
  static __device__ __forceinline__ int32_t score_row() { return warp() % Shape::kScoreRowWarps * 16; }
  static __device__ __forceinline__ int32_t score_key_warp() {
    return warp() % Shape::kScoreWarps / Shape::kScoreRowWarps;
  }
  static __device__ __forceinline__ bool computes_scores() { return warp() < Shape::kScoreWarps; }
  // Of O += P V.
  static __device__ __forceinline__ int32_t first_row() { return warp() % Shape::kRowWarps * 16 * kRowTiles; }
  static __device__ __forceinline__ int32_t column_warp() { return warp() / Shape::kRowWarps; }
  /// f32 [kScoreKeyWarps + 1, kRows]
  __device__ __forceinline__ float* row_states() const {
    return reinterpret_cast<float*>(shared_ + Shape::kRowStatesOffset);
  }

  __device__ __forceinline__ void load_query() const {
    const RowMap map(params_, work_.tile, work_.kv_head);
    if constexpr (Shape::kConvertsFragments) {
      convert_query<Shape, Stored>(params_, map, query_, row_factors());
    } else {
      copy_query<Shape, T>(params_, map, ptx::shared_address(query_));
    }
  }
  __device__ __forceinline__ float* row_factors() const {
    return reinterpret_cast<float*>(query_ + Shape::kFactorsOffset);
  }

  /// Shared address of the block in the type of the products, or as it is if fragments are converted.
  __device__ __forceinline__ uint32_t converted(uint32_t block) const {
    if constexpr (Shape::kIsFp8 && !Shape::kConvertsFragments) {
      const uint8_t* const from = shared_ + (block - ptx::shared_address(shared_));
      uint8_t* const to = shared_ + Shape::kConvertedOffset;
      if (params_.kv_is_e5m2 != 0) {
        convert_block<Shape, T, Stored, true>(from, to);
      } else {
        convert_block<Shape, T, Stored, false>(from, to);
      }
      sync_group();
      return ptx::shared_address(to);
    } else {
      return block;
    }
  }

  /// Updates the state by the block of latent rows at shared address `block`, which begins at key `key`.
  __device__ __forceinline__ void attend_block(uint32_t block, int32_t key) {
    float scores[1][2][4];
    if (computes_scores() || Shape::kSumWarps > 1) {
      multiply(scores, block + 16 * score_key_warp() * BlockRows::kPitch);
    }
    if (computes_scores()) {
      finish_scores(scores[0], key + 16 * score_key_warp());
      store_maxima(scores[0]);
    }
    sync_group();
    if (computes_scores()) {
      compute_probabilities(scores[0]);
      uint8_t* const p = shared_ + Shape::kPOffset + score_row() * Shape::kPPitch;
      store_operand<T, Shape::kPPitch>(p + 16 * score_key_warp() * sizeof(T), scores);
    }
    rescale_output();
    sync_group();
    const uint32_t p = ptx::shared_address(shared_ + Shape::kPOffset) + first_row() * Shape::kPPitch;
    const SharedOperand<Shape::kKeys, Shape::kPPitch> operand(p);
    if constexpr (Shape::kConvertsFragments) {
      TileMath<T, Stored, StoredRows, kRowTiles, Shape::kKeys, Shape::kColumns>::accumulate_8_bits(
          output_, operand, block + column_warp() * Shape::kColumns, params_);
    } else {
      constexpr int kFirstChunks = Shape::kColumns * static_cast<int>(sizeof(T)) / 16;
      accumulate<T, Rows>(output_, operand, block, column_warp() * kFirstChunks);
    }
  }

  /// The products of 16 keys over the columns of the warp's part of the sums. `query` and `keys` begin there.
  template <bool kIsE5m2>
  __device__ __forceinline__ void multiply_part(float (&scores)[1][2][4], const Query& query, uint32_t keys) const {
    const uint32_t lane = threadIdx.x % 32, matrix = lane / 8;
    const uint32_t from = keys + StoredRows::offset(matrix / 2 * 8 + lane % 8, matrix % 2);
    clear(scores);
#pragma unroll
    for (int step = 0; step < kSteps / Shape::kSumWarps; step += 2) {
      uint32_t q[2][4], k[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) query.get(q[i], step + i, 0);
      ptx::ldmatrix_x4(k, StoredRows::moved(from, 0, step));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto [low, high] = decode_neighbours<Stored, kIsE5m2>(k[i]);
        Element<T>::mma(scores[0][i / 2], q[i % 2], low, high);
      }
    }
  }
  /// Adds the products of the warps that have the other columns; those warps have no scores then. The products pass
  /// through the place of P, which all warps have read.
  __device__ __forceinline__ void add_sums(float (&scores)[2][4]) const {
    float4* const sums =
        reinterpret_cast<float4*>(shared_ + Shape::kPOffset) + warp() % Shape::kScoreWarps * 32 + threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float (&x)[4] = scores[tile];
      if (!computes_scores()) sums[32 * Shape::kScoreWarps * tile] = make_float4(x[0], x[1], x[2], x[3]);
    }
    sync_group();
    if (!computes_scores()) return;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float4 other = sums[32 * Shape::kScoreWarps * tile];
      scores[tile][0] += other.x;
      scores[tile][1] += other.y;
      scores[tile][2] += other.z;
      scores[tile][3] += other.w;
    }
  }

  /// The products of the warp's 16 rows and 16 keys, which begin at shared address `keys`.
  __device__ __forceinline__ void multiply(float (&scores)[1][2][4], uint32_t keys) const {
    const uint32_t rows = ptx::shared_address(query_) + score_row() * Shape::kQueryPitch;
    if constexpr (Shape::kConvertsFragments) {
      const int32_t first_step = warp() / Shape::kScoreWarps * (kSteps / Shape::kSumWarps);
      const Query query(rows + 32 * first_step);
      if (params_.kv_is_e5m2 != 0) {
        multiply_part<true>(scores, query, keys + 16 * first_step);
      } else {
        multiply_part<false>(scores, query, keys + 16 * first_step);
      }
      if constexpr (Shape::kSumWarps > 1) add_sums(scores[0]);
    } else {
      multiply_rows<T, Rows, kSteps, Element<T>::kIs16Bit ? 6 : 2>(scores, Query(rows), keys);
    }
  }

  /// Turns products into masked scores. The warp's keys begin at `key`.
  __device__ __forceinline__ void finish_scores(float (&scores)[2][4], int32_t key) const {
    if constexpr (Shape::kConvertsFragments) {
      const float* const factors = row_factors() + score_row() + threadIdx.x % 32 / 4;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[block][i] *= factors[i / 2 * 8];
      }
    }
    transform_.template apply<T>(scores, transform_.rows(work_, score_row()), key);
    const bool masked = key < work_.keys.common_begin || key + 16 > work_.keys.common_end;
    if (masked) apply_mask(scores, params_, work_.tile, score_row(), key);
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
  /// `max`, or the maximum of a row in this block if that is more than 2^kRise above it. -inf always rises.
  __device__ __forceinline__ float raised(float max, int32_t row) const {
    float largest = row_states()[row];
#pragma unroll
    for (int warp = 1; warp < Shape::kScoreKeyWarps; ++warp) {
      largest = fmaxf(largest, row_states()[warp * Shape::kRows + row]);
    }
    return (largest - max) * transform_.log2_unit() <= kRise ? max : largest;
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
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row() + 16 * tile + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
        float* const to = reinterpret_cast<float*>(shared_ + Shape::kOutputOffset + row * Shape::kOutputPitch) +
                          column_warp() * Shape::kColumns;
        for_columns<Shape::kConvertsFragments>(
            output_[tile], half, [&](int32_t column, const auto& columns) { store_columns(to + column, columns); });
      }
    }
  }

  /// Stores the sums of the warps' rows and after these the maxima.
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
  /// What group `group` has stored of a row.
  __device__ __forceinline__ PartialState part_of(int32_t group, int32_t row, int32_t column) const {
    const uint8_t* const base = query_ + group * Shape::kGroupBytes;
    const float* const states = reinterpret_cast<const float*>(base + Shape::kRowStatesOffset) + row;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Shape::kScoreKeyWarps; ++warp) sum += states[warp * Shape::kRows];
    const uint8_t* const output = base + Shape::kOutputOffset + row * Shape::kOutputPitch + 4 * column;
    return PartialState{states[Shape::kScoreKeyWarps * Shape::kRows], sum, *reinterpret_cast<const float4*>(output)};
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  uint8_t* const shared_;  // from Shape::kStagesOffset on, what the group has
  uint8_t* const query_;
  const LogitsTransform transform_;
  float output_[kRowTiles][Shape::kColumns / 8][4];
  float max_[kRowTiles][2];  // of the rows of the output
  float score_max_[2];       // of the rows of the scores
  float sum_[2];             // of this lane's columns of these rows
};

}  // namespace xa::mla
