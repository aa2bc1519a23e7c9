// The epilogue of hopper_split_kv: a warp's 16 rows, as partial results if their tile is split.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "hopper/online_softmax.cuh"
#include "hopper/shape.cuh"
#include "params/hopper_prefill.cuh"
#include "partial_rows.cuh"
#include "softmax.cuh"

namespace xa::hopper {

/// Stores a warp's 16 rows from `first_row` on.
template <typename Shape, typename T>
class SplitKvEpilogue {
  using State = OnlineSoftmax<Shape::kValueDim / 8>;

 public:
  __device__ __forceinline__ SplitKvEpilogue(const HopperPrefillParams& prefill, const SplitKvTile& tile,
                                             int32_t first_row, bool)
      : prefill_(prefill), tile_(tile), first_row_(first_row) {}

  __device__ __forceinline__ void finalize(const State&) const {}

  __device__ __forceinline__ void store(const State& state, uint32_t) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row_ + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
      if (row >= tile_.work.tile.num_rows) continue;
      if (tile_.partial_row >= 0) {
        store_partial(state, half, row);
      } else {
        const int32_t query = query_of_row(prefill_, row);
        store_final(state, half, query, row - query * prefill_.attention.group);
      }
    }
  }

 private:
  __device__ __forceinline__ void store_partial(const State& state, int half, int32_t row) const {
    const PartialRows partial(prefill_.attention.partial, tile_.work.kv_head);
    float* const to = partial.output(tile_.partial_row + row, threadIdx.x % 4 * 2);
    if (threadIdx.x % 4 == 0) partial.store_state(tile_.partial_row + row, state.max[half], state.sum[half]);
#pragma unroll
    for (int column = 0; column < Shape::kValueDim / 8; ++column) {
      if (8 * column >= prefill_.attention.value_dim) break;
      const float* const x = &state.output[column][2 * half];
      *reinterpret_cast<float2*>(to + 8 * column) = make_float2(x[0], x[1]);
    }
  }

  __device__ __forceinline__ void store_final(const State& state, int half, int32_t query,
                                              int32_t head_in_group) const {
    const AttentionParams& params = prefill_.attention;
    const int32_t head = tile_.work.kv_head * params.group + head_in_group;
    const int32_t token = tile_.work.tile.first_token + query;
    const float sink = params.sinks == nullptr ? -INFINITY : __ldg(params.sinks + head);
    const RowResult result = finish_row(state.max[half], state.sum[half], 1.0f, sink, tile_.value_factor);
    if (params.lse != nullptr && threadIdx.x % 4 == 0) {
      params.lse[static_cast<int64_t>(head) * params.num_tokens + token] = result.lse;
    }
    const int64_t element = token * params.out_token_stride + head * params.out_head_stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int column = 0; column < Shape::kValueDim / 8; ++column) {
      if (8 * column >= params.value_dim) break;
      const float* const x = &state.output[column][2 * half];
      const float2 pair = make_float2(x[0] * result.factor, x[1] * result.factor);
      if (params.widens_out != 0) {
        store_columns(static_cast<float*>(params.out) + element + 8 * column, pair);
      } else if (Shape::kOutputTypeAtRunTime && params.out_is_bf16 != 0) {
        store_columns(static_cast<Bf16*>(params.out) + element + 8 * column, pair);
      } else {
        store_columns(static_cast<T*>(params.out) + element + 8 * column, pair);
      }
    }
  }

  const HopperPrefillParams& prefill_;
  const SplitKvTile& tile_;
  const int32_t first_row_;
};

}  // namespace xa::hopper
