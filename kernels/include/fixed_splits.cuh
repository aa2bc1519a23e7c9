// batch_invariant: the results of the fixed-size splits that a CTA computes of a tile (work_partition.cuh), one after
// another while the blocks of the next one are on their way.
#pragma once

#include <cstdint>

#include "output_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "tile_result.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// What the threads of a CTA share at the end of a fixed-size split.
///
/// A warp stores its output in `area`, a part of its ring that waits for no copy. The merged rows are the state of the
/// fixed-size splits from the tile's first to the one before; a thread has the same columns of the same rows each time.
/// A row's (max, sum) is read by all of its threads, so it is double buffered: no thread overwrites what another one
/// still reads.
template <typename Shape>
class FixedSplits {
  static constexpr int kRows = Shape::kRows, kRowBytes = Shape::kHeadDim * 4, kInQuery = Shape::kMergedRowsInQuery;
  static constexpr int kAreaRowBytes = Shape::kWarpColumns * 4;
  static_assert(kInQuery * kRowBytes <= Shape::kQueryBytes, "merged rows take the place of query rows");
  static_assert(kRows * kAreaRowBytes <= Shape::kRingBytes, "a warp's output fits into its ring");
  static_assert(Shape::kColumnWarps == 1 || Shape::kWarps <= 8, "areas_");

  uint8_t* shared_;
  float2* merged_states_;  // [2, kRows]
  float2* warp_states_;    // [kKeyWarps, kRows]
  int32_t* areas_;         // [kWarps], bytes from `shared_`; -1: the warp had no keys

 public:
  static constexpr int32_t kNoArea = -1;

  __device__ __forceinline__ explicit FixedSplits(uint8_t* shared)
      : shared_(shared),
        merged_states_(reinterpret_cast<float2*>(shared + Shape::kFixedSplitsOffset + (kRows - kInQuery) * kRowBytes)),
        warp_states_(merged_states_ + 2 * kRows),
        areas_(reinterpret_cast<int32_t*>(warp_states_ + Shape::kKeyWarps * kRows)) {}

  /// Stores the warp's state of its first `num_rows` rows, the output at `area` unless that is kNoArea.
  template <typename State>
  __device__ __forceinline__ void store_warp(const State& state, int32_t area, int32_t num_rows) const {
    // Opaque: addresses are computed here, because in registers throughout the loop over keys they spill.
    const int32_t thread = ptx::opaque(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < State::kHalves; ++half) {
      if (t == 0 && warp % Shape::kColumnWarps == 0) {
        const int32_t state_row = warp / Shape::kColumnWarps * kRows + 8 * half + g;
        warp_states_[state_row] = make_float2(state.max[0][half], state.sum[0][half]);
      }
      if (area == kNoArea || 8 * half >= num_rows) continue;
      for_row_columns<Shape::kIsFp8>(state, half, lane, [&](int32_t row, int32_t column, const auto& columns) {
        store_columns(reinterpret_cast<float*>(vector(area, row, column)) + column % 4, columns);
      });
    }
    if (lane == 0) areas_[warp] = area;
  }

  /// The state of columns `column` to `column + 3` of a row, merged over the warps. A barrier has to follow
  /// `store_warp`.
  __device__ __forceinline__ PartialState of_warps(int32_t row, int32_t column, float log2_unit) const {
    return merge_warps<Shape>(warp_states_, row, log2_unit, [&](int warp) {
      const int32_t column_warp = Shape::kColumnWarps > 1 ? column / Shape::kWarpColumns : 0;
      const int32_t area = areas_[warp * Shape::kColumnWarps + column_warp];
      if (area == kNoArea) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      return *vector(area, row, column - column_warp * Shape::kWarpColumns);
    });
  }

  /// The merged row, whose (max, sum) is in buffer `parity`, merged with `next`.
  __device__ __forceinline__ PartialState merged_with(const PartialState& next, int32_t parity, int32_t row,
                                                      int32_t column, float log2_unit) const {
    const float2 state = merged_states_[parity * kRows + row];
    PartialState part = {state.x, state.y, *merged_row(row, column)};
    merge(part, next, log2_unit);
    return part;
  }
  __device__ __forceinline__ void store_merged(const PartialState& part, int32_t parity, int32_t row,
                                               int32_t column) const {
    *merged_row(row, column) = part.output;
    if (column == 0) merged_states_[parity * kRows + row] = make_float2(part.max, part.sum);
  }

 private:
  /// The four columns from `column` / 4 * 4 on of a warp's output, at `area`. They are swizzled, so that the lanes of a
  /// store, which have several rows, and those of a load, which have one, use different banks.
  __device__ __forceinline__ float4* vector(int32_t area, int32_t row, int32_t column) const {
    const int32_t permutation = Shape::kTileRows == 8 ? row / 2 * 4 : row * (Shape::kIsFp8 ? 4 : 2) % 8;
    const int32_t swizzled = (column / 4) ^ permutation;
    return reinterpret_cast<float4*>(shared_ + area + row * kAreaRowBytes) + swizzled;
  }
  __device__ __forceinline__ float4* merged_row(int32_t row, int32_t column) const {
    const int32_t offset = row < kInQuery ? row * kRowBytes : Shape::kFixedSplitsOffset + (row - kInQuery) * kRowBytes;
    return reinterpret_cast<float4*>(shared_ + offset + column * 4);
  }
};

/// Where fixed-size splits start anew: makes the one at `range.fixed_split_begin` the keys of `work`. All threads of
/// the CTA call it.
template <int kKvChunkKeys>
__device__ __forceinline__ void cut_to_fixed_split(const AttentionParams& params, WorkTile& work,
                                                   const WorkRange& range) {
  __syncthreads();
  if (ptx::opaque(threadIdx.x) == 0) {
    const int32_t begin = range.fixed_split_begin, end = min(begin + range.fixed_split_chunks, range.split_end);
    const TileChunks chunks = {range.first_chunk, range.tile_chunks};
    work.keys = keys_of_chunks<kKvChunkKeys>(params, work.tile, chunks, begin, end);
  }
  __syncthreads();
}

/// Advances `range.fixed_split_begin` after `store_fixed_split`. Returns whether the work tile has another fixed-size
/// split. All threads of the CTA call it.
__device__ __forceinline__ bool next_fixed_split(WorkRange& range) {
  const int32_t begin = range.fixed_split_begin + range.fixed_split_chunks;
  if (range.fixed_split_chunks == 0 || begin >= range.split_end) return false;
  __syncthreads();
  if (threadIdx.x == 0) range.fixed_split_begin = begin;
  return true;
}

/// Merges the warps' states of the fixed-size split that begins at chunk `begin` of the tile, and stores the result: in
/// the merged rows, in the workspace as a partial, or in out and lse. All threads of the CTA call it; then the areas
/// are free.
template <typename Shape, typename Writer, typename State>
__device__ __forceinline__ void store_fixed_split(const AttentionParams& params, const WorkTile& work,
                                                  const WorkRange& range, const Writer& writer, const State& state,
                                                  int32_t area, int32_t begin, uint8_t* shared, float log2_unit) {
  constexpr int kRowVectors = Shape::kHeadDim / 4;  // float4
  const FixedSplits<Shape> splits(shared);
  splits.store_warp(state, area, work.tile.num_rows);
  __syncthreads();
  const PartialRows partial(params.partial, work.kv_head,
                            opaque_if<Shape::kHasTokenScales>(params.partial.rows_per_head));
  const bool merges = range.split_begin == 0, is_last = begin + range.fixed_split_chunks >= range.split_end;
  const int32_t split = (begin - range.split_begin) >> (31 - __clz(range.fixed_split_chunks)), parity = split % 2;
  const int32_t partial_row = range.partial_row + (merges ? 0 : split * work.tile.num_rows);
  for (int32_t item = ptx::opaque(threadIdx.x); item < work.tile.num_rows * kRowVectors; item += Shape::kThreads) {
    const int32_t row = item / kRowVectors, column = item % kRowVectors * 4;
    if (column >= params.value_dim) continue;
    PartialState part = splits.of_warps(row, column, log2_unit);
    if (merges && split > 0) part = splits.merged_with(part, parity ^ 1, row, column, log2_unit);
    if (merges && !is_last) {
      splits.store_merged(part, parity, row, column);
    } else if (range.partial_row >= 0) {
      partial.store(partial_row + row, column, part);
    } else {
      writer.write(row, column, part, log2_unit);
    }
  }
  __syncthreads();
}

}  // namespace xa
