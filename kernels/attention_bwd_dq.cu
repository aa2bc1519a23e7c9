// dQ of attention. A CTA holds a block of packed query rows of Q and dO of one KV head and streams the K and V rows
// that they attend to. It also stores delta of its rows in the workspace, for the kernels that follow. The design is
// explained in docs/dev/kernels/portable_backward.md.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32
//   XA_HEAD_DIM  the bucket: D and Dv up to it run, padded with zeros in shared memory
//   XA_SHAPE     large, small; key_ranges, bias, bias_aligned, bias_large: for rows with bounds of their keys, with a
//                bias (include/bwd/shape.cuh)
//   XA_LOGITS    none, softcap_alibi (include/bwd/probabilities.cuh)
// Launch: kThreads threads, ceil(Tq * group / kHeld) * Hkv CTAs, Shape::kSharedBytes of dynamic shared memory.

#include "bwd/aligned_bias.cuh"
#include "bwd/bias_rows.cuh"
#include "bwd/dbias_rows.cuh"
#include "bwd/probabilities.cuh"
#include "bwd/products.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/row_bounds.cuh"
#include "bwd/rows.cuh"
#include "bwd/score_gradients.cuh"
#include "bwd/sequence_segment.cuh"
#include "bwd/shape.cuh"
#include "bwd/shape_params.cuh"
#include "bwd/staged_bias.cuh"
#include "bwd/stream.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"

namespace xa {

template <typename Shape, typename T, typename LogitsTransform>
class QueryGradients {
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  static constexpr int kTiles = Shape::kRowTiles, kBlocks = Shape::kChunk / 8, kColumnTiles = Shape::kColumns / 8;
  static constexpr int kSteps = Shape::kRowBytes / 32;
  using Scores = float[kTiles][kBlocks][4];
  using Bias = AlignedBias<T, kTiles>;

 public:
  __device__ __forceinline__ QueryGradients(const BackwardParamsOf<Shape>& params, uint8_t* shared)
      : all_params_(params),
        params_(backward_of(params)),
        shared_(shared),
        segment_(*reinterpret_cast<SequenceSegment*>(shared + Shape::kSegmentOffset)),
        base_(ptx::shared_address(shared)) {}

  __device__ __forceinline__ void run() {
    const AttentionParams& forward = params_.forward;
    {
      // The last rows come first: under a causal mask they attend to the most keys.
      const int32_t index = gridDim.x - 1 - blockIdx.x, tile = index / forward.num_kv_heads;
      if (threadIdx.x == 0) {
        segment_.kv_head = index - tile * forward.num_kv_heads;
        segment_.first = tile * Shape::kHeld;
        segment_.clears_padding = 1;
        segment_.maxima = kStartsAscend;
      }
    }
    __syncthreads();
    if (computes_some_sequence()) {
      fetch_queries<T, Shape, Shape::kHeld>(params_, held(), count(), base_, base_ + Shape::kHeldBytes);
      store_row_stats();
    }
    for_segments<Shape::kThreads, HeldQueries<Shape::kHeld>>(
        forward, segment_, [&] { return count(); },
        [&] {
          if (!computes(segment_.tile)) return;
          clear(dq_);
          stream();
          store_gradient();
        },
        [&] {
          const int32_t bytes = forward.head_dim * gradient_bytes<T>(params_);
          clear_rows<Shape::kThreads>(count(), bytes, row_at(static_cast<uint8_t*>(params_.dq), bytes));
        });
  }

 private:
  /// Whether this kernel computes dQ of a sequence, not attention_bwd_dq_from_ds.
  __device__ __forceinline__ bool computes(const QoTile& sequence) const {
    if constexpr (Shape::kHasBias) {
      return !has_all_score_gradients(all_params_, sequence);
    } else {
      return true;
    }
  }
  /// Whether it does of any of the batch. Starts that do not ascend may make sequences seem longer than they are.
  __device__ __forceinline__ bool computes_some_sequence() const {
    if constexpr (Shape::kHasBias) {
      if (all_params_.ds.data == nullptr) return true;
      bool any = false;
#pragma unroll 1
      for (int32_t index = ptx::thread(); index < live_sequences(params_.forward); index += Shape::kThreads) {
        Metadata<1> metadata;
        metadata.load(params_.forward, index);
        any |= computes(metadata.sequence(params_.forward, 0, index));
      }
      return __syncthreads_or(any) != 0;
    } else {
      return true;
    }
  }

  static __device__ __forceinline__ int32_t row_warp(int32_t thread = threadIdx.x) {
    return thread / 32 / Shape::kColumnWarps;
  }
  static __device__ __forceinline__ int32_t column_warp(int32_t thread = threadIdx.x) {
    return thread / 32 % Shape::kColumnWarps;
  }

  __device__ __forceinline__ QueryRowStats* row_stats() const {
    return reinterpret_cast<QueryRowStats*>(shared_ + Shape::kQueryRowsOffset);
  }
  __device__ __forceinline__ RowRange* row_ranges() const {
    return reinterpret_cast<RowRange*>(shared_ + Shape::kColumnRangesOffset);
  }
  /// The rows of the block in the bias.
  __device__ __forceinline__ BiasRowIndex* bias_rows() const {
    return reinterpret_cast<BiasRowIndex*>(shared_ + Shape::kBiasRowsOffset);
  }
  /// The bias of the rows of the block and the keys of a stage, of which `first` is the first one.
  __device__ __forceinline__ StagedBias<Shape, T> staged_bias(int32_t first, int stage) const {
    return {all_params_.bias, shared_ + Shape::kBiasOffset, stage, first};
  }
  /// The rows of the block, and how many of them exist.
  __device__ __forceinline__ QueryBlock held() const {
    return QueryBlock(params_.forward, 0, segment_.first, segment_.kv_head);
  }
  __device__ __forceinline__ int32_t count() const {
    return min(params_.forward.num_tokens * params_.forward.group - segment_.first, Shape::kHeld);
  }
  /// The address of a row in dq `[Tq, Hq, dim]`. Unsigned numbers are widened to 64 bits without a register for the
  /// sign.
  template <typename Gradient>
  __device__ __forceinline__ auto row_at(Gradient* dq, uint32_t dim) const {
    const QueryBlock block = held();
    const uint32_t num_heads = params_.forward.num_kv_heads * params_.forward.group;
    return [=](int32_t row) {
      const uint32_t token = block.token(row), head = block.head(row);
      return dq + (static_cast<uint64_t>(token) * num_heads + head) * dim;
    };
  }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return base_ + Shape::kStreamOffset + 2 * stage * Shape::kBlockBytes;
  }

  /// Computes the statistics of all rows of the block, padding rows included, but for what depends on the segment.
  /// Delta goes to the workspace too.
  __device__ __forceinline__ void store_row_stats() const {
    const QueryBlock block = held();
    constexpr int kLanes = 8, kAtOnce = Shape::kThreads / kLanes;
#pragma unroll 1
    for (int32_t row = threadIdx.x / kLanes; row < Shape::kHeld; row += kAtOnce) {
      const int32_t from = min(row, count() - 1), token = block.token(from), head = block.head(from);
      const float delta = delta_of<T, kLanes>(params_, token, head);
      if (threadIdx.x % kLanes != 0) continue;
      const int64_t index = static_cast<int64_t>(head) * params_.forward.num_tokens + token;
      row_stats()[row] = {negative_lse(__ldg(params_.forward.lse + index)), delta, 0.0f, kNoPosition};
      if (params_.delta != nullptr && row < count()) params_.delta[index] = delta;
    }
  }

  /// Starts the copies of a block of K and V, from key `first` of the sequence on.
  __device__ __forceinline__ void fetch(int32_t first, int stage) const {
    const int32_t row = segment_.tile.start_k + first, count = segment_.columns.end - first;
    if (Shape::kHasRanges && count <= 0) return;
    const uint32_t to = keys(stage);
    if constexpr (Shape::kHasRanges) {
      static_assert(Shape::kBlock <= 64, "RowRanges::attended_64");
      const uint64_t attended = RowRanges<Shape::kHeld>(row_ranges()).attended_64(first);
      fetch_keys<T, Shape, Shape::kBlock>(params_, row, count, segment_.kv_head, to, to + Shape::kBlockBytes,
                                          [=](int32_t key) { return (attended >> key & 1) != 0; });
    } else if constexpr (Shape::kHasBias) {
      // The first block may begin before the first key that some row attends to.
      const int32_t hidden = segment_.columns.begin - first;
      fetch_keys<T, Shape, Shape::kBlock, typename Shape::Keys>(params_, row, count, segment_.kv_head, to,
                                                                to + Shape::kBlockBytes,
                                                                [=](int32_t key) { return key >= hidden; });
    } else {
      fetch_keys<T, Shape, Shape::kBlock>(params_, row, count, segment_.kv_head, to, to + Shape::kBlockBytes);
    }
    if constexpr (Shape::kStagesBias) {
      const BiasRowIndex* const rows_of_bias = bias_rows();
      staged_bias(first, stage).fetch([=](int32_t index) { return rows_of_bias[index]; });
    }
    ptx::cp_async_commit();
  }

  /// The first key of the segment's first block. Stores the ranges of the rows of the segment, or their places in the
  /// bias. Blocks of a bias begin with a chunk of its rows, where these do.
  __device__ __forceinline__ int32_t first_block() const {
    if constexpr (Shape::kHasRanges) {
      const Visibility visibility(params_.forward, segment_.tile);
      for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
        const int32_t position = HeldQueries<Shape::kHeld>::position(params_.forward, segment_, row);
        row_ranges()[row] = position == kNoPosition
                                ? RowRange{0, 0}
                                : row_range(all_params_.ranges, visibility, segment_.tile, position - visibility.shift);
      }
      __syncthreads();
      return block_from(segment_.columns.begin);
    } else if constexpr (Shape::kHasBias) {
      for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
        bias_rows()[row] = kNoBiasRow;
        if (HeldQueries<Shape::kHeld>::position(params_.forward, segment_, row) == kNoPosition) continue;
        const int32_t query = held().token(row) - segment_.tile.first_token;
        bias_rows()[row] = bias_row_index(all_params_.bias, segment_.tile.sequence, held().head(row), query);
      }
      __syncthreads();
      return first_biased_key();
    } else {
      return segment_.columns.begin;
    }
  }
  /// The first key of the segment's first block with a bias.
  __device__ __forceinline__ int32_t first_biased_key() const { return segment_.columns.begin / 8 * 8; }
  /// Stores zeros to the gradient of the bias of the segment's rows and of the keys before and after its blocks, which
  /// begin at key `first`.
  __device__ __forceinline__ void clear_dbias_around(int32_t first) const {
    const int32_t keys = all_params_.bias.keys, begin = min(first, keys);
    const int32_t blocks = (segment_.columns.end - first + Shape::kBlock - 1) / Shape::kBlock;
    const int32_t end = min(first + blocks * Shape::kBlock, keys);
    if (begin == 0 && end == keys) return;
    with_bias_type<T>(all_params_.dbias_is_f32, [&](auto type) {
      using E = decltype(type);
#pragma unroll 1
      for (int32_t row = ptx::thread() / 32; row < Shape::kHeld; row += Shape::kWarps) {
        if (bias_rows()[row] == kNoBiasRow) continue;
        E* const to = dbias_row<E>(all_params_, bias_rows()[row]);
        clear_elements(to, begin);
        clear_elements(to + end, keys - end);
      }
    });
  }
  /// Starts to load the bias of the warp's rows and of the chunk that begins at key `first`.
  __device__ __forceinline__ void load_bias(int32_t first) {
    bias_.load(all_params_.bias, bias_rows() + row_warp() * Shape::kWarpRows, first);
  }
  /// The first block from `key` on that some row attends to.
  __device__ __forceinline__ int32_t block_from(int32_t key) const {
    if constexpr (Shape::kHasRanges) {
      return RowRanges<Shape::kHeld>(row_ranges()).template next_block<1>(key, segment_.columns.end);
    } else {
      return key;
    }
  }

  /// Adds up dQ over the keys of the segment.
  __device__ __forceinline__ void stream() {
    // Addresses derived from it are worth registers within the loop, but not across segments.
    base_ = ptx::opaque(base_);
    stream_blocks<Shape>(
        segment_, [&] { return first_block(); }, [&](int32_t first) { return block_from(first + Shape::kBlock); },
        [&](int32_t first, int stage) { fetch(first, stage); },
        [&] {
          for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
            QueryRowStats& to = row_stats()[row];
            to.position = HeldQueries<Shape::kHeld>::position(params_.forward, segment_, row);
            if (to.position == kNoPosition) continue;
            to.negative_slope = negative_slope(params_.forward, segment_.tile.sequence, held().head(row));
          }
          if constexpr (Shape::kHasBias) {
            const int32_t first = first_biased_key();
            if constexpr (Shape::kHasAlignedBias) {
              load_bias(first);
            } else {
              if (all_params_.dq_stores_dbias != 0) clear_dbias_around(first);
            }
          }
        },
        [](int32_t, int) { ptx::cp_async_wait<0>(); },
        [&](int32_t first, int32_t chunk, int stage) { process_chunk(first, chunk, stage); });
  }

  /// Adds keys `chunk` to `chunk + kAtOnce - 1` of the block that begins at key `first` to dQ.
  __device__ __forceinline__ void process_chunk(int32_t first, int32_t chunk, int stage) {
    const int32_t warp_row = row_warp() * Shape::kWarpRows;
    const int32_t own_chunk = chunk + (Shape::kExchanges ? column_warp() * Shape::kChunk : 0);
    const uint32_t rows = base_ + warp_row * Rows::kPitch, douts = rows + Shape::kHeldBytes;
    const uint32_t chunk_keys = keys(stage) + own_chunk * Rows::kPitch, chunk_values = chunk_keys + Shape::kBlockBytes;
    Scores p, ds;
    const int32_t column = first + own_chunk;
    const QueryRowStats* const stats = row_stats() + warp_row;
    if constexpr (Shape::kHasAlignedBias) {
      multiply_rows<T, Rows, kSteps>(ds, douts, chunk_values);
      bias_.start(p, params_.forward);
      multiply_rows<T, Rows, kSteps, true>(p, rows, chunk_keys);
      p_and_ds<T, false, LogitsTransform>(p, ds, params_.forward, stats, column);
      load_bias(column + Shape::kChunk);
    } else if constexpr (Shape::kStagesBias) {
      multiply_rows<T, Rows, kSteps>(p, rows, chunk_keys);
      multiply_rows<T, Rows, kSteps>(ds, douts, chunk_values);
      const StagedBias<Shape, T> block = staged_bias(first, stage);
      const StagedScoreBias<Shape, T> bias(block, bias_rows(), warp_row, own_chunk);
      p_and_ds<T, false, LogitsTransform>(p, ds, params_.forward, stats, column, bias);
    } else if constexpr (Shape::kHasBias) {
      const BiasRowIndex* const rows_of_bias = bias_rows() + warp_row;
      const auto bias = row_bias<T, false>(all_params_.bias, column, [=](int32_t row) { return rows_of_bias[row]; });
      bias.load(p, params_.forward);
      multiply_rows<T, Rows, kSteps>(ds, douts, chunk_values);
      bias.convert(p, params_.forward);
      multiply_rows<T, Rows, kSteps, true>(p, rows, chunk_keys);
      p_and_ds<T, false, LogitsTransform>(p, ds, params_.forward, stats, column, bias);
    } else {
      multiply_rows<T, Rows, kSteps>(p, rows, chunk_keys);
      multiply_rows<T, Rows, kSteps>(ds, douts, chunk_values);
      p_and_ds<T, false, LogitsTransform>(p, ds, params_.forward, stats, column);
    }
    if constexpr (Shape::kHasRanges) {
      const RowRange* const ranges = row_ranges() + warp_row;
      if (!all_hold<Shape::kWarpRows>(ranges, column, column + Shape::kChunk)) {
        mask(p, ds, [&](int32_t row) { return ColumnRange{ranges[row].begin, ranges[row].end}; }, column);
      }
    } else if (column < segment_.common.begin || column + Shape::kChunk > segment_.common.end) {
      // A row's visible keys are computed again here instead of being kept: few chunks need the mask.
      const auto columns_of = [&](int32_t row) {
        const Visibility visibility(params_.forward, segment_.tile);
        const int32_t position = stats[row].position, query = position - visibility.shift;
        const ColumnRange visible = {visibility.begin(query), visibility.end(query)};
        return position != kNoPosition && visible.begin < visible.end ? visible : ColumnRange{0, 0};
      };
      mask<typename Shape::Keys>(p, ds, columns_of, column);
    }
    if constexpr (Shape::kHasBias && !Shape::kHasAlignedBias) {
      // Without an exchange all warps of these rows have the same scores.
      const bool stores = all_params_.dq_stores_dbias != 0 && (Shape::kExchanges || column_warp() == 0);
      if (stores) store_dbias_of(ds, warp_row, first, own_chunk, stage);
    }
    const int32_t first_chunk = 2 * column_warp();
    if constexpr (Shape::kExchanges) {
      uint8_t* const to = shared_ + Shape::kExchangeOffset + warp_row * Shape::kExchangePitch;
      store_operand<T, Shape::kExchangePitch>(to + own_chunk * sizeof(T), ds);
      __syncthreads();
      const uint32_t from = ptx::shared_address(to);
      using Shared = SharedOperand<Shape::kBlock, Shape::kExchangePitch>;
      accumulate<T, Columns>(dq_, Shared(from), keys(stage), first_chunk);
    } else {
      accumulate<T, Columns>(dq_, RegisterOperand<T, kTiles, kBlocks>{ds}, chunk_keys, first_chunk);
    }
  }

  /// Stores dS of the warp's rows and of the keys from `own_chunk` of a stage on, whose first key is `first`.
  __device__ __forceinline__ void store_dbias_of(const Scores& ds, int32_t warp_row, int32_t first, int32_t own_chunk,
                                                 int stage) const {
    if constexpr (Shape::kStagesBias) {
      const StagedBias<Shape, T> block = staged_bias(first, stage);
      if (block.stores_chunks(all_params_)) {
        return block.store_gradient(all_params_, bias_rows(), warp_row, own_chunk, ds);
      }
    }
    store_dbias<T>(all_params_, bias_rows() + warp_row, first + own_chunk, ds);
  }

  /// Stores the warp's part of the segment's rows of dQ.
  __device__ __forceinline__ void store_gradient() const {
    const int32_t begin = segment_.tile.first_row, thread = ptx::thread();
    with_gradient_type<T>(params_, params_.dq, [&](auto* dq) {
      write_rows<T, Shape::kColumnWarps>(dq_, params_.softmax_scale, row_warp(thread) * Shape::kWarpRows, begin,
                                         begin + segment_.tile.num_rows, column_warp(thread), params_.forward.head_dim,
                                         row_at(dq, params_.forward.head_dim));
    });
  }

  const BackwardParamsOf<Shape>& all_params_;
  const BackwardParams& params_;
  uint8_t* const shared_;
  SequenceSegment& segment_;
  uint32_t base_;
  float dq_[kTiles][kColumnTiles][4];
  Bias bias_;  // kHasAlignedBias: of the next chunk
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using LogitsTransform = xa::XA_PASTE(bwd_logits_, XA_LOGITS);
using Shape = xa::BackwardShape<xa::tiles::gradient_dq, xa::tiles::XA_PASTE(shape_, XA_SHAPE), T, XA_HEAD_DIM>;
using Params = xa::BackwardParamsOf<Shape>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::QueryGradients<Shape, T, LogitsTransform>(params, shared).run();
}
