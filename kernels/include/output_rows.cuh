// The epilogue: writes rows of `out` and `lse` from softmax states, and clears padding rows, which belong to no
// sequence.
#pragma once

#include <cmath>
#include <cstdint>

#include "element.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "scales.cuh"
#include "softmax.cuh"
#include "work_tile.cuh"

namespace xa {

/// Writes the rows of one tile. Their type is f32 with AttentionParams::widens_out, otherwise T, or bf16 with
/// `kChoosesType` and AttentionParams::out_is_bf16.
template <typename T, bool kChoosesType>
class RowWriter {
 public:
  __device__ __forceinline__ RowWriter(const AttentionParams& params, const QoTile& tile, int32_t kv_head)
      : RowWriter(params, tile, kv_head, params.group) {}
  /// With padding heads, whose rows the caller leaves out (RowMap).
  __device__ __forceinline__ RowWriter(const AttentionParams& params, const QoTile& tile, int32_t kv_head,
                                       int32_t group_heads)
      : params_(params),
        map_(params, tile, kv_head, group_heads),
        v_scale_(params.value_factor * scale_of(params.v_scale, kv_head)) {}

  __device__ __forceinline__ bool writes(int32_t row) const { return row < map_.num_rows; }
  /// Without `widens_out`, the address of a row of `out`.
  __device__ __forceinline__ T* out(int32_t row) const { return static_cast<T*>(params_.out) + element(row); }
  /// With `widens_out`, or if T is f32, that address.
  __device__ __forceinline__ float* wide_out(int32_t row) const {
    return static_cast<float*>(params_.out) + element(row);
  }
  /// Stores adjacent columns of a row of `out`, a float2 or a float4 of them, from `column` on.
  template <typename Columns>
  __device__ __forceinline__ void store_out(int32_t row, int32_t column, const Columns& columns) const {
    if (params_.widens_out != 0) {
      store_columns(wide_out(row) + column, columns);
    } else {
      store(out(row) + column, columns);
    }
  }
  /// Stores adjacent columns, a float2 or a float4 of them; `to` is aligned accordingly.
  template <typename Columns>
  __device__ __forceinline__ void store(T* to, const Columns& columns) const {
    if (kChoosesType && params_.out_is_bf16 != 0) {
      store_columns(reinterpret_cast<Bf16*>(to), columns);
    } else {
      store_columns(to, columns);
    }
  }
  /// The factor of the output of `row`, and its lse.
  __device__ __forceinline__ RowResult finish(int32_t row, float max, float sum, float log2_unit) const {
    const float sink = params_.sinks == nullptr ? -INFINITY : __ldg(params_.sinks + map_.head(row));
    return finish_row(max, sum, log2_unit, sink, v_scale_);
  }
  /// Writes columns `column` to `column` + 3 of a row, and if `column` is 0 its lse.
  __device__ __forceinline__ void write(int32_t row, int32_t column, const PartialState& state, float log2_unit) const {
    if (!writes(row)) return;
    const auto [factor, lse] = finish(row, state.max, state.sum, log2_unit);
    store_out(row, column, scaled(state.output, factor));
    if (column == 0) write_lse(row, lse);
  }
  __device__ __forceinline__ void write_lse(int32_t row, float lse) const {
    if (params_.lse == nullptr || !writes(row)) return;
    params_.lse[static_cast<int64_t>(map_.head(row)) * params_.num_tokens + map_.token(row)] = lse;
  }

 private:
  /// The element of `out` at which a row begins.
  __device__ __forceinline__ int64_t element(int32_t row) const {
    return map_.token(row) * params_.out_token_stride + map_.head(row) * params_.out_head_stride;
  }

  const AttentionParams& params_;
  const RowMap map_;
  float v_scale_;
};

/// Calls `store(column, values)` for the adjacent columns that this lane has of one row of an accumulator fragment;
/// `half` selects row lane / 4 or lane / 4 + 8. If K and V are fp8, one accumulator has the even and the next one the
/// odd columns of 16 (tile_math.cuh).
template <bool kIsFp8, int kColumnTiles, typename Store>
__device__ __forceinline__ void for_columns(const float (&output)[kColumnTiles][4], int half, const Store& store) {
  const int32_t t = threadIdx.x % 4, i = 2 * half;
  constexpr int kTilesAtOnce = kIsFp8 ? 2 : 1;
#pragma unroll
  for (int column = 0; column < kColumnTiles; column += kTilesAtOnce) {
    const float (&o)[4] = output[column];
    if constexpr (kIsFp8) {
      const float (&odd)[4] = output[column + 1];
      store(8 * column + 4 * t, make_float4(o[i], odd[i], o[i + 1], odd[i + 1]));
    } else {
      store(8 * column + 2 * t, make_float2(o[i], o[i + 1]));
    }
  }
}

/// Calls `store(row, column, values)` for all columns that this lane, `lane`, has of a half of a state's row tile.
template <bool kIsFp8, typename State, typename Store>
__device__ __forceinline__ void for_row_columns(const State& state, int half, int32_t lane, const Store& store) {
  const int32_t g = lane / 4, t = lane % 4;
  if constexpr (State::kTileRows == 8) {
    int32_t column = 2 * g;
    for (const float (&o)[4] : state.output[0]) {
      store(2 * t, column, make_float2(o[0], o[2]));
      store(2 * t + 1, column, make_float2(o[1], o[3]));
      column += 16;
    }
  } else {
    for_columns<kIsFp8>(state.output[0], half,
                        [&](int32_t column, const auto& columns) { store(8 * half + g, column, columns); });
  }
}

/// Writes the kWarpColumns columns from `first_column` on that a warp has of its rows, from row `first_row` of the tile
/// on. They are staged in shared memory, in the warp's rows at `staging`, kQueryPitch apart, so that global stores are
/// 16 bytes and coalesce. f32 rows of 16-bit queries do not fit there and are stored directly.
template <typename Shape, typename T, typename Writer, typename State>
__device__ __forceinline__ void write_warp_rows(const AttentionParams& params, const Writer& writer, const State& state,
                                                int32_t first_row, int32_t first_column, uint8_t* staging,
                                                float log2_unit) {
  using Grid = LaneGrid<Shape::kWarpColumns* static_cast<int>(sizeof(T))>;
  constexpr int kElements = 16 / sizeof(T);
  const int32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // `staging` holds the query rows, which all lanes must have read.
  __syncwarp();
#pragma unroll
  for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = 16 * tile + 8 * half + g;
      const RowResult result = writer.finish(first_row + row, state.max[tile][half], state.sum[tile][half], log2_unit);
      // A branch per row, not per column: kernels are a fifth smaller.
      if (!Element<T>::kIs16Bit || params.widens_out == 0) {
        T* const to = reinterpret_cast<T*>(staging + row * Shape::kQueryPitch) + first_column;
        for_columns<Shape::kIsFp8>(state.output[tile], half, [&](int32_t column, const auto& columns) {
          writer.store(to + column, scaled(columns, result.factor));
        });
      } else if (writer.writes(first_row + row)) {
        float* const to = writer.wide_out(first_row + row) + first_column;
        for_columns<Shape::kIsFp8>(state.output[tile], half, [&](int32_t column, const auto& columns) {
          if (first_column + column < params.value_dim) store_columns(to + column, scaled(columns, result.factor));
        });
      }
      if (t == 0 && first_column == 0) writer.write_lse(first_row + row, result.lse);
    }
  }
  if (params.widens_out != 0) return;
  __syncwarp();
  const Grid grid;
#pragma unroll 4
  for (int32_t row = grid.row; row < 16 * Shape::kRowTiles; row += Grid::kRowsPerStep) {
    if (!grid.has_chunk(0) || !writer.writes(first_row + row)) continue;
    const uint4* const from = reinterpret_cast<const uint4*>(staging + row * Shape::kQueryPitch);
    T* const to = writer.out(first_row + row);
#pragma unroll
    for (int step = 0; step < Grid::kStepsPerRow; ++step) {
      const int32_t c = first_column / kElements + grid.chunk + 32 * step;
      if (c * kElements < params.value_dim) *reinterpret_cast<uint4*>(to + c * kElements) = from[c];
    }
  }
}

/// Sets the `num_heads` heads of row `token` of `out` to 0. kThreads threads call this; this one is thread `thread`.
template <typename T, int kThreads>
__device__ __forceinline__ void clear_out_row(const AttentionParams& params, int32_t num_heads, int32_t token,
                                              int32_t thread) {
  const int32_t bytes = params.widens_out != 0 ? sizeof(float) : sizeof(T);  // of an element
  const int32_t chunks = params.value_dim * bytes / 16;
  auto* const row = static_cast<uint8_t*>(params.out) + token * params.out_token_stride * bytes;
#pragma unroll 1
  for (int32_t item = thread; item < num_heads * chunks; item += kThreads) {
    const int32_t head = item / chunks;
    uint8_t* const to = row + head * params.out_head_stride * bytes + (item - head * chunks) * 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}

/// The rows [begin, end) from the first sequence's start to the last one's end. All of them are live unless seqused_q
/// leaves rows out.
struct LiveRows {
  int32_t begin;
  int32_t end;
};
/// A warp calls this.
__device__ __forceinline__ LiveRows live_rows(const AttentionParams& params, bool ascends) {
  const int32_t num_seqs = live_sequences(params);
  if (num_seqs == 0) return LiveRows{0, 0};
  LiveRows live = {start_of(params, 0), start_of(params, num_seqs)};
  if (__builtin_expect(!ascends, false)) {
    StartMaxima maxima = {live.end, 0};
    raise_maxima(params, 0, num_seqs, maxima);
    live.end = maxima.q;
  }
  return live;
}

/// Clears the rows before the first sequence and past the last one. Without seqused_q these are all padding rows. A CTA
/// clears one row at a time.
template <typename T, int kThreads>
__device__ __forceinline__ void clear_outer_padding_rows(const AttentionParams& params, int32_t num_heads,
                                                         const LiveRows& live, int32_t cta, int32_t num_ctas) {
  const int32_t begin = live.begin, end = live.end;
  const int32_t num_padding = params.num_tokens - (end - begin);
  for (int64_t i = cta; i < num_padding; i += num_ctas) {
    const int32_t token = static_cast<int32_t>(i) + (i < begin ? 0 : end - begin);
    clear_out_row<T, kThreads>(params, num_heads, token, threadIdx.x);
    if (params.lse == nullptr) continue;
#pragma unroll 1
    for (int32_t head = threadIdx.x; head < num_heads; head += kThreads) {
      params.lse[static_cast<int64_t>(head) * params.num_tokens + token] = -INFINITY;
    }
  }
}

/// Clears padding rows anywhere. Each lane looks up the sequence of one row; the warp clears those rows that have none.
template <typename T, int kThreads>
__device__ __forceinline__ void clear_all_padding_rows(const AttentionParams& params, int32_t num_heads, bool ascends,
                                                       int32_t cta, int32_t num_ctas) {
  SequenceSearch search(params, ascends);
  constexpr int kWarps = kThreads / 32;
  const int32_t thread = ptx::opaque(threadIdx.x);  // computed again here, to free its register in the main loop
  const int32_t warp = thread / 32, lane = thread % 32;
  const int64_t step = 32 * static_cast<int64_t>(num_ctas) * kWarps;
  for (int64_t first = 32 * (static_cast<int64_t>(cta) * kWarps + warp); first < params.num_tokens; first += step) {
    const int32_t token = static_cast<int32_t>(min(first + lane, static_cast<int64_t>(params.num_tokens) - 1));
    const bool is_padding = !search.finds_sequence(token) && first + lane < params.num_tokens;
    for (uint32_t left = __ballot_sync(~0u, is_padding); left != 0; left &= left - 1) {
      clear_out_row<T, 32>(params, num_heads, static_cast<int32_t>(first) + __ffs(left) - 1, lane);
    }
    if (!is_padding || params.lse == nullptr) continue;
#pragma unroll 1
    for (int32_t head = 0; head < num_heads; ++head) {
      params.lse[static_cast<int64_t>(head) * params.num_tokens + token] = -INFINITY;
    }
  }
}

/// Sets out to 0 and lse to -inf in this CTA's part of the padding rows of `num_heads` query heads. This is CTA `cta`
/// of `num_ctas`.
template <typename T, int kThreads>
__device__ __forceinline__ void clear_padding_rows(const AttentionParams& params, int32_t num_heads, bool ascends,
                                                   const LiveRows& live, int32_t cta, int32_t num_ctas) {
  if (params.seqused_q == nullptr) {
    clear_outer_padding_rows<T, kThreads>(params, num_heads, live, cta, num_ctas);
  } else {
    clear_all_padding_rows<T, kThreads>(params, num_heads, ascends, cta, num_ctas);
  }
}
/// The same for all query heads of a call without padding heads.
template <typename T, int kThreads>
__device__ __forceinline__ void clear_padding_rows(const AttentionParams& params, bool ascends, const LiveRows& live,
                                                   int32_t cta, int32_t num_ctas) {
  clear_padding_rows<T, kThreads>(params, params.num_kv_heads * params.group, ascends, live, cta, num_ctas);
}

}  // namespace xa
