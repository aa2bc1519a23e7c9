// dQ of attention from dS that attention_bwd_dkdv has stored (ScoreGradients): dQ = dS K. A CTA holds a block of packed
// query rows of one KV head, as in attention_bwd_dq, and streams dS of its rows and the rows of K that they attend to.
// Where dS is the gradient of the bias, but its rows have been padded to whole chunks, it stores that in rows of any
// length too. The design is explained in docs/dev/kernels/bias.md.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  64, 128: the bucket; D up to it runs, padded with zeros in shared memory
// Launch: kThreads threads, a CTA per block of kDqFromDsRows packed query rows (RowBlocks) and KV head, the table's
// dynamic shared memory.

#include "bwd/copied_dbias.cuh"
#include "bwd/dbias_rows.cuh"
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
/// ScoreGradientRow of each row; its index in the gradient of the bias; SequenceSegment.
template <int kHeadDim_>
struct DqFromDsShape : tiles::AttentionBwdDqFromDs<kHeadDim_> {
  using Config = tiles::AttentionBwdDqFromDs<kHeadDim_>;
  static constexpr int kHeadDim = kHeadDim_, kHeld = kDqFromDsRows, kKeys = 64;
  /// A warp has 32 rows, and with others of the same rows every so many groups of columns.
  static constexpr int kTiles = 2, kWarpRows = 16 * kTiles, kColumns = kHeadDim / Config::kColumnWarps;
  static constexpr int kThreads = 32 * kHeld / kWarpRows * Config::kColumnWarps;
  using DsRows = SwizzledRows<2 * kKeys>;
  using KeyRows = SwizzledRows<2 * kHeadDim>;
  using KeyColumns = ColumnGroups<KeyRows, Config::kColumnWarps>;
  static constexpr int kDsBytes = kHeld * DsRows::kPitch, kStageBytes = kDsBytes + kKeys * KeyRows::kPitch;
  static constexpr int kRowsOffset = Config::kStages * kStageBytes;
  static constexpr int kBiasRowsOffset = kRowsOffset + kHeld * static_cast<int>(sizeof(ScoreGradientRow));
  static constexpr int kSegmentOffset = kBiasRowsOffset + kHeld * static_cast<int>(sizeof(BiasRowIndex));
  static_assert(Config::kSharedBytes == kSegmentOffset + sizeof(SequenceSegment),
                "shared_bytes in variants.toml must be the bytes that the kernel uses");
};

/// Operand A of `accumulate`: the rows of a warp in a stage.
template <typename Shape>
struct StagedDs {
  using Rows = typename Shape::DsRows;
  static constexpr int kRows = Shape::kKeys;
  uint32_t address;

  /// `rows` is the shared address of the warp's first row.
  __device__ __forceinline__ explicit StagedDs(uint32_t rows)
      : address(rows + Rows::offset(threadIdx.x % 16, threadIdx.x % 32 / 16)) {}
  __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
    ptx::ldmatrix_x4(fragment, Rows::moved(address, 16 * tile, 2 * step));
  }
};

template <typename T, int kHeadDim>
class QueryGradientsFromDs {
  using Shape = DqFromDsShape<kHeadDim>;

 public:
  __device__ __forceinline__ QueryGradientsFromDs(const BiasBackwardParams& params, uint8_t* shared)
      : all_params_(params),
        params_(params.backward),
        shared_(shared),
        segment_(*reinterpret_cast<SequenceSegment*>(shared + Shape::kSegmentOffset)) {}

  __device__ __forceinline__ void run() {
    const AttentionParams& forward = params_.forward;
    find_key_period<Shape::kThreads>(all_params_, [](int32_t) {});
    if (threadIdx.x == 0) {
      const RowBlocks<Shape::kHeld> blocks(forward.num_tokens * forward.group,
                                           all_params_.query_period * forward.group);
      // Under a mask the last rows come first: if it is causal, they attend to the most keys.
      const bool is_masked = forward.window_left >= 0 || forward.window_right >= 0;
      const int32_t index = is_masked ? gridDim.x - 1 - blockIdx.x : blockIdx.x, tile = index / forward.num_kv_heads;
      segment_.kv_head = index - tile * forward.num_kv_heads;
      segment_.first = blocks.first_row(tile, all_params_.query_blocks_per_turn);
      block_rows() = blocks.count(segment_.first);
      segment_.clears_padding = 0;  // attention_bwd_dq has done it
      segment_.maxima = kStartsAscend;
    }
    __syncthreads();
    for_segments<Shape::kThreads, HeldInBlock<Held>>(
        forward, segment_, [] { return 0; },
        [&] {
          const bool is_complete = has_all_score_gradients(all_params_, segment_.tile);
          if (!is_complete && !copies_dbias()) return;
          describe_rows();
          if (block_rows() <= kFewRows) return compute_few(is_complete);
          clear(dq_);
          stream();
          if (is_complete) store_gradient();
        },
        [] {});
  }

 private:
  using Held = HeldQueries<Shape::kHeld>;

  /// Whether the gradient of the bias is a copy of dS.
  __device__ __forceinline__ bool copies_dbias() const {
    return all_params_.ds.has_token_rows == 0 && all_params_.dbias != all_params_.ds.data;
  }
  __device__ __forceinline__ BiasRowIndex* bias_rows() const {
    return reinterpret_cast<BiasRowIndex*>(shared_ + Shape::kBiasRowsOffset);
  }
  static __device__ __forceinline__ int32_t warp_row() {
    return ptx::thread() / 32 / Shape::kColumnWarps * Shape::kWarpRows;
  }
  static __device__ __forceinline__ int32_t column_warp() { return ptx::thread() / 32 % Shape::kColumnWarps; }
  __device__ __forceinline__ ScoreGradientRow* rows() const {
    return reinterpret_cast<ScoreGradientRow*>(shared_ + Shape::kRowsOffset);
  }
  __device__ __forceinline__ uint32_t stage_at(int32_t index) const {
    return ptx::shared_address(shared_) + index % Shape::kStages * Shape::kStageBytes;
  }
  __device__ __forceinline__ QueryBlock held() const {
    return QueryBlock(params_.forward, 0, segment_.first, segment_.kv_head);
  }
  __device__ __forceinline__ int32_t key_0() const { return column_of_key_0(all_params_, segment_.tile.start_k); }

  /// Finds the rows of the segment in dS, if they attend to some key that has a column; the others have none.
  __device__ __forceinline__ void describe_rows() const {
    for (int32_t row = ptx::thread(); row < Shape::kHeld; row += Shape::kThreads) {
      ScoreGradientRow found = {0, 0, 0};
      BiasRowIndex bias_row = kNoBiasRow;
      const int32_t position = Held::position(params_.forward, segment_, row);
      if (position != kNoPosition) {
        const Visibility visibility(params_.forward, segment_.tile);
        const QueryBlock block = held();
        const int32_t query = position - visibility.shift, token = block.token(row);
        const int32_t head = block.head(row), sequence = segment_.tile.sequence;
        const int64_t element = score_gradient_row(all_params_, sequence, head, query, token);
        const int32_t end = element == kNoBias ? 0 : min(visibility.end(query), all_params_.bias.keys);
        found = ScoreGradientRow::of(element, visibility.begin(query), end, key_0());
        if (found.begin < found.end) bias_row = bias_row_index(all_params_.bias, sequence, head, query);
      }
      rows()[row] = found;
      bias_rows()[row] = bias_row;
    }
    __syncthreads();
  }

  /// Starts the copies of block `index` of the keys from column `first` on: dS, zeros where a row attends to no key of
  /// a chunk, and K, zeros where no row of the segment attends to the key.
  __device__ __forceinline__ void fetch(int32_t first, int32_t index) const {
    const int32_t column = first + index * Shape::kKeys, key = column - key_0();
    if (key < segment_.columns.end) {
      const int32_t thread = ptx::thread(), chunk = thread % kChunks, first_row = thread / kChunks;
      const uint32_t to = staged_chunk(index, first_row, chunk);
      const T* const ds = static_cast<const T*>(all_params_.ds.data) + column + 8 * chunk;
#pragma unroll
      for (int32_t i = 0; i < Shape::kHeld; i += kChunkRows) {
        const ScoreGradientRow from = rows()[first_row + i];
        const bool exists = from.attends(column + 8 * chunk);
        ptx::cp_async_16(Shape::DsRows::moved(to, i, 0), exists ? ds + from.element : all_params_.ds.data, exists);
      }
      fetch_key_rows(key, stage_at(index) + Shape::kDsBytes);
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void fetch_key_rows(int32_t first_key, uint32_t to) const {
    using Grid = ThreadGrid<T, kHeadDim, Shape::kThreads>;
    const Grid grid;
    const KvSource& source = params_.forward.k;
    const T* const k = static_cast<const T*>(source.base) + segment_.kv_head * source.head_stride;
    const ColumnRange keys = segment_.columns;
#pragma unroll
    for (int32_t i = 0; i < Shape::kKeys; i += Grid::kStep) {
      const int32_t row = i + grid.row, key = first_key + row;
      const bool exists = key >= keys.begin && key < keys.end;
      const int64_t from = segment_.tile.start_k + (exists ? key : keys.begin);
      fetch_row<Grid, typename Shape::KeyRows>(to, row, k + from * source.token_stride,
                                               exists ? params_.forward.head_dim : 0);
    }
  }

  /// Computes the rows of the segment one by one.
  __device__ __forceinline__ void compute_few(bool is_complete) const {
    const int32_t begin = segment_.tile.first_row, end = begin + segment_.tile.num_rows;
    const FewRowGradients<Shape, T> gradients(all_params_, segment_, shared_);
#pragma unroll 1
    for (int32_t row = begin; row < end; ++row) {
      if (copies_dbias() && bias_rows()[row] != kNoBiasRow) gradients.copy(dbias_row(row).elements, rows()[row]);
      if (is_complete) gradients.store(held(), row, rows()[row]);
    }
  }

  /// Adds up dQ over the keys of the segment.
  __device__ __forceinline__ void stream() {
    const int32_t first = (segment_.columns.begin + key_0()) / 8 * 8;
    const int32_t blocks = (segment_.columns.end + key_0() - first + Shape::kKeys - 1) / Shape::kKeys;
    constexpr int kAhead = Shape::kStages - 1;
    for (int32_t index = 0; index < kAhead; ++index) fetch(first, index);
    const bool copies = copies_dbias();
    if (copies) {
      clear_dbias_around(first, first + blocks * Shape::kKeys);
      clear_last_chunks();
    }
#pragma unroll 1
    for (int32_t index = 0; index < blocks; ++index) {
      ptx::cp_async_wait<kAhead - 1>();
      if (copies && has_partial_chunks()) mask_chunks(first + index * Shape::kKeys, index);
      __syncthreads();
      if (copies) store_first_chunks(first + index * Shape::kKeys, index);
      fetch(first, index + kAhead);
      const uint32_t stage = stage_at(index);
      accumulate<T, typename Shape::KeyColumns>(dq_, StagedDs<Shape>(stage + warp_row() * Shape::DsRows::kPitch),
                                                stage + Shape::kDsBytes, 2 * column_warp());
      if (copies) store_other_chunks(first + index * Shape::kKeys, index);
    }
    if (copies) store_last_elements(first + blocks * Shape::kKeys, blocks - 1);
  }

  /// Whether blocks of keys begin within chunks of the sequence's columns, and so have not stored whole chunks.
  __device__ __forceinline__ bool has_partial_chunks() const {
    return key_period() == params_.forward.capacity && segment_.tile.start_k % 8 != 0;
  }
  /// Sets elements of the chunks that this thread has copied to zeros where the row does not attend to the key.
  __device__ __forceinline__ void mask_chunks(int32_t column, int32_t index) const {
    const int32_t thread = ptx::thread(), chunk = thread % kChunks, first = column + 8 * chunk;
#pragma unroll 1
    for (int32_t row = thread / kChunks; row < Shape::kHeld; row += kChunkRows) {
      const ScoreGradientRow of = rows()[row];
      if (!of.attends(first) || (of.begin <= first && first + 8 <= of.end)) continue;
      uint8_t* const stage = shared_ + index % Shape::kStages * Shape::kStageBytes;
      auto* const elements = reinterpret_cast<uint16_t*>(stage + Shape::DsRows::offset(row, chunk));
#pragma unroll 1
      for (int32_t i = 0; i < 8; ++i) {
        if (first + i < of.begin || first + i >= of.end) elements[i] = 0;
      }
    }
  }

  /// The row of the gradient of the bias of a row of the block.
  __device__ __forceinline__ CopiedDbiasRow dbias_row(int32_t row) const {
    return CopiedDbiasRow(all_params_, bias_rows()[row]);
  }
  /// The address of chunk `chunk` of a row of dS in the stage of block `index`.
  __device__ __forceinline__ uint32_t staged_chunk(int32_t index, int32_t row, int32_t chunk) const {
    return stage_at(index) + Shape::DsRows::offset(row, chunk);
  }
  /// Stores zeros to the gradient of the bias of the segment's rows, before column `first` and from column `end` on.
  __device__ __forceinline__ void clear_dbias_around(int32_t first, int32_t end) const {
    const int32_t keys = all_params_.dbias_keys;
    if (first == 0 && end >= keys) return;
#pragma unroll 1
    for (int32_t row = ptx::thread() / 32; row < Shape::kHeld; row += Shape::kThreads / 32) {
      if (bias_rows()[row] == kNoBiasRow) continue;
      uint16_t* const to = dbias_row(row).elements;
      clear_elements(to, min(first, keys));
      if (end < keys) clear_elements(to + end, keys - end);
    }
  }
  /// Sets the elements before the first block, in the stage that is fetched last, to zeros.
  __device__ __forceinline__ void clear_last_chunks() const {
    for (int32_t i = ptx::thread(); i < 2 * Shape::kHeld; i += Shape::kThreads) {
      ptx::store_shared_16(staged_chunk(Shape::kStages - 1, i / 2, kChunks - 2 + i % 2), make_uint4(0, 0, 0, 0));
    }
  }
  /// Stores the first two chunks of the gradient of the bias of each row for the block of keys from `column` on. They
  /// have elements of the block before, which the next `fetch` of the same warp replaces.
  __device__ __forceinline__ void store_first_chunks(int32_t column, int32_t index) const {
    constexpr int kWarpChunkRows = 32 / kChunks;
    const int32_t thread = ptx::thread(), lane = thread % 32, before = index - 1 + Shape::kStages;
#pragma unroll 1
    for (int32_t i = lane / 2; i < Shape::kHeld / kChunkRows * kWarpChunkRows; i += 16) {
      // The rows of which the warp fetches chunks.
      const int32_t row = i / kWarpChunkRows * kChunkRows + thread / 32 * kWarpChunkRows + i % kWarpChunkRows;
      if (bias_rows()[row] == kNoBiasRow) continue;
      dbias_row(row).store(column, lane % 2, [&](int32_t chunk) {
        return staged_chunk(chunk < 0 ? before : index, row, chunk & (kChunks - 1));
      });
    }
    __syncwarp();
  }
  __device__ __forceinline__ void store_other_chunks(int32_t column, int32_t index) const {
    const int32_t thread = ptx::thread(), chunk = thread % kChunks, first_row = thread / kChunks;
    if (chunk < 2) return;
    const uint32_t stage = stage_at(index);
#pragma unroll 2
    for (int32_t i = 0; i < Shape::kHeld; i += kChunkRows) {
      if (bias_rows()[first_row + i] == kNoBiasRow) continue;
      dbias_row(first_row + i).store(column, chunk, [&](int32_t of) {
        return Shape::DsRows::moved(stage + Shape::DsRows::offset(first_row, of), i, 0);
      });
    }
  }
  /// Stores the elements before column `end`, the end of the last block, `index`, that no chunk has had.
  __device__ __forceinline__ void store_last_elements(int32_t end, int32_t index) const {
    const int32_t row = ptx::thread();
    if (row >= Shape::kHeld || bias_rows()[row] == kNoBiasRow) return;
    dbias_row(row).store_last(end, staged_chunk(index, row, kChunks - 2), staged_chunk(index, row, kChunks - 1));
  }

  /// Stores the warp's rows of the segment.
  __device__ __forceinline__ void store_gradient() const {
    const int32_t begin = segment_.tile.first_row, end = begin + segment_.tile.num_rows;
    const uint32_t dim = params_.forward.head_dim, num_heads = params_.forward.num_kv_heads * params_.forward.group;
    const QueryBlock block = held();
    with_gradient_type<T>(params_, params_.dq, [&](auto* dq) {
      const auto row_at = [&](int32_t row) {
        const uint32_t token = block.token(row), head = block.head(row);
        return dq + (static_cast<uint64_t>(token) * num_heads + head) * dim;
      };
      write_rows<T, Shape::kColumnWarps>(dq_, params_.softmax_scale, warp_row(), begin, end, column_warp(), dim,
                                         row_at);
    });
  }

  /// The chunks of a row of dS in a stage, which adjacent threads have, and the rows that all threads have at a time.
  static constexpr int kChunks = Shape::kKeys / 8, kChunkRows = Shape::kThreads / kChunks;

  const BiasBackwardParams& all_params_;
  const BackwardParams& params_;
  uint8_t* const shared_;
  SequenceSegment& segment_;
  float dq_[Shape::kTiles][Shape::kColumns / 8][4];
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape = xa::DqFromDsShape<XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::QueryGradientsFromDs<T, XA_HEAD_DIM>(params, shared).run();
}
