// dK and dV of attention. A CTA holds a block of rows of K and V of one KV head and streams the packed rows of Q and dO
// that attend to them. It computes whole sums, without atomics, so two runs give the same bits. The design is explained
// in docs/dev/kernels/portable_backward.md.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32
//   XA_HEAD_DIM  the bucket: D and Dv up to it run, padded with zeros in shared memory
//   XA_SHAPE     large, small; key_ranges, bias, bias_aligned, bias_shifted, bias_f32, bias_f32_aligned,
//                bias_f32_own, bias_f32_own_small, bias_large: for query rows with bounds of their keys, with a bias
//                (include/bwd/shape.cuh)
//   XA_LOGITS    none, softcap_alibi (include/bwd/probabilities.cuh)
// Launch: kThreads threads, a CTA per block of kHeld rows of K and KV head, Shape::kSharedBytes of dynamic shared
// memory. Blocks are those of RowBlocks with a bias, else ceil(Tk / kHeld).

#include <type_traits>

#include "bwd/aligned_bias.cuh"
#include "bwd/aligned_f32_bias.cuh"
#include "bwd/bias_rows.cuh"
#include "bwd/few_keys.cuh"
#include "bwd/probabilities.cuh"
#include "bwd/products.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/row_blocks.cuh"
#include "bwd/row_bounds.cuh"
#include "bwd/rows.cuh"
#include "bwd/score_gradients.cuh"
#include "bwd/sequence_segment.cuh"
#include "bwd/shape.cuh"
#include "bwd/shape_params.cuh"
#include "bwd/shifted_bias.cuh"
#include "bwd/staged_bias.cuh"
#include "bwd/stream.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"

namespace xa {

template <typename Shape, typename T, typename LogitsTransform>
class KeyGradients {
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  static constexpr int kTiles = Shape::kRowTiles, kBlocks = Shape::kChunk / 8, kColumnTiles = Shape::kColumns / 8;
  static constexpr int kSteps = Shape::kRowBytes / 32;
  /// Whether few keys have code of their own. Beside it ptxas spills in the loop for the others where that loads a bias
  /// at 128 columns that dS does not replace. Blocks that begin with rows of chunks of f32 end after four keys or more.
  static constexpr bool kComputesFewKeys =
      !Shape::kHasAlignedF32Bias && (Shape::kReplacesBias || (Shape::kHasAlignedBias && Shape::kHeadDim == 64));
  static_assert(!Shape::kReplacesBias || Shape::kBlock == Shape::kAtOnce);
  using Place = typename Shape::Place;
  using Keys = typename Shape::Keys;
  using Bias = typename Shape::Bias;
  /// The first element of a row of dS, kNoBias if there is none; kReplacesBias: the block's first key or the chunk that
  /// has it.
  using DsRow = std::conditional_t<Shape::kReplacesBias, Bias*, int64_t>;
  static_assert(sizeof(DsRow) == sizeof(int64_t));
  using Scores = float[kTiles][kBlocks][4];
  using ChunkStage = std::conditional_t<Shape::kHasF32Bias, AlignedF32BiasStage<Shape, T>, AlignedBiasStage<Shape, T>>;
  using BiasStage = std::conditional_t<Shape::kShiftsBias, ShiftedBiasStage<Shape, Bias>, ChunkStage>;

 public:
  __device__ __forceinline__ KeyGradients(const BackwardParamsOf<Shape>& params, uint8_t* shared)
      : all_params_(params),
        params_(backward_of(params)),
        shared_(shared),
        segment_(*reinterpret_cast<SequenceSegment*>(shared + Shape::kSegmentOffset)),
        base_(ptx::shared_address(shared)) {}

  __device__ __forceinline__ void run() {
    const AttentionParams& forward = params_.forward;
    {
      const int32_t tile = blockIdx.x / forward.num_kv_heads, kv_head = blockIdx.x - tile * forward.num_kv_heads;
      int32_t first = tile * Shape::kHeld;
      if constexpr (Shape::kHasBias) {
        first = fetch_block(tile, kv_head);
        if (first >= forward.capacity) return;
      }
      if (threadIdx.x == 0) {
        segment_.kv_head = kv_head;
        segment_.first = first;
        segment_.clears_padding = 1;
        segment_.maxima = kStartsAscend;
      }
      if constexpr (!Shape::kHasBias) fetch_held(first, kv_head);
    }
    __syncthreads();
    const auto clear_held = [&] {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        clear_gradient(i == 0 ? params_.dk : params_.dv, i == 0 ? forward.head_dim : forward.value_dim);
      }
    };
    for_segments<Shape::kThreads, Held>(
        forward, segment_, [&] { return count(); },
        [&] {
          if constexpr (kComputesFewKeys) {
            if (has_few_keys<Shape>(all_params_, segment_)) {
              return compute_few_keys<Shape, T>(all_params_, segment_, shared_ + Shape::kStreamOffset);
            }
          }
          clear(dk_);
          clear(dv_);
          stream();
          store_gradient(params_.dk, forward.head_dim, dk_, params_.softmax_scale);
          store_gradient(params_.dv, forward.value_dim, dv_, 1.0f);
        },
        clear_held);
  }

 private:
  using Held = std::conditional_t<Shape::kHasBias, HeldInBlock<HeldKeys<Shape::kHeld>>, HeldKeys<Shape::kHeld>>;

  /// Starts to copy the rows of K and V from row `first` on. All threads of the CTA call it.
  __device__ __forceinline__ void fetch_held(int32_t first, int32_t kv_head) const {
    fetch_keys<T, Shape, Shape::kHeld, Keys>(params_, first, params_.forward.capacity - first, kv_head, base_,
                                             base_ + Shape::kHeldBytes);
  }
  /// The same for a block of RowBlocks. Returns its first row; Tk or more if there is no such block.
  __device__ __forceinline__ int32_t fetch_block(int32_t block, int32_t kv_head) const {
    const int32_t capacity = params_.forward.capacity;
    int32_t first;
    // Whether sequences begin with blocks is known when the copies have been started.
    find_key_period<Shape::kThreads>(all_params_, [&](int32_t period) {
      const RowBlocks<Shape::kHeld> blocks(capacity, period);
      first = blocks.first_row(block, all_params_.key_blocks_per_turn);
      if (threadIdx.x == 0) block_rows() = blocks.count(first);
      if (first < capacity) fetch_held(first, kv_head);
    });
    return first;
  }
  /// How many rows the block has.
  __device__ __forceinline__ int32_t count() const {
    if constexpr (Shape::kHasBias) {
      return block_rows();
    } else {
      return min(params_.forward.capacity - segment_.first, Shape::kHeld);
    }
  }

  static __device__ __forceinline__ int32_t row_warp(int32_t thread = threadIdx.x) {
    return thread / 32 / Shape::kColumnWarps;
  }
  static __device__ __forceinline__ int32_t column_warp(int32_t thread = threadIdx.x) {
    return thread / 32 % Shape::kColumnWarps;
  }

  /// The row of a streamed block whose statistics this thread loads, if `has_stats_row`. With places the last warps
  /// have these rows, because the first ones find the places.
  static __device__ __forceinline__ int32_t stats_row() {
    return ptx::thread() - (Shape::kHasPlaces ? Shape::kThreads - Shape::kBlock : 0);
  }
  static __device__ __forceinline__ bool has_stats_row(int32_t row) {
    return Shape::kHasPlaces ? row >= 0 : row < Shape::kBlock;
  }
  __device__ __forceinline__ QueryRowStats* row_stats(int stage) const {
    return reinterpret_cast<QueryRowStats*>(shared_ + Shape::kQueryRowsOffset) + stage * Shape::kBlock;
  }
  __device__ __forceinline__ ColumnRange* column_ranges() const {
    return reinterpret_cast<ColumnRange*>(shared_ + Shape::kColumnRangesOffset);
  }
  /// The ranges of the query rows of a stage.
  __device__ __forceinline__ RowRange* row_ranges(int stage) const {
    return reinterpret_cast<RowRange*>(shared_ + Shape::kColumnRangesOffset) + stage * Shape::kBlock;
  }
  /// The query rows of a stage in the bias.
  __device__ __forceinline__ BiasRowIndex* bias_rows(int stage) const {
    return reinterpret_cast<BiasRowIndex*>(shared_ + Shape::kBiasRowsOffset) + stage * Shape::kBlock;
  }
  /// Whether the bias is staged where P and dS are exchanged.
  __device__ __forceinline__ bool has_bias_in_exchange() const {
    if constexpr (Shape::kStagesF32InExchange) {
      return all_params_.bias.is_wide != 0;
    } else {
      return false;
    }
  }
  /// The bias of the query rows of a stage and the keys of the block.
  __device__ __forceinline__ StagedBias<Shape, T> staged_bias(int stage) const {
    return {all_params_.bias, shared_ + (has_bias_in_exchange() ? Shape::kExchangeOffset : Shape::kBiasOffset), stage,
            segment_.first_key};
  }
  /// The stage of the bias of the block that begins at packed row `first` and is in stage `stage`.
  __device__ __forceinline__ int bias_stage(int32_t first, int stage) const {
    if constexpr (Shape::kBiasStages == Shape::kStages) return stage;
    return static_cast<uint32_t>(first - segment_.columns.begin) / Shape::kBlock % Shape::kBiasStages;
  }
  __device__ __forceinline__ BiasStage aligned_bias(int bias_stage) const {
    return {shared_ + Shape::kBiasOffset + bias_stage * BiasStage::kBytes};
  }
  /// The index in the bias of a query row of the segment's sequence.
  __device__ __forceinline__ BiasRowIndex bias_row_of(int32_t head, int32_t query) const {
    return bias_row_index(all_params_.bias, segment_.tile.sequence, head, query);
  }
  /// The places of the query rows of the block that begins at packed row `first`.
  __device__ __forceinline__ Place* row_places(int32_t first) const {
    const int32_t index = (first - segment_.columns.begin) / Shape::kBlock;
    return reinterpret_cast<Place*>(shared_ + Shape::kPlacesOffset) + index % 2 * Shape::kBlock;
  }
  /// Where the query rows of a stage of the bias are in dS.
  __device__ __forceinline__ DsRow* ds_rows(int bias_stage) const {
    return reinterpret_cast<DsRow*>(shared_ + Shape::kDsRowsOffset) + bias_stage * Shape::kBlock;
  }
  /// The bytes at which the query rows of a stage of the bias begin there.
  __device__ __forceinline__ uint32_t* bias_begins(int bias_stage) const {
    return reinterpret_cast<uint32_t*>(shared_ + Shape::kBiasBeginsOffset) + bias_stage * Shape::kBlock;
  }
  /// The address of a row in a gradient `[Tk, Hkv, dim]`. Unsigned numbers are widened to 64 bits without a register
  /// for the sign.
  template <typename Gradient>
  __device__ __forceinline__ auto row_at(Gradient* gradient, uint32_t dim) const {
    const uint32_t num_heads = params_.forward.num_kv_heads, head = segment_.kv_head, first = segment_.first;
    return [=](uint32_t row) { return gradient + (static_cast<uint64_t>(first + row) * num_heads + head) * dim; };
  }
  __device__ __forceinline__ uint32_t queries(int stage) const {
    return base_ + Shape::kStreamOffset + 2 * stage * Shape::kBlockBytes;
  }

  /// The block of packed query rows from row `first` of the sequence on.
  __device__ __forceinline__ QueryBlock query_block(int32_t first) const {
    const int32_t first_token = segment_.tile.first_token, kv_head = segment_.kv_head;
    if constexpr (Shape::kStoresDs)
      return QueryBlock::dividing_if_grouped(params_.forward, first_token, first, kv_head);
    return QueryBlock(params_.forward, first_token, first, kv_head);
  }

  /// Starts the copies of a block of Q and dO and of its row statistics, from packed row `first` of the sequence on.
  __device__ __forceinline__ void fetch(int32_t first, int stage) const {
    const int32_t count = segment_.columns.end - first;
    if (Shape::kHasRanges && count <= 0) return;
    const uint32_t to = queries(stage);
    if constexpr (Shape::kHasPlaces) {
      const Place* const places = row_places(first);
      fetch_placed_queries<T, Shape, Shape::kBlock>(params_, places, count, to, to + Shape::kBlockBytes);
      const auto place_of = [&](int32_t row) { return places[row].bias; };
      const BiasStage bias = aligned_bias(bias_stage(first, stage));
      if constexpr (Shape::kShiftsBias) {
        bias.fetch(place_of);
      } else {
        bias.fetch(all_params_.bias, segment_.first_key, place_of);
      }
      find_places(first + Shape::kBlock);
    } else {
      const QueryBlock block = query_block(first);
      const auto fetch_bias = [&] {
        if constexpr (Shape::kStagesBias) {
          staged_bias(stage).fetch([&](int32_t index) {
            return index < count ? bias_row_of(block.head(index), block.rows.query(index)) : kNoBiasRow;
          });
        }
      };
      // The bias first: it is in DRAM, where L2 has the other rows.
      fetch_bias();
      if constexpr (Shape::kHeadDim % 256 == 0 && Element<T>::kIs16Bit) {
        fetch_queries_by_warps<T, Shape, Shape::kBlock>(params_, block, count, to, to + Shape::kBlockBytes);
      } else {
        fetch_queries<T, Shape, Shape::kBlock>(params_, block, count, to, to + Shape::kBlockBytes);
      }
    }
    const int32_t index_in_block = stats_row();
    if (has_stats_row(index_in_block) && index_in_block < count) {
      const QueryBlock block = query_block(first);
      QueryRowStats& row = row_stats(stage)[index_in_block];
      const int32_t head = block.head(index_in_block);
      const int64_t index = static_cast<int64_t>(head) * params_.forward.num_tokens + block.token(index_in_block);
      ptx::cp_async_4(ptx::shared_address(&row.negative_lse), params_.forward.lse + index);
      if (params_.delta != nullptr) {
        ptx::cp_async_4(ptx::shared_address(&row.delta), params_.delta + index);
      } else {
        row.delta = delta_of<T, 1>(params_, block.token(index_in_block), head);
      }
      if constexpr (LogitsTransform::kTransforms) {
        row.negative_slope = negative_slope(params_.forward, segment_.tile.sequence, head);
        row.position = block.rows.query(index_in_block) + Visibility(params_.forward, segment_.tile).shift;
      }
      if constexpr (Shape::kBiasRows > 0) {
        bias_rows(stage)[index_in_block] = bias_row_of(head, block.rows.query(index_in_block));
      }
      if constexpr (Shape::kStoresDs) {
        const int of_bias = bias_stage(first, stage);
        const int64_t ds_row = score_gradient_row(all_params_, segment_.tile.sequence, head,
                                                  block.rows.query(index_in_block), block.token(index_in_block));
        if constexpr (Shape::kShiftsBias) {
          bias_begins(of_bias)[index_in_block] =
              BiasStage::begin(index_in_block, row_places(first)[index_in_block].bias);
        }
        if constexpr (Shape::kHasAlignedF32Bias) {
          ds_rows(of_bias)[index_in_block] =
              BiasStage::place_of(all_params_.ds, ds_row, first_column(all_params_, segment_));
        } else if constexpr (Shape::kReplacesBias) {
          ds_rows(of_bias)[index_in_block] =
              BiasStage::chunks_of(static_cast<Bias*>(all_params_.ds.data), ds_row, segment_.first_key);
        } else {
          ds_rows(of_bias)[index_in_block] = ds_row;
        }
      }
      if constexpr (Shape::kHasRanges) {
        const Visibility visibility(params_.forward, segment_.tile);
        row_ranges(stage)[index_in_block] =
            row_range(all_params_.ranges, visibility, segment_.tile, block.rows.query(index_in_block));
      }
    }
    ptx::cp_async_commit();
  }

  /// Stores the places of the query rows of the block from packed row `first` on, each warp one of three for a row per
  /// lane: threads that copy a row would otherwise all compute them.
  __device__ __forceinline__ void find_places(int32_t first) const {
    const QueryBlock block = query_block(first);
    Place* const places = row_places(first);
#pragma unroll 1
    for (int32_t item = ptx::thread(); item < 3 * Shape::kBlock; item += Shape::kThreads) {
      const int32_t what = item / Shape::kBlock, index = item % Shape::kBlock;
      const bool exists = first + index < segment_.columns.end;
      const int32_t row = exists ? index : 0, query = block.rows.query(row), head = block.head(row);
      const int64_t token = block.first_token + query;
      if (what == 0) {
        places[index].q = q_row_of<T>(params_, token, head);
      } else if (what == 1) {
        places[index].dout = dout_row_of<T>(params_, token, head);
      } else {
        const int64_t row = exists ? bias_row(all_params_.bias, bias_row_of(head, query)) : kNoBias;
        if constexpr (Shape::kShiftsBias) {
          places[index].bias = BiasStage::place_of(all_params_, row, segment_.first_key);
        } else {
          places[index].bias = row;
        }
      }
    }
  }

  /// Whether the sequence has keys in the block that the bias has not.
  __device__ __forceinline__ bool has_keys_past_bias() const {
    if constexpr (Shape::kShiftsBias) {
      const int32_t keys = all_params_.bias.keys;
      return segment_.tile.len_k > keys && segment_.first_key + Shape::kHeld > keys;
    } else {
      return false;
    }
  }
  /// Waits for this thread's copies, completes its part of the bias and converts the lse of its row; rows past the last
  /// one get probabilities of 0.
  __device__ __forceinline__ void wait_for(int32_t first, int stage) const {
    const bool clears = has_keys_past_bias();
    ptx::cp_async_wait<0>();
    if constexpr (Shape::kShiftsBias) {
      if (clears) {
        const Place* const places = row_places(first);
        aligned_bias(bias_stage(first, stage)).clear_from(all_params_.bias.keys - segment_.first_key, [&](int32_t row) {
          return places[row].bias;
        });
      }
    } else if constexpr (Shape::kHasAlignedBias) {
      aligned_bias(bias_stage(first, stage)).settle(segment_.first_key);
    }
    const int32_t index_in_block = stats_row();
    if (!has_stats_row(index_in_block)) return;
    QueryRowStats& row = row_stats(stage)[index_in_block];
    if (index_in_block < segment_.columns.end - first) {
      row.negative_lse = negative_lse(row.negative_lse);
    } else {
      row = {-INFINITY, 0.0f, 0.0f, 0};
      if constexpr (Shape::kHasRanges) row_ranges(stage)[index_in_block] = {0, 0};
      if constexpr (Shape::kBiasRows > 0) bias_rows(stage)[index_in_block] = kNoBiasRow;
      if constexpr (Shape::kStoresDs) {
        const int of_bias = bias_stage(first, stage);
        if constexpr (Shape::kShiftsBias) bias_begins(of_bias)[index_in_block] = BiasStage::begin(index_in_block, {});
        if constexpr (Shape::kReplacesBias) {
          ds_rows(of_bias)[index_in_block] = nullptr;
        } else {
          ds_rows(of_bias)[index_in_block] = kNoBias;
        }
      }
    }
  }

  /// The first packed query row of the first block from row `row` on that attends to some key of the segment.
  __device__ __forceinline__ int32_t block_from(int32_t row) const {
    if constexpr (Shape::kHasRanges) {
      const int32_t group = params_.forward.group, low = segment_.first_key + segment_.tile.first_row;
      const Visibility visibility(params_.forward, segment_.tile);
      const int32_t query = next_attending_query(all_params_.ranges, visibility, segment_.tile, row / group, low,
                                                 low + segment_.tile.num_rows - 1);
      return max(row, query * group);
    } else {
      return row;
    }
  }

  /// Adds up dK and dV over the query rows of the segment.
  __device__ __forceinline__ void stream() {
    // Addresses derived from it are worth registers within the loop, but not across segments.
    base_ = ptx::opaque(base_);
    stream_blocks<Shape>(
        segment_,
        [&] {
          if constexpr (Shape::kHasPlaces) {
            find_places(segment_.columns.begin);
            __syncthreads();
          }
          return block_from(segment_.columns.begin);
        },
        [&](int32_t first) { return block_from(first + Shape::kBlock); },
        [&](int32_t first, int stage) { fetch(first, stage); },
        [&] {
          if constexpr (!Shape::kHasRanges) {
            for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
              column_ranges()[row] = HeldKeys<Shape::kHeld>::columns_of(params_.forward, segment_, Keys::of_row(row));
            }
          }
        },
        [&](int32_t first, int stage) { wait_for(first, stage); },
        [&](int32_t first, int32_t chunk, int stage) { process_chunk(first, chunk, stage); });
    if constexpr (Shape::kStoresLater) {
      // There is a block, because segments have query rows.
      const int32_t blocks = (segment_.columns.end - segment_.columns.begin + Shape::kBlock - 1) / Shape::kBlock;
      __syncthreads();
      store_replaced_ds(segment_.columns.begin + (blocks - 1) * Shape::kBlock, 0);
    }
  }

  /// Adds rows `chunk` to `chunk + kAtOnce - 1` of the block that begins at packed row `first` to dK and dV.
  __device__ __forceinline__ void process_chunk(int32_t first, int32_t chunk, int stage) {
    const int32_t warp_row = row_warp() * Shape::kWarpRows;
    const int32_t own_chunk = chunk + (Shape::kExchanges ? column_warp() * Shape::kChunk : 0);
    // At 128 columns beside a bias of f32, registers for addresses across steps would be spilled.
    constexpr bool kFindsKeys = Shape::kHasF32Bias && Shape::kReplacesBias && Shape::kExchanges;
    const uint32_t base = kFindsKeys ? ptx::opaque(base_) : base_;
    const uint32_t keys = base + warp_row * Rows::kPitch, values = keys + Shape::kHeldBytes;
    const uint32_t rows = queries(stage) + own_chunk * Rows::kPitch, douts = rows + Shape::kBlockBytes;
    if constexpr (Shape::kStoresLater) {
      if (first > segment_.columns.begin) store_replaced_ds(first - Shape::kBlock, stage);
    }
    Scores p, ds;
    const int32_t column = first + own_chunk, key = segment_.first_key + warp_row;
    const QueryRowStats* const stats = row_stats(stage) + own_chunk;
    if constexpr (Shape::kHasAlignedBias) {
      multiply_rows<T, Rows, kSteps>(ds, values, douts);
      const int of_bias = bias_stage(first, stage);
      if constexpr (Shape::kShiftsBias) {
        aligned_bias(of_bias).start(p, params_.forward, bias_begins(of_bias) + own_chunk, warp_row);
      } else {
        aligned_bias(of_bias).start(p, params_.forward, own_chunk, warp_row);
      }
      multiply_rows<T, Rows, kSteps, true>(p, keys, rows);
      p_and_ds<T, true, LogitsTransform>(p, ds, params_.forward, stats, key);
    } else if constexpr (Shape::kStagesBias) {
      multiply_rows<T, Rows, kSteps>(p, keys, rows);
      multiply_rows<T, Rows, kSteps>(ds, values, douts);
      const StagedBias<Shape, T> block = staged_bias(stage);
      const StagedScoreBias<Shape, T> bias(block, bias_rows(stage), own_chunk, warp_row);
      p_and_ds<T, true, LogitsTransform>(p, ds, params_.forward, stats, key, bias);
    } else if constexpr (Shape::kHasBias) {
      const BiasRowIndex* const rows_of_bias = bias_rows(stage) + own_chunk;
      const auto bias = row_bias<T, true>(all_params_.bias, key, [=](int32_t row) { return rows_of_bias[row]; });
      bias.load(p, params_.forward);
      multiply_rows<T, Rows, kSteps>(ds, values, douts);
      bias.convert(p, params_.forward);
      multiply_rows<T, Rows, kSteps, true>(p, keys, rows);
      p_and_ds<T, true, LogitsTransform>(p, ds, params_.forward, stats, key, bias);
    } else {
      multiply_rows<T, Rows, kSteps>(p, keys, rows);
      multiply_rows<T, Rows, kSteps>(ds, values, douts);
      p_and_ds<T, true, LogitsTransform>(p, ds, params_.forward, stats, key);
    }
    if constexpr (Shape::kHasRanges) {
      const RowRange* const ranges = row_ranges(stage) + own_chunk;
      if (!all_hold<Shape::kChunk>(ranges, key, key + Shape::kWarpRows)) mask_columns(p, ds, ranges, key);
    } else if (column < segment_.common.begin || column + Shape::kChunk > segment_.common.end) {
      mask(p, ds, [&](int32_t row) { return column_ranges()[warp_row + row]; }, column);
    }
    if constexpr (Shape::kReplacesBias) {
      const int of_bias = bias_stage(first, stage);
      if constexpr (Shape::kShiftsBias) {
        aligned_bias(of_bias).replace(ds, bias_begins(of_bias) + own_chunk, warp_row);
      } else {
        aligned_bias(of_bias).replace(ds, all_params_.ds, own_chunk, warp_row);
      }
    }
    const int32_t first_chunk = 2 * column_warp();
    if constexpr (Shape::kExchanges) {
      if (has_bias_in_exchange()) __syncthreads();
      uint8_t* const to = shared_ + Shape::kExchangeOffset + warp_row * Shape::kExchangePitch;
      store_operand<T, Shape::kExchangePitch>(to + own_chunk * sizeof(T), p);
      store_operand<T, Shape::kExchangePitch>(to + Shape::kExchangeMatrix + own_chunk * sizeof(T), ds);
      __syncthreads();
      const uint32_t from = ptx::shared_address(to);
      using Shared = SharedOperand<Shape::kBlock, Shape::kExchangePitch>;
      const uint32_t streamed = Shape::kHasF32Bias ? ptx::opaque(queries(stage)) : queries(stage);
      accumulate<T, Columns>(dv_, Shared(from), streamed + Shape::kBlockBytes, first_chunk);
      accumulate<T, Columns>(dk_, Shared(from + Shape::kExchangeMatrix), streamed, first_chunk);
    } else {
      accumulate<T, Columns>(dv_, RegisterOperand<T, kTiles, kBlocks>{p}, douts, first_chunk);
      accumulate<T, Columns>(dk_, RegisterOperand<T, kTiles, kBlocks>{ds}, rows, first_chunk);
    }
    if constexpr (Shape::kReplacesBias) {
      if constexpr (!Shape::kStoresLater) {
        if constexpr (!Shape::kExchanges) __syncthreads();
        store_replaced_ds(first, stage);
      }
    } else if constexpr (Shape::kStoresDs) {
      if (all_params_.ds.data != nullptr) {
        if constexpr (Shape::kHasAlignedBias) {
          store_ds(ds, own_chunk, stage);
        } else {
          store_exchanged_ds(stage);
        }
      }
    }
  }

  /// Stores dS of the block that begins at packed row `first`, which all warps have stored in place of its bias.
  __device__ __forceinline__ void store_replaced_ds(int32_t first, int stage) const {
    const int of_bias = bias_stage(first, stage);
    if constexpr (Shape::kHasAlignedF32Bias) {
      return aligned_bias(of_bias).store(ds_rows(of_bias), all_params_.ds, first_column(all_params_, segment_));
    } else {
      const int32_t begin = segment_.tile.first_row, key = segment_.first_key + begin;
      const ColumnRange keys = {begin, begin + min(segment_.tile.num_rows, all_params_.bias.keys - key)};
      aligned_bias(of_bias).store(ds_rows(of_bias), bias_begins(of_bias), keys);
    }
  }

  /// Stores dS of all 32 keys of the CTA and of the warp's part of a stage's query rows.
  __device__ __forceinline__ void store_exchanged_ds(int stage) const {
    constexpr int kRows = Shape::kBlock / Shape::kWarps;
    static_assert(Shape::kExchanges && Shape::kHeld == 32 && kRows % 8 == 0);
    const int32_t row = ptx::thread() / 32 * kRows;
    uint8_t* const from = shared_ + Shape::kExchangeOffset + Shape::kExchangeMatrix + row * sizeof(T);
    store_score_gradients<Shape::kExchangePitch, false, true, T, kRows / 8>(
        all_params_.ds, ptx::shared_address(from), first_column(all_params_, segment_), ds_rows(stage) + row);
  }

  /// Stores dS of the warp's keys and of the query rows from `own_chunk` of a stage on, whose rows begin with chunks.
  __device__ __forceinline__ void store_ds(const Scores& ds, int32_t own_chunk, int stage) const {
    const int32_t warp_row = row_warp() * Shape::kWarpRows;
    const int64_t* const rows = ds_rows(stage) + own_chunk;
    const int32_t column = first_column(all_params_, segment_) + warp_row;
    if constexpr (Shape::kExchanges) {
      // Where the warps that share the keys have it too.
      uint8_t* const from = shared_ + Shape::kExchangeOffset + Shape::kExchangeMatrix +
                            warp_row * Shape::kExchangePitch + own_chunk * sizeof(T);
      store_score_gradients<Shape::kExchangePitch, false, false, T>(all_params_.ds, ptx::shared_address(from), column,
                                                                    rows);
    } else {
      // In place of the bias of these pairs, which the warp has read.
      static_assert(Shape::kChunk == Shape::kWarpRows);
      constexpr int kPitch = Shape::template kStagedPitch<Bias>;
      // Rows begin up to 15 bytes after a chunk with kShiftsBias: from the next one on, bytes of all are of these
      // pairs.
      uint8_t* const staged = shared_ + Shape::kBiasOffset + stage * BiasStage::kBytes + own_chunk * kPitch +
                              warp_row * sizeof(Bias) + (Shape::kShiftsBias ? 16 : 0);
      __syncwarp();
      stage_score_gradients<T, kPitch>(staged, ds);
      __syncwarp();
      store_score_gradients<kPitch, true, false, T>(all_params_.ds, ptx::shared_address(staged), column, rows);
    }
  }

  /// Stores the warp's part of the segment's rows of a gradient, times `factor`.
  __device__ __forceinline__ void store_gradient(void* gradient, int32_t dim, const float (&x)[kTiles][kColumnTiles][4],
                                                 float factor) const {
    const int32_t begin = segment_.tile.first_row, thread = ptx::thread();
    with_gradient_type<T>(params_, gradient, [&](auto* rows) {
      write_rows<T, Shape::kColumnWarps, Keys>(x, factor, row_warp(thread) * Shape::kWarpRows, begin,
                                               begin + segment_.tile.num_rows, column_warp(thread), dim,
                                               row_at(rows, dim));
    });
  }
  /// Stores zeros to the rows of the block in a gradient.
  __device__ __forceinline__ void clear_gradient(void* gradient, int32_t dim) const {
    const int32_t bytes = dim * gradient_bytes<T>(params_);
    clear_rows<Shape::kThreads>(count(), bytes, row_at(static_cast<uint8_t*>(gradient), bytes));
  }

  const BackwardParamsOf<Shape>& all_params_;
  const BackwardParams& params_;
  uint8_t* const shared_;
  SequenceSegment& segment_;
  uint32_t base_;
  float dk_[kTiles][kColumnTiles][4];
  float dv_[kTiles][kColumnTiles][4];
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using LogitsTransform = xa::XA_PASTE(bwd_logits_, XA_LOGITS);
using Shape = xa::BackwardShape<xa::tiles::gradient_dkdv, xa::tiles::XA_PASTE(shape_, XA_SHAPE), T, XA_HEAD_DIM>;
using Params = xa::BackwardParamsOf<Shape>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::KeyGradients<Shape, T, LogitsTransform>(params, shared).run();
}
