// dK and dV of a block of few keys, as the last one of a sequence may be. On tensor cores a warp takes as long for one
// key as for 32, since it waits for its own results. Here all warps of the CTA divide the query rows instead, which
// they read from global memory, and compute by FMAs in f32, one key after the other.
#pragma once

#include <cmath>
#include <cstdint>

#include "bwd/row_blocks.cuh"
#include "bwd/row_sums.cuh"
#include "bwd/rows.cuh"
#include "bwd/score_gradients.cuh"
#include "bwd/sequence_segment.cuh"
#include "chunk.cuh"
#include "element.cuh"
#include "log2_units.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

/// Whether the segment's block has few keys. Chunks of dS are stored whole, unless it is the gradient of the bias,
/// whose rows begin anywhere (kReplacesBias), so the keys must begin with one.
template <typename Shape>
__device__ __forceinline__ bool has_few_keys(const BiasBackwardParams& params, const SequenceSegment& segment) {
  return block_rows() <= kFewRows && (Shape::kReplacesBias || first_column(params, segment) % 8 == 0);
}

template <typename Shape, typename T>
class FewKeyGradients {
  static constexpr int kWarp = 32, kElements = 8, kChunks = 2;
  /// A warp has 32 query rows at a time. A lane finds the places and the statistics of one. Then kLanes adjacent lanes
  /// share a row, which they have kPassRows of in each pass, and load those of kBatch passes before they compute.
  static constexpr int kLanes = Shape::kHeadDim / (kElements * kChunks), kPassRows = kWarp / kLanes, kBatch = 2;
  static_assert(kLanes % kBatch == 0);
  using Held = HeldKeys<Shape::kHeld>;
  using Chunks = uint4[kChunks];  // a Chunk of 16-bit elements takes more instructions to convert
  /// Chunks `lane_in_row()` and that plus kLanes of a row.
  struct Columns {
    float x[kChunks][kElements];
  };
  struct Pass {
    Chunks q[kBatch];
    Chunks dout[kBatch];
  };
  struct QueryRow {
    const T* q;
    const T* dout;
    float lse;
    float bias;
    float delta;
    int64_t ds;  // the first element of its row in dS, or kNoBias
  };

 public:
  using Sums = RowSums<Shape, kLanes, 2>;

  __device__ __forceinline__ FewKeyGradients(const BiasBackwardParams& params, const SequenceSegment& segment,
                                             uint8_t* memory)
      : all_params_(params), params_(params.backward), segment_(segment), sums_(memory) {}

  /// Stores dK, dV and dS of the segment. All threads of the CTA call it; `memory` has Sums::kBytes bytes.
  __device__ __forceinline__ void run() const {
    const int32_t begin = segment_.tile.first_row, end = begin + segment_.tile.num_rows;
#pragma unroll 1
    for (int32_t row = begin; row < end; ++row) {
      Columns dk = {}, dv = {};
      add_up(row, row == begin, dk, dv);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        sums_.put(0, column_of_chunk(i), dk.x[i]);
        sums_.put(1, column_of_chunk(i), dv.x[i]);
      }
      __syncthreads();
      const AttentionParams& forward = params_.forward;
      const int64_t place = static_cast<int64_t>(segment_.first + row) * forward.num_kv_heads + segment_.kv_head;
      sums_.template store<T>(params_, params_.dk, 0, place, forward.head_dim, params_.softmax_scale);
      sums_.template store<T>(params_, params_.dv, 1, place, forward.value_dim, 1.0f);
      __syncthreads();
    }
    ptx::cp_async_wait<0>();  // those of K and V, which the CTA has started before it knew the block
  }

 private:
  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % kWarp; }
  static __device__ __forceinline__ int32_t lane_in_row() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int32_t column_of_chunk(int i) { return (lane_in_row() + i * kLanes) * kElements; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / kWarp; }

  /// Loads the thread's chunks of a row of `dim` columns; none of no row.
  static __device__ __forceinline__ void load(Chunks& chunks, const T* row, int32_t dim) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int32_t column = column_of_chunk(i);
      chunks[i] = make_uint4(0, 0, 0, 0);
      if (row != nullptr && column < dim) chunks[i] = *reinterpret_cast<const uint4*>(row + column);
    }
  }
  static __device__ __forceinline__ Columns columns_of(const Chunks& chunks) {
    Columns columns;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t pairs[kElements / 2] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int j = 0; j < kElements; j += 2) {
        const float2 pair = unpack<T>(pairs[j / 2]);
        columns.x[i][j] = pair.x;
        columns.x[i][j + 1] = pair.y;
      }
    }
    return columns;
  }
  /// The thread's columns of the row of the block in K or V.
  __device__ __forceinline__ Columns held(const KvSource& source, int32_t row, int32_t dim) const {
    Chunks chunks;
    const int64_t token = segment_.first + row;
    load(chunks,
         static_cast<const T*>(source.base) + token * source.token_stride + segment_.kv_head * source.head_stride, dim);
    return columns_of(chunks);
  }
  /// Packed query row `row` of the sequence and its bias of a key. One that does not attend to it has a probability of
  /// 0.
  __device__ __forceinline__ QueryRow query_row(int32_t row, int32_t key, bool attends) const {
    const AttentionParams& forward = params_.forward;
    QueryRow found = {nullptr, nullptr, -INFINITY, 0.0f, 0.0f, kNoBias};
    if (row >= segment_.columns.end) return found;
    const QueryBlock block(forward, segment_.tile.first_token, row, segment_.kv_head);
    const int32_t sequence = segment_.tile.sequence, head = block.head(0), query = block.rows.query(0);
    const int64_t token = block.token(0), index = static_cast<int64_t>(head) * forward.num_tokens + token;
    const BiasSource& bias = all_params_.bias;
    if (key < bias.keys) {
      found.ds = score_gradient_row(all_params_, sequence, head, query, static_cast<int32_t>(token));
    }
    if (!attends) return found;
    found.q = q_row_of<T>(params_, token, head);
    found.dout = dout_row_of<T>(params_, token, head);
    const int64_t bias_of_row = bias_row(bias, bias_row_index(bias, sequence, head, query));
    found.bias = bias_at<typename Shape::Bias>(bias, bias_of_row, key);
    found.lse = __ldg(forward.lse + index);
    found.delta = stored_delta_of<T>(params_, static_cast<int32_t>(token), head);
    return found;
  }
  /// Which of the warp's rows the lane shares in a pass.
  static __device__ __forceinline__ int32_t row_of(int pass) { return pass * kPassRows + lane() / kLanes; }
  /// The same pointer of another lane.
  static __device__ __forceinline__ const T* of_lane(const T* pointer, int32_t of) {
    return reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(pointer), of));
  }
  /// Loads the rows of kBatch passes, of those that the lanes have found.
  __device__ __forceinline__ Pass pass_of(const T* q, const T* dout, int pass) const {
    Pass loaded;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t of = row_of(pass + i);
      load(loaded.q[i], of_lane(q, of), params_.forward.head_dim);
      load(loaded.dout[i], of_lane(dout, of), params_.forward.value_dim);
    }
    return loaded;
  }

  /// Adds up what the thread's query rows contribute to the gradients of row `row` of the block. With `is_first`, it
  /// stores the other columns of its chunk of dS too, as zeros, where chunks are stored whole.
  __device__ __forceinline__ void add_up(int32_t row, bool is_first, Columns& dk, Columns& dv) const {
    const AttentionParams& forward = params_.forward;
    const Columns k = held(forward.k, row, forward.head_dim), v = held(forward.v, row, forward.value_dim);
    const ColumnRange attending = Held::columns_of(forward, segment_, row);
    const int32_t column = first_column(all_params_, segment_) + row;
    const auto own_row = [&](int32_t first) {
      const int32_t index = first + lane();
      return query_row(index, segment_.first_key + row, index >= attending.begin && index < attending.end);
    };
    int32_t first = segment_.columns.begin + warp() * kWarp;
    QueryRow own = own_row(first);
    Pass loaded = pass_of(own.q, own.dout, 0);
#pragma unroll 1
    while (first < segment_.columns.end) {
      first += Shape::kThreads;
      const QueryRow next = own_row(first);
      const float own_offset = __fmaf_rn(kLog2E, own.bias, negative_lse(own.lse));
      float own_ds = 0.0f;
#pragma unroll 1
      for (int pass = 0; pass < kLanes; pass += kBatch) {
        const Pass current = loaded;
        const bool is_last = pass + kBatch == kLanes;
        loaded = pass_of(is_last ? next.q : own.q, is_last ? next.dout : own.dout, is_last ? 0 : pass + kBatch);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int32_t of = row_of(pass + i);
          const float offset = __shfl_sync(~0u, own_offset, of), delta = __shfl_sync(~0u, own.delta, of);
          const Columns q = columns_of(current.q[i]), dout = columns_of(current.dout[i]);
          const float p = ptx::exp2_approx(__fmaf_rn(dot(q, k), forward.softmax_scale_log2, offset));
          const float ds = p * (dot(dout, v) - delta);
          add(dv, p, dout);
          add(dk, ds, q);
          const float found = __shfl_sync(~0u, ds, lane() % kPassRows * kLanes);
          if (lane() / kPassRows == pass + i) own_ds = found;
        }
      }
      if (own.ds != kNoBias) store_ds(own.ds + column, is_first, own_ds);
      own = next;
    }
  }
  /// The product of a row that kLanes lanes share and another one, in each of them.
  static __device__ __forceinline__ float dot(const Columns& a, const Columns& b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) sum = __fmaf_rn(a.x[i][j], b.x[i][j], sum);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
  }
  static __device__ __forceinline__ void add(Columns& sum, float factor, const Columns& x) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) sum.x[i][j] = __fmaf_rn(factor, x.x[i][j], sum.x[i][j]);
    }
  }
  __device__ __forceinline__ void store_ds(int64_t element, bool is_first, float ds) const {
    if (all_params_.ds.data == nullptr) return;
    using Ds = typename Shape::Ds;
    Ds* const to = static_cast<Ds*>(all_params_.ds.data) + element;
    if constexpr (!Shape::kReplacesBias) {
      // Rows of dS begin with chunks.
      if (is_first) store_chunk(to - element % kElements, Chunk<T, kElements>{});
    }
    *to = rounded<Ds>(ds);
  }

  const BiasBackwardParams& all_params_;
  const BackwardParams& params_;
  const SequenceSegment& segment_;
  const Sums sums_;  // of dK and of dV
};

/// A function of its own, because ptxas otherwise allocates registers for the other blocks differently, which then take
/// up to 5 % longer.
template <typename Shape, typename T>
__device__ __noinline__ void compute_few_keys_with(const BiasBackwardParams& params, const SequenceSegment& segment,
                                                   uint8_t* memory) {
  FewKeyGradients<Shape, T>(params, segment, memory).run();
}

/// Stores dK, dV and dS of such a segment. All threads of the CTA call it. `params` is the kernel's parameter. It is
/// copied to shared memory, because PTX before 7.7 cannot pass the address of a parameter to a function.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_few_keys(const BiasBackwardParams& params, const SequenceSegment& segment,
                                                 uint8_t* memory) {
  using Words = uint64_t[sizeof(params) / sizeof(uint64_t)];
  static_assert(sizeof(Words) == sizeof(params));
  constexpr int kOffset = FewKeyGradients<Shape, T>::Sums::kBytes;
  static_assert(Shape::kStreamOffset + kOffset + sizeof(params) <= Shape::kExchangeOffset);
  auto& copy = *reinterpret_cast<BiasBackwardParams*>(memory + kOffset);
  for (uint32_t i = threadIdx.x; i < sizeof(Words) / sizeof(uint64_t); i += Shape::kThreads) {
    reinterpret_cast<Words&>(copy)[i] = reinterpret_cast<const Words&>(params)[i];
  }
  __syncthreads();
  compute_few_keys_with<Shape, T>(copy, segment, memory);
}

}  // namespace xa
