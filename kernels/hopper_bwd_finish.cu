// Runs after hopper_bwd.cu and hopper_bwd_wide.cu: rounds dq_accum to dQ, and writes zeros to rows that nothing else
// writes: queries that belong to no sequence or attend to no key, and keys that no query attends to.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket of D and Dv
// Launch: kThreads threads, ceil(num_row_tiles / kWarps) * ceil(Hq / kHeadsPerWarp) + ceil(Tq / kThreads) + ceil(Tk /
// kThreads) CTAs.

#include <cstdint>

#include "element.cuh"
#include "hopper/compute.cuh"
#include "hopper_bwd/dq_accumulate.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

constexpr int kThreads = 256, kWarps = kThreads / 32;
/// Heads whose dQ a warp stores.
constexpr int kHeadsPerWarp = 4;

/// Selectors for `find_sequence`: the first index of a sequence and the number of its indices. First indices ascend in
/// row order.
struct ByQuery {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_query); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) { return __ldg(&plan.num_queries); }
};
struct ByKey {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_key); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) { return __ldg(&plan.num_keys); }
};
struct ByRowTile {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_row_tile); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) {
    return ceil_div(__ldg(&plan.num_queries), 16);
  }
};

/// Whether this lane's row belongs to a sequence; the lanes have 32 consecutive rows. Executed by a warp.
template <typename By>
__device__ __forceinline__ bool belongs_to_sequence(const HopperBackwardParams& params, int32_t row) {
  const int32_t num_seqs = params.base.forward.max_seqs, first = row / 32 * 32;
  const SequencePlan* const sequences = params.sequences_by_row;
  // Binary search in [begin, end) for the last sequence that begins at or before the row.
  int32_t begin = find_sequence<By>(sequences, num_seqs, first);
  int32_t end = find_sequence<By>(sequences, num_seqs, first + 31) + 1;
  while (end - begin > 1) {
    const int32_t middle = begin + (end - begin) / 2;
    (By::first(sequences[middle]) <= row ? begin : end) = middle;
  }
  if (num_seqs == 0) return false;
  const int32_t in_sequence = row - By::first(sequences[begin]);
  return in_sequence >= 0 && in_sequence < By::count(sequences[begin]);
}

/// Stores dQ of a row tile of kHeadsPerWarp heads, if the row tile belongs to a sequence. Executed by a warp.
template <typename T, typename Shape>
__device__ __forceinline__ void store_dq_row_tile(const HopperBackwardParams& params, int32_t row_tile,
                                                  int32_t first_head) {
  const AttentionParams& forward = params.base.forward;
  const int32_t b = find_sequence<ByRowTile>(params.sequences_by_row, forward.max_seqs, row_tile),
                lane = threadIdx.x % 32;
  const SequencePlan& sequence = params.sequences_by_row[b];
  const int32_t first_row = (row_tile - ByRowTile::first(sequence)) * 16;
  const int32_t rows = min(ByQuery::count(sequence) - first_row, 16);
  if (first_row < 0 || rows <= 0) return;
  const int32_t num_heads = forward.num_kv_heads * forward.group, row = lane / 4;
  const int64_t token = ByQuery::first(sequence) + first_row + row;
  const float scale = params.base.softmax_scale;
#pragma unroll 1
  for (int32_t head = first_head; head < min(first_head + kHeadsPerWarp, num_heads); ++head) {
    T* const to = static_cast<T*>(params.base.dq) + (token * num_heads + head) * forward.head_dim;
    float4 accum[Shape::kHeadDim / 8];
#pragma unroll
    for (int part = 0; part < Shape::kHeadDim; part += 64) {
      const auto* const from =
          reinterpret_cast<const float4*>(dq_accum_row_tile<Shape>(params, head, part / 64, row_tile)) + lane;
#pragma unroll
      for (int column = part; column < min(part + 64, Shape::kHeadDim); column += 8) {
        accum[column / 8] = __ldg(from + 4 * (column - part));
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kHeadDim / 32; ++i) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 dq = accum[4 * i + j];
        upper[j] = Element<T>::pack(dq.x * scale, dq.y * scale);
        lower[j] = Element<T>::pack(dq.z * scale, dq.w * scale);
      }
      // Each lane now has eight consecutive columns of one row.
      const uint4 upper_row = transpose_in_quad(upper), lower_row = transpose_in_quad(lower);
      const int32_t column = 32 * i + 8 * (lane % 4);
      if (column >= forward.head_dim) continue;
      if (row < rows) *reinterpret_cast<uint4*>(to + column) = upper_row;
      const int64_t eight_rows = int64_t{8} * num_heads * forward.head_dim;
      if (row + 8 < rows) *reinterpret_cast<uint4*>(to + eight_rows + column) = lower_row;
    }
  }
}

/// Clears a row of a gradient. Executed by a warp.
template <typename T>
__device__ __forceinline__ void clear_row(void* gradient, int64_t row, int32_t columns) {
  T* const to = static_cast<T*>(gradient) + row * columns;
  for (int32_t i = threadIdx.x % 32 * 8; i < columns; i += 32 * 8) {
    *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
  }
}

/// Clears the CTA's rows that belong to no sequence; each lane tests one row.
template <typename T, typename By, typename Clear>
__device__ __forceinline__ void clear_unwritten_rows(const HopperBackwardParams& params, int32_t block,
                                                     int32_t num_rows, const Clear& clear) {
  const int32_t row = block * kThreads + static_cast<int32_t>(threadIdx.x), first = row / 32 * 32;
  const bool is_unwritten = !belongs_to_sequence<By>(params, row) && row < num_rows;
  for (uint32_t unwritten = __ballot_sync(~0u, is_unwritten); unwritten != 0; unwritten &= unwritten - 1)
    clear(first + __ffs(unwritten) - 1);
}

}  // namespace xa::hopper

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape = xa::hopper::BackwardShape<XA_HEAD_DIM, xa::tiles::logits_none>;
}  // namespace

extern "C" __global__ void __launch_bounds__(xa::hopper::kThreads, 2)
    XA_ENTRY(const __grid_constant__ xa::HopperBackwardParams params) {
  using namespace xa::hopper;
  const xa::AttentionParams& forward = params.base.forward;
  const int32_t num_heads = forward.num_kv_heads * forward.group, head_blocks = ceil_div(num_heads, kHeadsPerWarp);
  const int32_t row_tile_ctas = ceil_div(params.num_row_tiles, kWarps) * head_blocks;
  const int32_t query_ctas = ceil_div(forward.num_tokens, kThreads);
  int32_t index = static_cast<int32_t>(blockIdx.x);
  if (index < row_tile_ctas) {
    const int32_t block = index / head_blocks, row_tile = block * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
    if (row_tile < params.num_row_tiles && forward.max_seqs > 0) {
      store_dq_row_tile<T, Shape>(params, row_tile, (index - block * head_blocks) * kHeadsPerWarp);
    }
    return;
  }
  index -= row_tile_ctas;
  if (index < query_ctas) {
    clear_unwritten_rows<T, ByQuery>(params, index, forward.num_tokens, [&](int64_t row) {
      clear_row<T>(params.base.dq, row, num_heads * forward.head_dim);
    });
  } else {
    clear_unwritten_rows<T, ByKey>(params, index - query_ctas, forward.capacity, [&](int64_t row) {
      clear_row<T>(params.base.dk, row, forward.num_kv_heads * forward.head_dim);
      clear_row<T>(params.base.dv, row, forward.num_kv_heads * forward.value_dim);
    });
  }
}
