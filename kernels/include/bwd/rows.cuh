// Loads of Q, dO, K and V to shared memory, the row statistics delta and lse, and stores of the gradients.
#pragma once

#include <cmath>
#include <cstdint>

#include "bwd/gradient_type.cuh"
#include "bwd/key_order.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/sequence_segment.cuh"
#include "chunk.cuh"
#include "element.cuh"
#include "log2_units.cuh"
#include "params/attention_bwd.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// Assigns chunks of 16 bytes of rows of kHeadDim elements to kThreads threads: in step i a thread has chunks `chunk`,
/// `chunk + kLanes`, ... of row `row + i * kStep`. Constructed again at each use, which costs a few instructions and
/// saves registers.
template <typename T, int kHeadDim, int kThreads>
struct ThreadGrid {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kChunks = kHeadDim / kElements;
  /// Threads that share a row: a power of two.
  static constexpr int kLanes = kChunks & -kChunks;
  static constexpr int kStep = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0);

  int32_t row;
  int32_t chunk;

  __device__ __forceinline__ ThreadGrid() {
    const int32_t thread = ptx::thread();
    row = thread / kLanes;
    chunk = thread % kLanes;
  }
};

/// Consecutive packed query rows of one KV head: row 0 is head `rows.first_head` of the group at token `first_token +
/// rows.first_query`.
struct QueryBlock {
  PackedRows rows;
  int32_t first_token;
  int32_t head_base;  // query head 0 of the group

  __device__ __forceinline__ QueryBlock(const AttentionParams& params, int32_t first_token, int32_t first_row,
                                        int32_t kv_head)
      : rows(params, first_row), first_token(first_token), head_base(kv_head * params.group) {}

  /// The same without a division for groups of one head. It is some 30 instructions that wait for each other, and these
  /// groups are frequent where there is a bias.
  static __device__ __forceinline__ QueryBlock dividing_if_grouped(const AttentionParams& params, int32_t first_token,
                                                                   int32_t first_row, int32_t kv_head) {
    QueryBlock block(params, first_token, 0, kv_head);
    block.rows.first_query = params.group == 1 ? first_row : first_row / params.group;
    block.rows.first_head = first_row - block.rows.first_query * params.group;
    return block;
  }

  __device__ __forceinline__ int32_t token(int32_t row) const { return first_token + rows.query(row); }
  __device__ __forceinline__ int32_t head(int32_t row) const { return head_base + rows.head(row); }
};

/// The row of a token and query head in q.
template <typename T>
__device__ __forceinline__ const T* q_row_of(const BackwardParams& params, int64_t token, int64_t head) {
  const AttentionParams& forward = params.forward;
  return static_cast<const T*>(forward.q) + token * forward.q_token_stride + head * forward.q_head_stride;
}
/// The same in dO.
template <typename T>
__device__ __forceinline__ const T* dout_row_of(const BackwardParams& params, int64_t token, int64_t head) {
  return static_cast<const T*>(params.dout) + token * params.dout_token_stride + head * params.dout_head_stride;
}

/// Copies the thread's chunks of a row of `dim` elements to shared memory at `to`; chunks past `dim` become zeros.
template <typename Grid, typename Rows, typename T>
__device__ __forceinline__ void fetch_row(uint32_t to, int32_t row, const T* from, int32_t dim) {
  const Grid grid;
#pragma unroll
  for (int part = 0; part < Grid::kChunks; part += Grid::kLanes) {
    const int32_t chunk = part + grid.chunk, element = chunk * Grid::kElements;
    const bool exists = element < dim;
    ptx::cp_async_16(to + Rows::offset(row, chunk), from + (exists ? element : 0), exists);
  }
}

/// Copies `kRows` rows of Q and of dO to shared addresses `queries` and `douts`. Rows from `count` on, and columns from
/// D or Dv on, become zeros.
template <typename T, typename Shape, int kRows>
__device__ __forceinline__ void fetch_queries(const BackwardParams& params, const QueryBlock& block, int32_t count,
                                              uint32_t queries, uint32_t douts) {
  using Grid = ThreadGrid<T, Shape::kHeadDim, Shape::kThreads>;
  const Grid grid;
  const T* const q = static_cast<const T*>(params.forward.q);
  const T* const dout = static_cast<const T*>(params.dout);
#pragma unroll
  for (int32_t i = 0; i < kRows; i += Grid::kStep) {
    const int32_t row = i + grid.row;
    if (kRows % Grid::kStep != 0 && row >= kRows) break;
    const bool exists = row < count;
    const int32_t from = exists ? row : 0;
    const int32_t query = block.rows.query(from);
    const int64_t token = block.first_token + query;
    const int64_t head =
        block.head_base + block.rows.first_head + from - (query - block.rows.first_query) * block.rows.group;
    const T* const q_row = q + token * params.forward.q_token_stride + head * params.forward.q_head_stride;
    const T* const dout_row = dout + token * params.dout_token_stride + head * params.dout_head_stride;
    fetch_row<Grid, typename Shape::Rows>(queries, row, q_row, exists ? params.forward.head_dim : 0);
    fetch_row<Grid, typename Shape::Rows>(douts, row, dout_row, exists ? params.forward.value_dim : 0);
  }
}

/// As `fetch_queries`, where a warp copies 256 columns of a row at a time: each lane finds the places of one of its
/// rows.
template <typename T, typename Shape, int kRows>
__device__ __forceinline__ void fetch_queries_by_warps(const BackwardParams& params, const QueryBlock& block,
                                                       int32_t count, uint32_t queries, uint32_t douts) {
  constexpr int kColumns = 256;
  using Grid = ThreadGrid<T, kColumns, Shape::kThreads>;
  constexpr int kStep = Grid::kStep, kAtOnce = kRows < 4 * kStep ? kRows / kStep : 4;
  static_assert(Grid::kLanes == 32 && Grid::kChunks == 32 && kRows % (kAtOnce * kStep) == 0 && kRows <= 32 * kStep);
  static_assert(Shape::kHeadDim % kColumns == 0);
  const Grid grid;
  const int32_t own = grid.chunk * kStep + grid.row, from = own < min(count, kRows) ? own : 0;
  const int64_t token = block.token(from), head = block.head(from);
  const auto own_q = reinterpret_cast<uint64_t>(q_row_of<T>(params, token, head));
  const auto own_dout = reinterpret_cast<uint64_t>(dout_row_of<T>(params, token, head));
  const uint32_t to = Shape::Rows::offset(grid.row, grid.chunk);
#pragma unroll
  for (int first = 0; first < kRows / kStep; first += kAtOnce) {
    // Some places first: the copies wait for them once then.
    const T *q[kAtOnce], *dout[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      q[i] = reinterpret_cast<const T*>(__shfl_sync(~0u, own_q, first + i));
      dout[i] = reinterpret_cast<const T*>(__shfl_sync(~0u, own_dout, first + i));
    }
#pragma unroll
    for (int column = 0; column < Shape::kHeadDim; column += kColumns) {
      const int32_t element = column + grid.chunk * Grid::kElements;
      const bool in_q = element < params.forward.head_dim, in_dout = element < params.forward.value_dim;
      const int32_t q_element = in_q ? element : 0, dout_element = in_dout ? element : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t row = (first + i) * kStep;
        const bool exists = row + grid.row < count;
        const uint32_t to_row = Shape::Rows::moved(Shape::Rows::stepped(to, row), 0, column / Grid::kElements);
        ptx::cp_async_16(queries + to_row, q[i] + q_element, exists && in_q);
        ptx::cp_async_16(douts + to_row, dout[i] + dout_element, exists && in_dout);
      }
    }
  }
}

/// As `fetch_queries`, for rows at `places`.
template <typename T, typename Shape, int kRows>
__device__ __forceinline__ void fetch_placed_queries(const BackwardParams& params, const typename Shape::Place* places,
                                                     int32_t count, uint32_t queries, uint32_t douts) {
  using Grid = ThreadGrid<T, Shape::kHeadDim, Shape::kThreads>;
  const Grid grid;
  static_assert(kRows % Grid::kStep == 0 && Grid::kStep % 8 == 0 && Grid::kChunks == Grid::kLanes);
  const int32_t element = grid.chunk * Grid::kElements;
  const bool in_q = element < params.forward.head_dim, in_dout = element < params.forward.value_dim;
  const int32_t q_element = in_q ? element : 0, dout_element = in_dout ? element : 0;
  const uint32_t to = Shape::Rows::offset(grid.row, grid.chunk);
  // All places first: the copies wait for them once then.
  constexpr int kCopies = kRows / Grid::kStep;
  const void *q[kCopies], *dout[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const auto& place = places[i * Grid::kStep + grid.row];
    q[i] = place.q;
    dout[i] = place.dout;
  }
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const bool exists = i * Grid::kStep + grid.row < count;
    const uint32_t to_row = Shape::Rows::moved(to, i * Grid::kStep, 0);
    ptx::cp_async_16(queries + to_row, static_cast<const T*>(q[i]) + q_element, exists && in_q);
    ptx::cp_async_16(douts + to_row, static_cast<const T*>(dout[i]) + dout_element, exists && in_dout);
  }
}

/// For `fetch_keys`: queries attend to all keys.
struct AllAttended {
  __device__ __forceinline__ bool operator()(int32_t) const { return true; }
};

/// As `fetch_queries`, for `kRows` rows of K and V from row `first` of these tensors on, which get the order `Keys`.
/// Rows for which `attended(row)` is false become zeros too.
template <typename T, typename Shape, int kRows, typename Keys = KeysInOrder, typename Attended = AllAttended>
__device__ __forceinline__ void fetch_keys(const BackwardParams& params, int32_t first, int32_t count, int32_t kv_head,
                                           uint32_t keys, uint32_t values, const Attended& attended = {}) {
  using Grid = ThreadGrid<T, Shape::kHeadDim, Shape::kThreads>;
  const Grid grid;
  const KvSource &k_source = params.forward.k, &v_source = params.forward.v;
  const T* const k = static_cast<const T*>(k_source.base) + kv_head * k_source.head_stride;
  const T* const v = static_cast<const T*>(v_source.base) + kv_head * v_source.head_stride;
#pragma unroll
  for (int32_t i = 0; i < kRows; i += Grid::kStep) {
    const int32_t row = i + grid.row;
    if (kRows % Grid::kStep != 0 && row >= kRows) break;
    const int32_t key = Keys::of_row(row);
    const bool exists = key < count && attended(key);
    const int64_t from = first + (exists ? key : 0);
    fetch_row<Grid, typename Shape::Rows>(keys, row, k + from * k_source.token_stride,
                                          exists ? params.forward.head_dim : 0);
    fetch_row<Grid, typename Shape::Rows>(values, row, v + from * v_source.token_stride,
                                          exists ? params.forward.value_dim : 0);
  }
}

/// delta = sum_c out_c dout_c - dlse of one query row (FlashAttention's dPsum), computed by kLanes adjacent lanes, each
/// of which gets the result.
template <typename T, int kLanes>
__device__ __forceinline__ float delta_of(const BackwardParams& params, int32_t token, int32_t head) {
  constexpr int kElements = 16 / sizeof(T);
  const AttentionParams& forward = params.forward;
  const T* const out =
      static_cast<const T*>(forward.out) + token * forward.out_token_stride + head * forward.out_head_stride;
  const T* const dout = dout_row_of<T>(params, token, head);
  float sum = 0.0f;
#pragma unroll 1
  for (int32_t first = threadIdx.x % kLanes * kElements; first < forward.value_dim; first += kLanes * kElements) {
    const auto a = load_chunk<T, kElements>(out + first), b = load_chunk<T, kElements>(dout + first);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sum = __fmaf_rn(Element<T>::to_f32(a.elements[i]), Element<T>::to_f32(b.elements[i]), sum);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (params.dlse != nullptr) sum -= __ldg(params.dlse + static_cast<int64_t>(head) * forward.num_tokens + token);
  return sum;
}
/// Delta of a row as a kernel before has stored it, or computed by this lane.
template <typename T>
__device__ __forceinline__ float stored_delta_of(const BackwardParams& params, int32_t token, int32_t head) {
  if (params.delta == nullptr) return delta_of<T, 1>(params, token, head);
  return __ldg(params.delta + static_cast<int64_t>(head) * params.forward.num_tokens + token);
}

/// -lse in base 2. A row that attends to no key has an lse of -inf and gets -inf too, so that its probabilities are 0.
__device__ __forceinline__ float negative_lse(float lse) { return lse == -INFINITY ? -INFINITY : -kLog2E * lse; }

/// Minus the ALiBi slope of a head, in base 2; 0 without ALiBi.
__device__ __forceinline__ float negative_slope(const AttentionParams& params, int32_t sequence, int32_t head) {
  if (params.alibi_slopes == nullptr) return 0.0f;
  return -kLog2E * __ldg(params.alibi_slopes + sequence * params.alibi_stride + head);
}

/// Stores the rows of [begin, end) among a warp's kTiles x 16 rows from `first_row` on, times `factor`. The warp has
/// the columns that ColumnGroups<T> (shape.cuh) gives warp `column_warp`; those from `dim` on do not exist.
/// `row_at(row)` is the address of a row, whose elements are T or f32. Rows have the order `Order`.
template <typename T, int kColumnWarps, typename Order = KeysInOrder, int kTiles, int kColumnTiles, typename RowAt>
__device__ __forceinline__ void write_rows(const float (&x)[kTiles][kColumnTiles][4], float factor, int32_t first_row,
                                           int32_t begin, int32_t end, int32_t column_warp, int32_t dim,
                                           const RowAt& row_at) {
  constexpr int kGroup = 32 / sizeof(T);
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4, first_column = column_warp * kGroup;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = Order::of_row(first_row + 16 * tile + 8 * half + g);
      if (row < begin || row >= end) continue;
      auto* const to = row_at(row) + first_column + 2 * t;
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const float (&c)[4] = x[tile][i];
        const int column = 8 * i / kGroup * kGroup * kColumnWarps + 8 * i % kGroup;
        if (first_column + column >= dim) break;
        const float2 pair = make_float2(c[2 * half] * factor, c[2 * half + 1] * factor);
        if constexpr (sizeof(*to) > sizeof(T)) {
          ptx::store_global_8(to + column, pair);
        } else {
          store_columns(to + column, pair);
        }
      }
    }
  }
}

/// Stores zeros to rows 0 to `count` - 1 of a gradient, each of `bytes` from byte `row_at(row)` on.
template <int kThreads, typename RowAt>
__device__ __forceinline__ void clear_rows(int32_t count, int32_t bytes, const RowAt& row_at) {
  const int32_t chunks = bytes / 16;
#pragma unroll 1
  for (int32_t item = ptx::thread(); item < count * chunks; item += kThreads) {
    const int32_t row = item / chunks;
    *reinterpret_cast<uint4*>(row_at(row) + (item - row * chunks) * 16) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace xa
