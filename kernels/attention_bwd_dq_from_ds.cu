// dQ of attention from dS that attention_bwd_dkdv has stored (ScoreGradients): dQ = dS K. A CTA holds a block of packed
// query rows of one KV head, as in attention_bwd_dq, and streams dS of its rows and the rows of K that they attend to.
// The design is explained in docs/dev/kernels/bias_gradients.md.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  64, 128, 256, 512: the bucket; D up to it runs, padded with zeros in shared memory
//   XA_ROWS      aligned, shifted: whether rows of dS begin with chunks of 16 bytes, or anywhere; f32_aligned, f32: the
//                same of this type, up to 128 columns
// Launch: kThreads threads, a CTA per block of kDqFromDsRows packed query rows (RowBlocks), KV head and part of the
// columns, the table's dynamic shared memory.

#include <type_traits>

#include "bwd/ds_stage.cuh"
#include "bwd/few_rows.cuh"
#include "bwd/gradient_type.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/row_blocks.cuh"
#include "bwd/rows.cuh"
#include "bwd/score_gradients.cuh"
#include "bwd/sequence_segment.cuh"
#include "bwd/shape.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "tiles/attention_bwd_dq_from_ds.cuh"
#include "warp_products.cuh"

namespace xa {

/// Blocks of kKeys keys, of which all but one of kStages are under way. Shared memory: the stages, each dS and then K;
/// ScoreGradientRow of each row; SequenceSegment.
template <typename Rows, typename T, int kBucket>
struct DqFromDsShape : tiles::AttentionBwdDqFromDs<Rows, kBucket> {
  using Config = tiles::AttentionBwdDqFromDs<Rows, kBucket>;
  using Config::kKeys;
  /// Columns of a CTA: one of kParts parts of the bucket, because a thread has no registers for more.
  static constexpr int kHeadDim = kBucket / Config::kParts, kHeld = kDqFromDsRows;
  /// A warp has 32 rows, and with others of the same rows every so many groups of columns.
  static constexpr int kTiles = 2, kWarpRows = 16 * kTiles, kColumns = kHeadDim / Config::kColumnWarps;
  static constexpr int kThreads = 32 * kHeld / kWarpRows * Config::kColumnWarps;
  using F32Stage =
      std::conditional_t<std::is_same_v<Rows, tiles::rows_f32_aligned>, AlignedF32DsStage<T, kHeld, kKeys, kThreads>,
                         F32DsStage<T, kHeld, kKeys, kThreads>>;
  using ShiftedStage = std::conditional_t<std::is_same_v<Rows, tiles::rows_shifted>,
                                          ShiftedDsStage<T, kHeld, kKeys, kThreads>, F32Stage>;
  using DsStage = std::conditional_t<std::is_same_v<Rows, tiles::rows_aligned>,
                                     AlignedDsStage<T, kHeld, kKeys, kThreads>, ShiftedStage>;
  using KeyRows = SwizzledRows<2 * kHeadDim>;
  using KeyColumns = ColumnGroups<KeyRows, Config::kColumnWarps>;
  static constexpr int kStageBytes = DsStage::kBytes + kKeys * KeyRows::kPitch;
  static constexpr int kRowsOffset = Config::kStages * kStageBytes;
  static constexpr int kSegmentOffset = kRowsOffset + kHeld * static_cast<int>(sizeof(ScoreGradientRow));
  static_assert(Config::kSharedBytes == kSegmentOffset + sizeof(SequenceSegment),
                "shared_bytes in variants.toml must be the bytes that the kernel uses");
};

template <typename Shape, typename T>
class QueryGradientsFromDs {
  using DsStage = typename Shape::DsStage;
  using Ds = typename DsStage::Ds;
  static constexpr uint32_t kDsElements = 16 / sizeof(Ds);

 public:
  __device__ __forceinline__ QueryGradientsFromDs(const BiasBackwardParams& params, uint8_t* shared)
      : all_params_(params),
        params_(params.backward),
        shared_(shared),
        segment_(*reinterpret_cast<SequenceSegment*>(shared + Shape::kSegmentOffset)) {}

  __device__ __forceinline__ void run() {
    const AttentionParams& forward = params_.forward;
    if (Shape::kParts > 1 && num_columns() <= 0) return;
    find_key_period<Shape::kThreads>(all_params_, [](int32_t) {});
    if (threadIdx.x == 0) {
      const RowBlocks<Shape::kHeld> blocks(forward.num_tokens * forward.group,
                                           all_params_.query_period * forward.group);
      // Under a mask the last rows come first: if it is causal, they attend to the most keys.
      const bool is_masked = forward.window_left >= 0 || forward.window_right >= 0;
      const int32_t cta = blockIdx.x / Shape::kParts, ctas = gridDim.x / Shape::kParts;
      const int32_t index = is_masked ? ctas - 1 - cta : cta, tile = index / forward.num_kv_heads;
      segment_.kv_head = index - tile * forward.num_kv_heads;
      segment_.first = blocks.first_row(tile, all_params_.query_blocks_per_turn);
      block_rows() = blocks.count(segment_.first);
      segment_.clears_padding = 1;
      segment_.maxima = kStartsAscend;
    }
    __syncthreads();
    for_segments<Shape::kThreads, HeldInBlock<Held>>(
        forward, segment_, [] { return 0; },
        [&] {
          if (!has_all_score_gradients(all_params_, segment_.tile)) return;
          if (block_rows() > kFewRows) {
            describe_rows();
            clear(dq_);
            stream();
            store_gradient();
          }
          compute_single_rows();
        },
        [] {});
    // attention_bwd_dq has cleared the padding rows of its blocks, which may begin elsewhere: a block of this kernel
    // whose rows attend to no key may have some that share a block of that kernel with rows that attend to keys. A
    // segment resets the flag.
    if (segment_.clears_padding != 0 && segment_.first < forward.num_tokens * forward.group) clear_gradient();
  }

 private:
  using Held = HeldQueries<Shape::kHeld>;

  static __device__ __forceinline__ int32_t warp_row() {
    return ptx::thread() / 32 / Shape::kColumnWarps * Shape::kWarpRows;
  }
  static __device__ __forceinline__ int32_t column_warp() { return ptx::thread() / 32 % Shape::kColumnWarps; }
  /// The CTA's first column, and how many columns of dQ it has.
  static __device__ __forceinline__ int32_t first_column() { return blockIdx.x % Shape::kParts * Shape::kHeadDim; }
  __device__ __forceinline__ int32_t num_columns() const {
    const int32_t columns = params_.forward.head_dim - first_column();
    return Shape::kParts > 1 ? min(columns, Shape::kHeadDim) : columns;
  }
  __device__ __forceinline__ ScoreGradientRow* rows() const {
    return reinterpret_cast<ScoreGradientRow*>(shared_ + Shape::kRowsOffset);
  }
  __device__ __forceinline__ uint32_t stage_at(int32_t index) const {
    return ptx::shared_address(shared_) + index % Shape::kStages * Shape::kStageBytes;
  }
  __device__ __forceinline__ QueryBlock held() const {
    return QueryBlock(params_.forward, 0, segment_.first, segment_.kv_head);
  }

  /// Row `row` of the segment in dS, if it attends to some key that has a column.
  __device__ __forceinline__ ScoreGradientRow row_of(int32_t row) const {
    const int32_t position = Held::position(params_.forward, segment_, row);
    if (position == kNoPosition) return {0, 0, 0};
    const Visibility visibility(params_.forward, segment_.tile);
    const QueryBlock block = held();
    const int32_t query = position - visibility.shift;
    const int64_t element =
        score_gradient_row(all_params_, segment_.tile.sequence, block.head(row), query, block.token(row));
    const int32_t end = element == kNoBias ? 0 : min(visibility.end(query), all_params_.bias.keys);
    return ScoreGradientRow::of(element, visibility.begin(query), end,
                                column_of_key_0(all_params_, segment_.tile.start_k));
  }
  /// The row of the segment from which on rows are computed one by one: the first one in a block of few rows, else the
  /// last row of dS if that does not end with a chunk. memcheck takes a copy of a part of this chunk for one of all of
  /// it, which is not in dS.
  __device__ __forceinline__ int32_t first_single_row() const {
    const int32_t begin = segment_.tile.first_row, end = begin + segment_.tile.num_rows;
    if (block_rows() <= kFewRows) return begin;
    if (!DsStage::kIsShifted) return end;
    // Modulo 2^32: another row that is taken for the last one is computed as well.
    const uint32_t pitch = all_params_.ds.pitch;
    const uint32_t elements = all_params_.seqs * all_params_.heads * all_params_.bias.rows * pitch;
    if (elements % kDsElements == 0) return end;
    return static_cast<uint32_t>(row_of(end - 1).element) + pitch == elements ? end - 1 : end;
  }
  /// Finds the rows of the segment in dS. A row outside of the segment, and one that is computed by itself, gets the
  /// place of another one: its result is not kept, and with zeros the copies of its warp would take longer.
  __device__ __forceinline__ void describe_rows() const {
    const int32_t begin = segment_.tile.first_row, end = first_single_row();
    for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
      rows()[row] = begin < end ? row_of(min(max(row, begin), end - 1)) : ScoreGradientRow{0, 0, 0};
    }
    __syncthreads();
  }

  /// Where a thread copies K from: a chunk of every kStep-th row of a block.
  struct KeyRow {
    const T* k;     // the chunk of its first row
    int64_t pitch;  // of rows
    int32_t key;    // of the sequence
    int32_t bytes;  // 0 past the last column
  };
  using KeyGrid = ThreadGrid<T, Shape::kHeadDim, Shape::kThreads>;
  static_assert(KeyGrid::kChunks == KeyGrid::kLanes && KeyGrid::kStep % 8 == 0 &&
                (KeyGrid::kStep & (KeyGrid::kStep - 1)) == 0);

  /// The thread's row of the block that begins with key `first_key`.
  __device__ __forceinline__ KeyRow key_row(int32_t first_key) const {
    const KeyGrid grid;
    const KvSource& source = params_.forward.k;
    const int32_t key = first_key + DsStage::Keys::of_row(grid.row), column = grid.chunk * KeyGrid::kElements;
    const bool exists = column < num_columns();
    const T* const k = static_cast<const T*>(source.base) + segment_.kv_head * source.head_stride + first_column();
    return {k + (segment_.tile.start_k + key) * source.token_stride + (exists ? column : 0), source.token_stride, key,
            exists ? 16 : 0};
  }
  /// Starts to copy a block of K, and moves `row` on by a block. Keys to which no row of the segment attends become
  /// zeros.
  __device__ __forceinline__ void fetch_keys(KeyRow& row, uint32_t to) const {
    const KeyGrid grid;
    const ColumnRange keys = segment_.columns;
    to += Shape::KeyRows::offset(grid.row, grid.chunk);
#pragma unroll
    for (int32_t i = 0; i < Shape::kKeys; i += KeyGrid::kStep) {
      // The bits of i are none of the thread's row.
      const int32_t offset = DsStage::Keys::of_row(i), key = row.key + offset;
      const bool exists = key >= keys.begin && key < keys.end;
      const void* const from = exists ? row.k + offset * row.pitch : params_.forward.k.base;
      ptx::cp_async_16_of(Shape::KeyRows::moved(to, i, 0), from, exists ? row.bytes : 0);
    }
    row.key += Shape::kKeys;
    row.k += Shape::kKeys * row.pitch;
  }

  /// Computes the rows of the segment that `stream` leaves out.
  __device__ __forceinline__ void compute_single_rows() const {
    const int32_t end = segment_.tile.first_row + segment_.tile.num_rows;
    const FewRowGradients<Shape, T> gradients(all_params_, segment_, shared_, first_column(), num_columns());
    __syncthreads();  // Other warps may still read stages, whose place the sums take.
#pragma unroll 1
    for (int32_t row = first_single_row(); row < end; ++row) gradients.store(held(), row, row_of(row));
  }

  /// Adds up dQ over the keys of the segment.
  __device__ __forceinline__ void stream() {
    // Blocks begin with a chunk of 8 columns.
    const int32_t key_0 = column_of_key_0(all_params_, segment_.tile.start_k);
    const int32_t first = (segment_.columns.begin + key_0) / 8 * 8;
    const int32_t blocks = (segment_.columns.end + key_0 - first + Shape::kKeys - 1) / Shape::kKeys;
    constexpr int kAhead = Shape::kStages - 1;
    const DsStage ds(static_cast<const Ds*>(all_params_.ds.data), rows(), warp_row());
    KeyRow keys = key_row(first - key_0);
    const auto fetch = [&](int32_t index) {
      if (index < blocks) {
        const uint32_t stage = stage_at(index);
        ds.fetch(first + index * Shape::kKeys, stage);
        fetch_keys(keys, stage + DsStage::kBytes);
      }
      ptx::cp_async_commit();
    };
    for (int32_t index = 0; index < kAhead; ++index) fetch(index);
#pragma unroll 1
    for (int32_t index = 0; index < blocks; ++index) {
      const uint32_t stage = stage_at(index);
      ptx::cp_async_wait<kAhead - 1>();
      ds.settle(stage);
      __syncthreads();
      fetch(index + kAhead);
      accumulate<T, typename Shape::KeyColumns>(dq_, ds.operand(stage), stage + DsStage::kBytes, 2 * column_warp());
    }
  }

  /// Stores the warp's rows of the segment.
  __device__ __forceinline__ void store_gradient() const {
    const int32_t begin = segment_.tile.first_row, end = begin + segment_.tile.num_rows;
    const uint32_t dim = params_.forward.head_dim, num_heads = params_.forward.num_kv_heads * params_.forward.group;
    const QueryBlock block = held();
    with_gradient_type<T>(params_, params_.dq, [&](auto* dq) {
      const auto row_at = [&](int32_t row) {
        const uint32_t token = block.token(row), head = block.head(row);
        return dq + (static_cast<uint64_t>(token) * num_heads + head) * dim + first_column();
      };
      write_rows<T, Shape::kColumnWarps>(dq_, params_.softmax_scale, warp_row(), begin, end, column_warp(),
                                         num_columns(), row_at);
    });
  }
  /// Stores zeros to the CTA's columns of the rows of the block.
  __device__ __forceinline__ void clear_gradient() const {
    const QueryBlock block = held();
    const int32_t element = gradient_bytes<T>(params_), dim = params_.forward.head_dim;
    const int32_t num_heads = params_.forward.num_kv_heads * params_.forward.group;
    clear_rows<Shape::kThreads>(block_rows(), num_columns() * element, [&](int32_t row) {
      const int64_t of = static_cast<int64_t>(block.token(row)) * num_heads + block.head(row);
      return static_cast<uint8_t*>(params_.dq) + (of * dim + first_column()) * element;
    });
  }

  const BiasBackwardParams& all_params_;
  const BackwardParams& params_;
  uint8_t* const shared_;
  SequenceSegment& segment_;
  float dq_[Shape::kTiles][Shape::kColumns / 8][4];
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape = xa::DqFromDsShape<xa::tiles::XA_PASTE(rows_, XA_ROWS), T, XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::QueryGradientsFromDs<Shape, T>(params, shared).run();
}
