// After hopper_bwd.cu: dQ out of its sums, and zeros where nothing else is written: query rows of no sequence or that
// see nothing, and keys that no query sees.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket of D and Dv
// Launch: kThreads threads, ceil(num_groups / kWarps) * ceil(Hq / kHeads) + ceil(Tq / kThreads) + ceil(Tk / kThreads)
// CTAs.

#include <cstdint>

#include "element.cuh"
#include "hopper/compute.cuh"
#include "hopper_bwd/schedule.cuh"
#include "hopper_bwd/shape.cuh"
#include "hopper_bwd/sums.cuh"
#include "params/hopper_bwd.cuh"

namespace xa::hopper {

constexpr int kThreads = 256, kWarps = kThreads / 32;
/// Of which a warp makes dQ.
constexpr int kHeads = 4;

/// What of a sequence is looked for, and how much of that it has: places that ascend from one to the next.
struct OfQueries {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_query); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) { return __ldg(&plan.num_queries); }
};
struct OfKeys {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_key); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) { return __ldg(&plan.num_keys); }
};
struct OfGroups {
  static __device__ __forceinline__ int32_t first(const SequencePlan& plan) { return __ldg(&plan.first_group); }
  static __device__ __forceinline__ int32_t count(const SequencePlan& plan) {
    return ceil_div(__ldg(&plan.num_queries), 16);
  }
};

/// Whether a row, which is this lane's of 32 neighbouring ones, belongs to a sequence. The work of a warp.
template <typename Of>
__device__ __forceinline__ bool has_owner(const HopperBackwardParams& params, int32_t row) {
  const int32_t num_seqs = params.base.forward.max_seqs, first = row / 32 * 32;
  const SequencePlan* const sequences = params.by_row;
  // The last sequence that begins at or before the row is in [begin, end).
  int32_t begin = last_before<Of>(sequences, num_seqs, first);
  int32_t end = last_before<Of>(sequences, num_seqs, first + 31) + 1;
  while (end - begin > 1) {
    const int32_t middle = begin + (end - begin) / 2;
    (Of::first(sequences[middle]) <= row ? begin : end) = middle;
  }
  if (num_seqs == 0) return false;
  const int32_t in_sequence = row - Of::first(sequences[begin]);
  return in_sequence >= 0 && in_sequence < Of::count(sequences[begin]);
}

/// dQ of a group of rows of some heads, if it is a sequence's. The work of a warp.
template <typename T, typename Shape>
__device__ __forceinline__ void write_group(const HopperBackwardParams& params, int32_t group, int32_t first_head) {
  const AttentionParams& forward = params.base.forward;
  const int32_t b = last_before<OfGroups>(params.by_row, forward.max_seqs, group), lane = threadIdx.x % 32;
  const SequencePlan& sequence = params.by_row[b];
  const int32_t first_row = (group - OfGroups::first(sequence)) * 16;
  const int32_t rows = min(OfQueries::count(sequence) - first_row, 16);
  if (first_row < 0 || rows <= 0) return;
  const int32_t num_heads = forward.num_kv_heads * forward.group, row = lane / 4;
  const int64_t token = OfQueries::first(sequence) + first_row + row;
  const float scale = params.base.softmax_scale;
#pragma unroll 1
  for (int32_t head = first_head; head < min(first_head + kHeads, num_heads); ++head) {
    T* const to = static_cast<T*>(params.base.dq) + (token * num_heads + head) * forward.head_dim;
    float4 sums[Shape::kHeadDim / 8];
#pragma unroll
    for (int part = 0; part < Shape::kHeadDim; part += 64) {
      const auto* const from =
          reinterpret_cast<const float4*>(group_sums<Shape>(params, head, part / 64, group)) + lane;
#pragma unroll
      for (int column = part; column < min(part + 64, Shape::kHeadDim); column += 8) {
        sums[column / 8] = __ldg(from + 4 * (column - part));
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kHeadDim / 32; ++i) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 sum = sums[4 * i + j];
        upper[j] = Element<T>::pack(sum.x * scale, sum.y * scale);
        lower[j] = Element<T>::pack(sum.z * scale, sum.w * scale);
      }
      // Eight columns of a row are now one lane's.
      const uint4 of_row = transpose_in_quad(upper), of_next = transpose_in_quad(lower);
      const int32_t column = 32 * i + 8 * (lane % 4);
      if (column >= forward.head_dim) continue;
      if (row < rows) *reinterpret_cast<uint4*>(to + column) = of_row;
      const int64_t eight_rows = int64_t{8} * num_heads * forward.head_dim;
      if (row + 8 < rows) *reinterpret_cast<uint4*>(to + eight_rows + column) = of_next;
    }
  }
}

/// Zeros in a row of a gradient. The work of a warp.
template <typename T>
__device__ __forceinline__ void clear_row(void* gradient, int64_t row, int32_t columns) {
  T* const to = static_cast<T*>(gradient) + row * columns;
  for (int32_t i = threadIdx.x % 32 * 8; i < columns; i += 32 * 8) {
    *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
  }
}

/// Zeros in those of a CTA's rows that are no sequence's; each lane looks at one.
template <typename T, typename Of, typename Clear>
__device__ __forceinline__ void clear_unseen(const HopperBackwardParams& params, int32_t block, int32_t num_rows,
                                             const Clear& clear) {
  const int32_t row = block * kThreads + static_cast<int32_t>(threadIdx.x), first = row / 32 * 32;
  const bool is_free = !has_owner<Of>(params, row) && row < num_rows;
  for (uint32_t left = __ballot_sync(~0u, is_free); left != 0; left &= left - 1) clear(first + __ffs(left) - 1);
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
  const int32_t num_heads = forward.num_kv_heads * forward.group, head_blocks = ceil_div(num_heads, kHeads);
  const int32_t of_groups = ceil_div(params.num_groups, kWarps) * head_blocks;
  const int32_t of_queries = ceil_div(forward.num_tokens, kThreads);
  int32_t index = static_cast<int32_t>(blockIdx.x);
  if (index < of_groups) {
    const int32_t block = index / head_blocks, group = block * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
    if (group < params.num_groups && forward.max_seqs > 0) {
      write_group<T, Shape>(params, group, (index - block * head_blocks) * kHeads);
    }
    return;
  }
  index -= of_groups;
  if (index < of_queries) {
    clear_unseen<T, OfQueries>(params, index, forward.num_tokens,
                               [&](int64_t row) { clear_row<T>(params.base.dq, row, num_heads * forward.head_dim); });
  } else {
    clear_unseen<T, OfKeys>(params, index - of_queries, forward.capacity, [&](int64_t row) {
      clear_row<T>(params.base.dk, row, forward.num_kv_heads * forward.head_dim);
      clear_row<T>(params.base.dv, row, forward.num_kv_heads * forward.value_dim);
    });
  }
}
