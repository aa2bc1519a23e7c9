// dQ of attention: a CTA holds some packed rows of Q and dO of one KV head and streams the keys that they see past. It
// also leaves delta, the sum that the gradients of a row's scores are relative to, for the kernels after it.
// docs/kernels.md explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32
//   XA_HEAD_DIM  the bucket: D and Dv up to it run, padded with zeros in shared memory
//   XA_SHAPE     large, small (include/bwd/shape.cuh)
//   XA_LOGITS    none, softcap_alibi (include/bwd/probabilities.cuh)
// Launch: kThreads threads, ceil(Tq * group / kHeld) * Hkv CTAs, Shape::kSharedBytes of dynamic shared memory.

#include "bwd/probabilities.cuh"
#include "bwd/products.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/rows.cuh"
#include "bwd/sequence_segment.cuh"
#include "bwd/shape.cuh"
#include "bwd/stream.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"

namespace xa {

template <typename Shape, typename T, typename Weights>
class QueryGradients {
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  static constexpr int kTiles = Shape::kRowTiles, kBlocks = Shape::kChunk / 8, kColumnTiles = Shape::kColumns / 8;
  static constexpr int kSteps = Shape::kRowBytes / 32;
  using Scores = float[kTiles][kBlocks][4];

 public:
  __device__ __forceinline__ QueryGradients(const BackwardParams& params, uint8_t* shared)
      : params_(params),
        shared_(shared),
        pass_(*reinterpret_cast<Pass*>(shared + Shape::kPassOffset)),
        base_(ptx::shared_address(shared)) {}

  __device__ __forceinline__ void run() {
    const AttentionParams& forward = params_.forward;
    {
      // Under a causal mask the last rows have most to do.
      const int32_t index = gridDim.x - 1 - blockIdx.x, tile = index / forward.num_kv_heads;
      if (threadIdx.x == 0) {
        pass_.kv_head = index - tile * forward.num_kv_heads;
        pass_.first = tile * Shape::kHeld;
        pass_.clears = 1;
        pass_.maxima = kStartsAscend;
      }
    }
    __syncthreads();
    fetch_queries<T, Shape, Shape::kHeld>(params_, held(), count(), base_, base_ + Shape::kHeldBytes);
    describe_rows();
    for_passes<Shape::kThreads, HeldQueries<Shape::kHeld>>(
        forward, pass_, [&] { return count(); },
        [&] {
          clear(dq_);
          stream();
          write();
        },
        [&] { clear_rows<T, Shape::kThreads>(count(), params_.forward.head_dim, row_at()); });
  }

 private:
  static __device__ __forceinline__ int32_t row_warp(int32_t thread = threadIdx.x) {
    return thread / 32 / Shape::kColumnWarps;
  }
  static __device__ __forceinline__ int32_t column_warp(int32_t thread = threadIdx.x) {
    return thread / 32 % Shape::kColumnWarps;
  }

  __device__ __forceinline__ QueryRow* query_rows() const {
    return reinterpret_cast<QueryRow*>(shared_ + Shape::kQueryRowsOffset);
  }
  /// The rows held, and how many of them there are.
  __device__ __forceinline__ QueryBlock held() const {
    return QueryBlock(params_.forward, 0, pass_.first, pass_.kv_head);
  }
  __device__ __forceinline__ int32_t count() const {
    return min(params_.forward.num_tokens * params_.forward.group - pass_.first, Shape::kHeld);
  }
  /// Where they begin in dq `[Tq, Hq, D]`. Unsigned numbers need no register to be widened.
  __device__ __forceinline__ auto row_at() const {
    const QueryBlock block = held();
    const uint32_t dim = params_.forward.head_dim, num_heads = params_.forward.num_kv_heads * params_.forward.group;
    T* const dq = static_cast<T*>(params_.dq);
    return [=](int32_t row) {
      const uint32_t token = block.token(row), head = block.head(row);
      return dq + (static_cast<uint64_t>(token) * num_heads + head) * dim;
    };
  }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return base_ + Shape::kStreamOffset + 2 * stage * Shape::kBlockBytes;
  }

  /// What is known of the rows held, whoever's they are; delta goes to the workspace too.
  __device__ __forceinline__ void describe_rows() const {
    const QueryBlock block = held();
    constexpr int kLanes = 8, kAtOnce = Shape::kThreads / kLanes;
#pragma unroll 4
    for (int32_t row = threadIdx.x / kLanes; row < Shape::kHeld; row += kAtOnce) {
      const int32_t from = min(row, count() - 1), token = block.token(from), head = block.head(from);
      const float delta = delta_of<T, kLanes>(params_, token, head);
      if (threadIdx.x % kLanes != 0) continue;
      const int64_t index = static_cast<int64_t>(head) * params_.forward.num_tokens + token;
      query_rows()[row] = {negative_lse(__ldg(params_.forward.lse + index)), delta, 0.0f, kNowhere};
      if (params_.delta != nullptr && row < count()) params_.delta[index] = delta;
    }
  }

  /// The keys of a pass, from `first` on.
  __device__ __forceinline__ void fetch(int32_t first, int stage) const {
    fetch_keys<T, Shape, Shape::kBlock>(params_, pass_.tile.start_k + first, pass_.columns.end - first, pass_.kv_head,
                                        keys(stage), keys(stage) + Shape::kBlockBytes);
    ptx::cp_async_commit();
  }

  /// One pass.
  __device__ __forceinline__ void stream() {
    // What follows from it is worth its registers in the loop below, not around it.
    base_ = ptx::opaque(base_);
    stream_blocks<Shape>(
        pass_, [&](int32_t first, int stage) { fetch(first, stage); },
        [&] {
          for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
            QueryRow& to = query_rows()[row];
            to.position = HeldQueries<Shape::kHeld>::position(params_.forward, pass_, row);
            if (to.position == kNowhere) continue;
            to.negative_slope = negative_slope(params_.forward, pass_.tile.sequence, held().head(row));
          }
        },
        [](int32_t, int) { ptx::cp_async_wait<0>(); },
        [&](int32_t first, int32_t chunk, int stage) { take_up(first, chunk, stage); });
  }

  /// Takes up a chunk of the block that begins at key `first`.
  __device__ __forceinline__ void take_up(int32_t first, int32_t chunk, int stage) {
    const int32_t warp_row = row_warp() * Shape::kWarpRows;
    const int32_t mine = chunk + (Shape::kExchanges ? column_warp() * Shape::kChunk : 0);
    const uint32_t rows = base_ + warp_row * Rows::kPitch, douts = rows + Shape::kHeldBytes;
    const uint32_t of_keys = keys(stage) + mine * Rows::kPitch, values = of_keys + Shape::kBlockBytes;
    Scores p, ds;
    multiply_rows<T, Rows, kSteps>(p, rows, of_keys);
    multiply_rows<T, Rows, kSteps>(ds, douts, values);
    const int32_t column = first + mine;
    const QueryRow* const known = query_rows() + warp_row;
    weigh<T, false, Weights>(p, ds, params_.forward, known, column);
    if (column < pass_.common.begin || column + Shape::kChunk > pass_.common.end) {
      // What rows see is derived again here, which is seldom, not kept.
      const auto span_of = [&](int32_t row) {
        const Visibility visibility(params_.forward, pass_.tile);
        const int32_t position = known[row].position, query = position - visibility.shift;
        const Span seen = {visibility.begin(query), visibility.end(query)};
        return position != kNowhere && seen.begin < seen.end ? seen : Span{0, 0};
      };
      hide(p, ds, span_of, column);
    }
    const int32_t first_chunk = 2 * column_warp();
    if constexpr (Shape::kExchanges) {
      uint8_t* const to = shared_ + Shape::kExchangeOffset + warp_row * Shape::kExchangePitch;
      hand_over<T, Shape::kExchangePitch>(to + mine * sizeof(T), ds);
      __syncthreads();
      const uint32_t from = ptx::shared_address(to);
      using Shared = SharedWeights<Shape::kBlock, Shape::kExchangePitch>;
      accumulate<T, Columns>(dq_, Shared(from), keys(stage), first_chunk);
    } else {
      accumulate<T, Columns>(dq_, OwnWeights<T, kTiles, kBlocks>{ds}, of_keys, first_chunk);
    }
  }

  /// The warp's share of the pass's rows.
  __device__ __forceinline__ void write() const {
    const int32_t begin = pass_.tile.first_row, thread = ptx::thread();
    write_rows<T, Shape::kColumnWarps>(dq_, params_.softmax_scale, row_warp(thread) * Shape::kWarpRows, begin,
                                       begin + pass_.tile.num_rows, column_warp(thread), params_.forward.head_dim,
                                       row_at());
  }

  const BackwardParams& params_;
  uint8_t* const shared_;
  Pass& pass_;
  uint32_t base_;
  float dq_[kTiles][kColumnTiles][4];
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Weights = xa::XA_PASTE(bwd_logits_, XA_LOGITS);
using Shape = xa::BackwardShape<xa::tiles::gradient_dq, xa::tiles::XA_PASTE(shape_, XA_SHAPE), T, XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::BackwardParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::QueryGradients<Shape, T, Weights>(params, shared).run();
}
