// The gradient of the bias of attention, for any head dimension. A CTA has a tile of rows and keys of one sequence and
// head of the bias, visits the sequences and heads that share it in order, recomputes their P and dS, and sums dS in
// registers: without atomics, and without memory for dS. attention_bwd_dq has run before.
//
// Compiled once for each value of
//   XA_DTYPE   f16, bf16, f32
// Launch: kThreads threads, a CTA per tile, sequence and head of the bias, Shape::kSharedBytes of dynamic shared
// memory.

#include "bwd/bias_rows.cuh"
#include "bwd/probabilities.cuh"
#include "bwd/rows.cuh"
#include "bwd/sequence_segment.cuh"
#include "element.cuh"
#include "params/attention_bwd.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"
#include "shared_rows.cuh"
#include "warp_products.cuh"
#include "work_tile.cuh"

namespace xa {

/// A tile of kRows rows and kKeys keys. The columns of its operands are streamed, kColumns of Q, dO, K and V at a time.
template <typename T>
struct BiasGradientShape {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = kDbiasRows, kKeys = kDbiasKeys, kStages = 2;
  static constexpr int kColumns = 128 / static_cast<int>(sizeof(T));
  using Rows = SwizzledRows<128>;
  static constexpr int kRowBytes = kRows * Rows::kPitch, kKeyBytes = kKeys * Rows::kPitch;
  /// A stage: Q, dO, K, V.
  static constexpr int kStageBytes = 2 * (kRowBytes + kKeyBytes);
  static constexpr int kRowStatsOffset = kStages * kStageBytes;
  static constexpr int kTileOffset = kRowStatsOffset + kRows * static_cast<int>(sizeof(QueryRowStats));
  static constexpr int kNeededBytes = kTileOffset + static_cast<int>(sizeof(QoTile));
  static_assert(kRows == 16 * kWarps, "a warp has 16 rows");
  static_assert(kNeededBytes == kDbiasSharedBytes, "what the launch asks for");
};

template <typename Shape, typename T>
class BiasGradient {
  using Rows = typename Shape::Rows;
  static constexpr int kBlocks = Shape::kKeys / 8;
  using Scores = float[1][kBlocks][4];

 public:
  __device__ __forceinline__ BiasGradient(const BiasBackwardParams& params, uint8_t* shared)
      : all_params_(params),
        params_(params.backward),
        shared_(shared),
        tile_(*reinterpret_cast<QoTile*>(shared + Shape::kTileOffset)) {
    const int32_t key_tiles = (params.bias.keys + Shape::kKeys - 1) / Shape::kKeys;
    const int32_t row_tiles = (params.bias.rows + Shape::kRows - 1) / Shape::kRows;
    int32_t index = blockIdx.x;
    first_key_ = index % key_tiles * Shape::kKeys;
    index /= key_tiles;
    first_row_ = index % row_tiles * Shape::kRows;
    index /= row_tiles;
    head_ = index % params.heads;
    sequence_ = index / params.heads;
  }

  __device__ __forceinline__ void run() {
    const AttentionParams& forward = params_.forward;
    clear(sums_);
    const int32_t live = live_sequences(forward), num_heads = forward.num_kv_heads * forward.group;
    const int32_t first = all_params_.seqs == 1 ? 0 : sequence_;
    const int32_t end = min(all_params_.seqs == 1 ? live : sequence_ + 1, live);
    StartMaxima maxima = {0, 0};
    int32_t scanned = 0;
#pragma unroll 1
    for (int32_t sequence = first; sequence < end; ++sequence) {
      raise_maxima(forward, scanned, sequence, maxima);
      scanned = sequence;
      if (!describe(sequence, maxima)) continue;
#pragma unroll 1
      for (int32_t head = all_params_.heads == 1 ? 0 : head_; head < num_heads; ++head) {
        add_head(head);
        if (all_params_.heads != 1) break;
      }
    }
    store();
  }

 private:
  /// The warp's first row of the tile.
  static __device__ __forceinline__ int32_t warp_row() { return threadIdx.x / 32 * 16; }

  __device__ __forceinline__ QueryRowStats* row_stats() const {
    return reinterpret_cast<QueryRowStats*>(shared_ + Shape::kRowStatsOffset);
  }

  /// Sets `tile_` to a sequence, with the rows of it that the CTA's tile has. Returns whether some of them attends to
  /// some of its keys. `maxima` are those of all starts before the sequence's.
  __device__ __forceinline__ bool describe(int32_t sequence, const StartMaxima& maxima) const {
    Metadata<1> metadata;
    metadata.load(params_.forward, sequence);
    metadata.starts[0] = max(metadata.starts[0], maxima.q);
    metadata.starts[1] = max(metadata.starts[1], metadata.starts[0]);
    metadata.starts_k[0] = max(metadata.starts_k[0], maxima.k);
    metadata.starts_k[1] = max(metadata.starts_k[1], metadata.starts_k[0]);
    QoTile tile = metadata.sequence(params_.forward, 0, sequence);
    tile.first_row = first_row_;
    tile.num_rows = min(tile.len_q - first_row_, Shape::kRows);
    __syncthreads();
    if (threadIdx.x == 0) tile_ = tile;
    __syncthreads();
    if (tile.num_rows <= 0) return false;
    const KeyRange keys = visible_keys(Visibility(params_.forward, tile), first_row_, first_row_ + tile.num_rows - 1);
    return keys.begin < min(keys.end, first_key_ + Shape::kKeys) && keys.end > first_key_;
  }

  /// Copies the columns from `first_column` on of kCount rows of 16-byte chunks to shared address `to`.
  template <int kCount, typename RowAt>
  __device__ __forceinline__ void fetch_rows(uint32_t to, int32_t count, int32_t first_column, int32_t dim,
                                             const RowAt& row_at) const {
    constexpr int kElements = 16 / static_cast<int>(sizeof(T));
    const int32_t chunk = threadIdx.x % 8, column = first_column + chunk * kElements;
#pragma unroll
    for (int32_t i = 0; i < kCount; i += Shape::kThreads / 8) {
      const int32_t row = i + static_cast<int32_t>(threadIdx.x / 8);
      const bool exists = row < count && column < dim;
      ptx::cp_async_16(to + Rows::offset(row, chunk), row_at(exists ? row : 0) + (exists ? column : 0), exists);
    }
  }
  /// Starts the copies of a step's columns.
  __device__ __forceinline__ void fetch(int32_t head, int32_t step) const {
    const AttentionParams& forward = params_.forward;
    const uint32_t to = ptx::shared_address(shared_) + step % Shape::kStages * Shape::kStageBytes;
    const int32_t column = step * Shape::kColumns, kv_head = head / forward.group;
    const int64_t token = tile_.first_token + first_row_, key = static_cast<int64_t>(tile_.start_k) + first_key_;
    const T* const q = static_cast<const T*>(forward.q) + token * forward.q_token_stride + head * forward.q_head_stride;
    const T* const dout =
        static_cast<const T*>(params_.dout) + token * params_.dout_token_stride + head * params_.dout_head_stride;
    const T* const k =
        static_cast<const T*>(forward.k.base) + key * forward.k.token_stride + kv_head * forward.k.head_stride;
    const T* const v =
        static_cast<const T*>(forward.v.base) + key * forward.v.token_stride + kv_head * forward.v.head_stride;
    const int32_t keys = tile_.len_k - first_key_;
    fetch_rows<Shape::kRows>(to, tile_.num_rows, column, forward.head_dim,
                             [&](int64_t row) { return q + row * forward.q_token_stride; });
    fetch_rows<Shape::kRows>(to + Shape::kRowBytes, tile_.num_rows, column, forward.value_dim,
                             [&](int64_t row) { return dout + row * params_.dout_token_stride; });
    fetch_rows<Shape::kKeys>(to + 2 * Shape::kRowBytes, keys, column, forward.head_dim,
                             [&](int64_t row) { return k + row * forward.k.token_stride; });
    fetch_rows<Shape::kKeys>(to + 2 * Shape::kRowBytes + Shape::kKeyBytes, keys, column, forward.value_dim,
                             [&](int64_t row) { return v + row * forward.v.token_stride; });
    ptx::cp_async_commit();
  }

  /// Sets the statistics of the rows of a head.
  __device__ __forceinline__ void store_row_stats(int32_t head) const {
    const int32_t row = threadIdx.x;
    if (row >= Shape::kRows) return;
    QueryRowStats stats = {-INFINITY, 0.0f, 0.0f, kNoPosition};
    if (row < tile_.num_rows) {
      const int32_t query = first_row_ + row, token = tile_.first_token + query;
      const int64_t index = static_cast<int64_t>(head) * params_.forward.num_tokens + token;
      stats.negative_lse = negative_lse(__ldg(params_.forward.lse + index));
      stats.delta = params_.delta != nullptr ? params_.delta[index] : delta_of<T, 1>(params_, token, head);
      stats.negative_slope = negative_slope(params_.forward, tile_.sequence, head);
      stats.position = query + Visibility(params_.forward, tile_).shift;
    }
    row_stats()[row] = stats;
  }

  /// Adds dS of a head of the sequence in `tile_`.
  __device__ __forceinline__ void add_head(int32_t head) {
    const AttentionParams& forward = params_.forward;
    const int32_t steps = (max(forward.head_dim, forward.value_dim) + Shape::kColumns - 1) / Shape::kColumns;
    Scores p, ds;
    clear(p);
    clear(ds);
    fetch(head, 0);
    store_row_stats(head);
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (step + 1 < steps) fetch(head, step + 1);
      const uint32_t rows = ptx::shared_address(shared_) + step % Shape::kStages * Shape::kStageBytes;
      const uint32_t keys = rows + 2 * Shape::kRowBytes, own_rows = rows + warp_row() * Rows::kPitch;
      add_products(p, own_rows, keys);
      add_products(ds, own_rows + Shape::kRowBytes, keys + Shape::kKeyBytes);
    }
    const auto bias = row_bias<T>(all_params_.bias, [&](int32_t row) {
      return bias_row(all_params_.bias, tile_.sequence, head, first_row_ + warp_row() + row);
    });
    const QueryRowStats* const stats = row_stats() + warp_row();
    p_and_ds<T, false, bwd_logits_softcap_alibi, true>(p, ds, forward, stats, first_key_, bias);
    const Visibility visibility(forward, tile_);
    const auto columns_of = [&](int32_t row) {
      const int32_t position = stats[row].position, query = position - visibility.shift;
      const ColumnRange visible = {visibility.begin(query), visibility.end(query)};
      return position != kNoPosition && visible.begin < visible.end ? visible : ColumnRange{0, 0};
    };
    mask(p, ds, columns_of, first_key_);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[0][block][i] += ds[0][block][i];
    }
    __syncthreads();
  }

  /// scores += A B^T of the 16 rows at shared address `a` and the kKeys rows at `b`.
  static __device__ __forceinline__ void add_products(Scores& scores, uint32_t a, uint32_t b) {
    Scores small;  // f32: sums of the products with small parts
    if constexpr (!Element<T>::kIs16Bit) clear(small);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t from_a = a + Rows::offset(lane % 16, lane / 16);
    const uint32_t from_b = b + Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a_fragment[4];
      ptx::ldmatrix_x4(a_fragment, Rows::moved(from_a, 0, 2 * step));
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        uint32_t b_fragment[4];
        ptx::ldmatrix_x4(b_fragment, Rows::moved(from_b, 16 * pair, 2 * step));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int block = 2 * pair + half;
          if constexpr (Element<T>::kIs16Bit) {
            Element<T>::mma(scores[0][block], a_fragment, b_fragment[2 * half], b_fragment[2 * half + 1]);
          } else {
            split_mma(scores[0][block], small[0][block], a_fragment, b_fragment[2 * half], b_fragment[2 * half + 1]);
          }
        }
      }
    }
    if constexpr (!Element<T>::kIs16Bit) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0][block][i] += small[0][block][i];
      }
    }
  }

  /// Stores the sums.
  __device__ __forceinline__ void store() const {
    if constexpr (Element<T>::kIs16Bit) {
      // A bias of f32 has a gradient of f32.
      if (all_params_.bias.is_wide != 0 || all_params_.widens_dbias != 0) return store_as<float>();
    }
    store_as<T>();
  }
  template <typename E>
  __device__ __forceinline__ void store_as() const {
    const BiasSource& bias = all_params_.bias;
    const int32_t lane = threadIdx.x % 32;
    const int64_t matrix = static_cast<int64_t>(sequence_) * all_params_.heads + head_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row_ + warp_row() + 8 * half + lane / 4;
      if (row >= bias.rows) continue;
      E* const to = static_cast<E*>(all_params_.dbias) + (matrix * bias.rows + row) * bias.keys;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int32_t key = first_key_ + 8 * block + 2 * (lane % 4);
        const float2 pair = make_float2(sums_[0][block][2 * half], sums_[0][block][2 * half + 1]);
        if (bias.keys % 2 == 0) {
          if (key < bias.keys) store_columns(to + key, pair);
        } else {
          if (key < bias.keys) to[key] = rounded<E>(pair.x);
          if (key + 1 < bias.keys) to[key + 1] = rounded<E>(pair.y);
        }
      }
    }
  }

  const BiasBackwardParams& all_params_;
  const BackwardParams& params_;
  uint8_t* const shared_;
  QoTile& tile_;
  int32_t first_row_;  // of the bias
  int32_t first_key_;
  int32_t sequence_;  // of the bias
  int32_t head_;      // of the bias
  Scores sums_;
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape = xa::BiasGradientShape<T>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, sizeof(T) == 2 ? 2 : 1)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::BiasGradient<Shape, T>(params, shared).run();
}
