// dK and dV of attention: a CTA holds some rows of K and V of one KV head and streams the query rows that see them
// past. No sum is another CTA's too, so that two runs give the same bits. docs/kernels.md explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32
//   XA_HEAD_DIM  the bucket: D and Dv up to it run, padded with zeros in shared memory
//   XA_SHAPE     large, small (include/bwd/shape.cuh)
//   XA_LOGITS    none, softcap_alibi (include/bwd/probabilities.cuh)
// Launch: kThreads threads, ceil(Tk / kHeld) * Hkv CTAs, Shape::kSharedBytes of dynamic shared memory.

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
class KeyGradients {
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  static constexpr int kTiles = Shape::kRowTiles, kBlocks = Shape::kChunk / 8, kColumnTiles = Shape::kColumns / 8;
  static constexpr int kSteps = Shape::kRowBytes / 32;
  using Scores = float[kTiles][kBlocks][4];

 public:
  __device__ __forceinline__ KeyGradients(const BackwardParams& params, uint8_t* shared)
      : params_(params),
        shared_(shared),
        pass_(*reinterpret_cast<Pass*>(shared + Shape::kPassOffset)),
        base_(ptx::shared_address(shared)) {}

  __device__ __forceinline__ void run() {
    const AttentionParams& forward = params_.forward;
    {
      const int32_t tile = blockIdx.x / forward.num_kv_heads, kv_head = blockIdx.x - tile * forward.num_kv_heads;
      const int32_t first = tile * Shape::kHeld;
      if (threadIdx.x == 0) {
        pass_.kv_head = kv_head;
        pass_.first = first;
        pass_.clears = 1;
        pass_.maxima = kStartsAscend;
      }
      fetch_keys<T, Shape, Shape::kHeld>(params_, first, forward.capacity - first, kv_head, base_,
                                         base_ + Shape::kHeldBytes);
    }
    __syncthreads();
    const auto clear_held = [&] {
      clear_rows<T, Shape::kThreads>(count(), params_.forward.head_dim, row_at(params_.dk, params_.forward.head_dim));
      clear_rows<T, Shape::kThreads>(count(), params_.forward.value_dim, row_at(params_.dv, params_.forward.value_dim));
    };
    for_passes<Shape::kThreads, HeldKeys<Shape::kHeld>>(
        forward, pass_, [&] { return count(); },
        [&] {
          clear(dk_);
          clear(dv_);
          stream();
          write(params_.dk, forward.head_dim, dk_, params_.softmax_scale);
          write(params_.dv, forward.value_dim, dv_, 1.0f);
        },
        clear_held);
  }

 private:
  static __device__ __forceinline__ int32_t row_warp(int32_t thread = threadIdx.x) {
    return thread / 32 / Shape::kColumnWarps;
  }
  static __device__ __forceinline__ int32_t column_warp(int32_t thread = threadIdx.x) {
    return thread / 32 % Shape::kColumnWarps;
  }

  __device__ __forceinline__ QueryRow* query_rows(int stage) const {
    return reinterpret_cast<QueryRow*>(shared_ + Shape::kQueryRowsOffset) + stage * Shape::kBlock;
  }
  __device__ __forceinline__ Span* spans() const { return reinterpret_cast<Span*>(shared_ + Shape::kSpansOffset); }
  /// How many rows of those held there are.
  __device__ __forceinline__ int32_t count() const { return min(params_.forward.capacity - pass_.first, Shape::kHeld); }
  /// Where rows held begin in a gradient `[Tk, Hkv, dim]`. Unsigned numbers need no register to be widened.
  __device__ __forceinline__ auto row_at(void* gradient, uint32_t dim) const {
    const uint32_t num_heads = params_.forward.num_kv_heads, head = pass_.kv_head, first = pass_.first;
    return [=](uint32_t row) {
      return static_cast<T*>(gradient) + (static_cast<uint64_t>(first + row) * num_heads + head) * dim;
    };
  }
  __device__ __forceinline__ uint32_t queries(int stage) const {
    return base_ + Shape::kStreamOffset + 2 * stage * Shape::kBlockBytes;
  }

  /// The query rows of a pass, from packed row `first` on, and what is known of them.
  __device__ __forceinline__ void fetch(int32_t first, int stage) const {
    const int32_t count = pass_.columns.end - first;
    const QueryBlock block(params_.forward, pass_.tile.first_token, first, pass_.kv_head);
    fetch_queries<T, Shape, Shape::kBlock>(params_, block, count, queries(stage), queries(stage) + Shape::kBlockBytes);
    const int32_t mine = ptx::thread();
    if (mine < Shape::kBlock && mine < count) {
      QueryRow& row = query_rows(stage)[mine];
      const int32_t head = block.head(mine);
      const int64_t index = static_cast<int64_t>(head) * params_.forward.num_tokens + block.token(mine);
      ptx::cp_async_4(ptx::shared_address(&row.negative_lse), params_.forward.lse + index);
      if (params_.delta != nullptr) {
        ptx::cp_async_4(ptx::shared_address(&row.delta), params_.delta + index);
      } else {
        row.delta = delta_of<T, 1>(params_, block.token(mine), head);
      }
      if constexpr (Weights::kModified) {
        row.negative_slope = negative_slope(params_.forward, pass_.tile.sequence, head);
        row.position = block.rows.query(mine) + Visibility(params_.forward, pass_.tile).shift;
      }
    }
    ptx::cp_async_commit();
  }

  /// Waits for what this thread has fetched, and prepares what is known of the query rows.
  __device__ __forceinline__ void settle(int32_t first, int stage) const {
    ptx::cp_async_wait<0>();
    const int32_t mine = ptx::thread();
    if (mine >= Shape::kBlock) return;
    QueryRow& row = query_rows(stage)[mine];
    if (mine < pass_.columns.end - first) {
      row.negative_lse = negative_lse(row.negative_lse);
    } else {
      row = {-INFINITY, 0.0f, 0.0f, 0};
    }
  }

  /// One pass.
  __device__ __forceinline__ void stream() {
    // What follows from it is worth its registers in the loop below, not around it.
    base_ = ptx::opaque(base_);
    stream_blocks<Shape>(
        pass_, [&](int32_t first, int stage) { fetch(first, stage); },
        [&] {
          for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
            spans()[row] = HeldKeys<Shape::kHeld>::span(params_.forward, pass_, row);
          }
        },
        [&](int32_t first, int stage) { settle(first, stage); },
        [&](int32_t first, int32_t chunk, int stage) { take_up(first, chunk, stage); });
  }

  /// Takes up a chunk of the block that begins at packed row `first`.
  __device__ __forceinline__ void take_up(int32_t first, int32_t chunk, int stage) {
    const int32_t warp_row = row_warp() * Shape::kWarpRows;
    const int32_t mine = chunk + (Shape::kExchanges ? column_warp() * Shape::kChunk : 0);
    const uint32_t keys = base_ + warp_row * Rows::kPitch, values = keys + Shape::kHeldBytes;
    const uint32_t rows = queries(stage) + mine * Rows::kPitch, douts = rows + Shape::kBlockBytes;
    Scores p, ds;
    multiply_rows<T, Rows, kSteps>(p, keys, rows);
    multiply_rows<T, Rows, kSteps>(ds, values, douts);
    const int32_t column = first + mine;
    weigh<T, true, Weights>(p, ds, params_.forward, query_rows(stage) + mine, pass_.first_key + warp_row);
    if (column < pass_.common.begin || column + Shape::kChunk > pass_.common.end) {
      hide(p, ds, [&](int32_t row) { return spans()[warp_row + row]; }, column);
    }
    const int32_t first_chunk = 2 * column_warp();
    if constexpr (Shape::kExchanges) {
      uint8_t* const to = shared_ + Shape::kExchangeOffset + warp_row * Shape::kExchangePitch;
      hand_over<T, Shape::kExchangePitch>(to + mine * sizeof(T), p);
      hand_over<T, Shape::kExchangePitch>(to + Shape::kExchangeMatrix + mine * sizeof(T), ds);
      __syncthreads();
      const uint32_t from = ptx::shared_address(to);
      using Shared = SharedWeights<Shape::kBlock, Shape::kExchangePitch>;
      accumulate<T, Columns>(dv_, Shared(from), queries(stage) + Shape::kBlockBytes, first_chunk);
      accumulate<T, Columns>(dk_, Shared(from + Shape::kExchangeMatrix), queries(stage), first_chunk);
    } else {
      accumulate<T, Columns>(dv_, OwnWeights<T, kTiles, kBlocks>{p}, douts, first_chunk);
      accumulate<T, Columns>(dk_, OwnWeights<T, kTiles, kBlocks>{ds}, rows, first_chunk);
    }
  }

  /// The warp's share of the pass's rows of a gradient.
  __device__ __forceinline__ void write(void* gradient, int32_t dim, const float (&x)[kTiles][kColumnTiles][4],
                                        float factor) const {
    const int32_t begin = pass_.tile.first_row, thread = ptx::thread();
    write_rows<T, Shape::kColumnWarps>(x, factor, row_warp(thread) * Shape::kWarpRows, begin,
                                       begin + pass_.tile.num_rows, column_warp(thread), dim, row_at(gradient, dim));
  }

  const BackwardParams& params_;
  uint8_t* const shared_;
  Pass& pass_;
  uint32_t base_;
  float dk_[kTiles][kColumnTiles][4];
  float dv_[kTiles][kColumnTiles][4];
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Weights = xa::XA_PASTE(bwd_logits_, XA_LOGITS);
using Shape = xa::BackwardShape<xa::tiles::gradient_dkdv, xa::tiles::XA_PASTE(shape_, XA_SHAPE), T, XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::BackwardParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::KeyGradients<Shape, T, Weights>(params, shared).run();
}
