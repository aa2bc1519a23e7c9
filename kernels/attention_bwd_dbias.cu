// The gradient of the bias of attention, for any head dimension. A CTA has rows of one sequence and head of the bias
// and a number of adjacent tiles of keys. For each tile it visits the sequences and heads that share it in order,
// recomputes their P and dS, and sums dS in registers: without atomics, and without memory for dS. attention_bwd_dq or
// hopper_bwd_prepare has stored delta before.
//
// Compiled once for each value of
//   XA_DTYPE   f16, bf16, f32
// Launch: kThreads threads, a CTA per `tiles_per_cta` tiles of keys, kRows rows, sequence and head of the bias,
// kDbiasSharedBytes of dynamic shared memory.

#include "bwd/bias_rows.cuh"
#include "bwd/dbias_rows.cuh"
#include "bwd/probabilities.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/rows.cuh"
#include "bwd/sequence_at.cuh"
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

/// The CTA's part of the bias, and what it knows of the sequence in `tile_`. In shared memory, because registers are
/// scarce.
struct BiasPlace {
  int32_t first_row;
  int32_t first_key;  // of the tile
  int32_t end_key;
  int32_t sequence;
  int32_t end_sequence;  // past those that share the tile
  int32_t head;
  StartMaxima maxima;  // of all starts before the sequence in `tile_`
  KeyRange keys;       // of its rows among those of the CTA
  int32_t stats_head;  // whose rows' statistics are in shared memory; negative for none
  int32_t steps;       // of the heads so far
};

/// A tile of kRows rows and kKeys keys. The columns of its operands are streamed: kColumns of Q and K at a time, then
/// as many of dO and V.
template <typename T>
struct BiasGradientShape {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = kDbiasRows, kKeys = kDbiasKeys, kStages = 3;
  static constexpr int kColumns = 128 / static_cast<int>(sizeof(T));
  using Rows = SwizzledRows<128>;
  static constexpr int kRowBytes = kRows * Rows::kPitch, kKeyBytes = kKeys * Rows::kPitch;
  /// A stage: rows of Q or dO, then of K or V.
  static constexpr int kStageBytes = kRowBytes + kKeyBytes;
  static constexpr int kRowStatsOffset = kStages * kStageBytes;
  static constexpr int kTileOffset = kRowStatsOffset + kRows * static_cast<int>(sizeof(QueryRowStats));
  static constexpr int kPlaceOffset = kTileOffset + static_cast<int>(sizeof(QoTile));
  static constexpr int kNeededBytes = kPlaceOffset + static_cast<int>(sizeof(BiasPlace));
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
        tile_(*reinterpret_cast<QoTile*>(shared + Shape::kTileOffset)),
        place_(*reinterpret_cast<BiasPlace*>(shared + Shape::kPlaceOffset)) {
    if (ptx::thread() == 0) {
      const auto tiles = [](int32_t count, int32_t size) { return (count + size - 1) / size; };
      const int32_t keys = params.tiles_per_cta * Shape::kKeys, parts = tiles(params.bias.keys, keys);
      const int32_t blocks = tiles(params.bias.rows, Shape::kRows), index = blockIdx.x;
      const int32_t matrix = index / parts / blocks, sequence = matrix / params.heads;
      const int32_t live = live_sequences(params.backward.forward);
      place_.first_row = index / parts % blocks * Shape::kRows;
      place_.first_key = index % parts * keys;
      place_.end_key = min(place_.first_key + keys, params.bias.keys);
      place_.sequence = sequence;
      place_.end_sequence = min(params.seqs == 1 ? live : sequence + 1, live);
      place_.head = matrix % params.heads;
      place_.steps = 0;
      tile_.sequence = -1;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (true) {
      clear(sums_);
      add_sequences();
      store();
      const int32_t next = place_.first_key + Shape::kKeys;
      if (next >= place_.end_key) break;
      __syncthreads();
      if (ptx::thread() == 0) place_.first_key = next;
      __syncthreads();
    }
  }

 private:
  /// The warp's first row of the tile.
  static __device__ __forceinline__ int32_t warp_row() { return ptx::thread() / 32 * 16; }

  __device__ __forceinline__ QueryRowStats* row_stats() const {
    return reinterpret_cast<QueryRowStats*>(shared_ + Shape::kRowStatsOffset);
  }

  /// Adds dS of the sequences and heads that share the tile.
  __device__ __forceinline__ void add_sequences() {
    const AttentionParams& forward = params_.forward;
#pragma unroll 1
    for (int32_t sequence = place_.sequence; sequence < place_.end_sequence; ++sequence) {
      if (sequence != tile_.sequence) describe(sequence);
      const bool attends = place_.keys.begin < min(place_.keys.end, place_.first_key + Shape::kKeys) &&
                           place_.keys.end > place_.first_key;
      if (!attends) continue;
      const bool shares_heads = all_params_.heads == 1;
      const int32_t end_head = shares_heads ? forward.num_kv_heads * forward.group : place_.head + 1;
#pragma unroll 1
      for (int32_t head = shares_heads ? 0 : place_.head; head < end_head; ++head) {
        const int32_t next_key = place_.first_key + Shape::kKeys;
        const bool shares_sequences = place_.end_sequence - place_.sequence > 1;
        const bool is_next = !shares_sequences && next_key < min(place_.keys.end, place_.end_key);
        add_head(head,
                 shares_heads ? Next{head + 1 < end_head, head + 1, place_.first_key} : Next{is_next, head, next_key});
      }
    }
  }

  /// Sets `tile_` to a sequence, with the rows of it that the CTA has.
  __device__ __forceinline__ void describe(int32_t sequence) const {
    StartMaxima maxima = {0, 0};
    int32_t scanned = 0;
    if (sequence != place_.sequence) {
      maxima = place_.maxima;
      scanned = sequence - 1;
    }
    QoTile tile = sequence_at(params_.forward, sequence, scanned, maxima);
    tile.first_row = place_.first_row;
    tile.num_rows = min(tile.len_q - place_.first_row, Shape::kRows);
    __syncthreads();
    if (ptx::thread() == 0) {
      tile_ = tile;
      place_.maxima = maxima;
      place_.keys = {0, 0, 0, 0};
      place_.stats_head = -1;
      if (tile.num_rows > 0) {
        const Visibility visibility(params_.forward, tile);
        place_.keys = visible_keys(visibility, tile.first_row, tile.first_row + tile.num_rows - 1);
      }
    }
    __syncthreads();
  }

  /// Copies the columns from `first_column` on of kCount rows of 16-byte chunks to shared address `to`.
  template <int kCount>
  __device__ __forceinline__ void fetch_rows(uint32_t to, int32_t count, int32_t first_column, int32_t dim,
                                             const T* from, int64_t stride) const {
    constexpr int kElements = 16 / static_cast<int>(sizeof(T));
    const int32_t chunk = ptx::thread() % 8, column = first_column + chunk * kElements;
#pragma unroll
    for (int32_t i = 0; i < kCount; i += Shape::kThreads / 8) {
      const int32_t row = i + static_cast<int32_t>(ptx::thread() / 8);
      const bool exists = row < count && column < dim;
      ptx::cp_async_16(to + Rows::offset(row, chunk), from + (exists ? row * stride + column : 0), exists);
    }
  }
  /// Starts the copies of a step's columns of a tile of keys, into stage `stage`. Q and K take the first `k_steps`.
  __device__ __forceinline__ void fetch(int32_t head, int32_t first_key, int32_t step, int32_t k_steps,
                                        int32_t stage) const {
    const AttentionParams& forward = params_.forward;
    const uint32_t to = ptx::shared_address(shared_) + stage * Shape::kStageBytes;
    const int32_t kv_head = head / forward.group, keys = tile_.len_k - first_key;
    const int64_t token = tile_.first_token + place_.first_row, key = static_cast<int64_t>(tile_.start_k) + first_key;
    const bool is_k = step < k_steps;
    const int64_t token_stride = is_k ? forward.q_token_stride : params_.dout_token_stride;
    const int64_t head_stride = is_k ? forward.q_head_stride : params_.dout_head_stride;
    const void *const rows = is_k ? forward.q : params_.dout, *const base = is_k ? forward.k.base : forward.v.base;
    const int64_t key_stride = is_k ? forward.k.token_stride : forward.v.token_stride;
    const int64_t kv_head_stride = is_k ? forward.k.head_stride : forward.v.head_stride;
    const int32_t column = (is_k ? step : step - k_steps) * Shape::kColumns;
    const int32_t dim = is_k ? forward.head_dim : forward.value_dim;
    fetch_rows<Shape::kRows>(to, tile_.num_rows, column, dim,
                             static_cast<const T*>(rows) + token * token_stride + head * head_stride, token_stride);
    fetch_rows<Shape::kKeys>(to + Shape::kRowBytes, keys, column, dim,
                             static_cast<const T*>(base) + key * key_stride + kv_head * kv_head_stride, key_stride);
  }

  /// Sets the statistics of the rows of a head.
  __device__ __forceinline__ void store_row_stats(int32_t head) const {
    const int32_t row = ptx::thread();
    if (place_.stats_head == head || row >= Shape::kRows) return;
    QueryRowStats stats = {-INFINITY, 0.0f, 0.0f, kNoPosition};
    if (row < tile_.num_rows) {
      const int32_t query = place_.first_row + row, token = tile_.first_token + query;
      const int64_t index = static_cast<int64_t>(head) * params_.forward.num_tokens + token;
      stats.negative_lse = negative_lse(__ldg(params_.forward.lse + index));
      stats.delta = stored_delta_of<T>(params_, token, head);
      stats.negative_slope = negative_slope(params_.forward, tile_.sequence, head);
      stats.position = query + Visibility(params_.forward, tile_).shift;
    }
    row_stats()[row] = stats;
  }

  /// What comes after a head and a tile, if its first steps can be fetched meanwhile.
  struct Next {
    bool exists;
    int32_t head;
    int32_t first_key;
  };

  /// Adds dS of a head of the sequence in `tile_`. S becomes P before dP is computed, because there are registers for
  /// two of them beside the sums, and for little else.
  __device__ __forceinline__ void add_head(int32_t head, const Next& next) {
    const AttentionParams& forward = params_.forward;
    const auto steps_of = [](int32_t dim) { return (dim + Shape::kColumns - 1) / Shape::kColumns; };
    const int32_t k_steps = steps_of(forward.head_dim), steps = k_steps + steps_of(forward.value_dim);
    const auto fetch_step = [&](int32_t step) {
      const bool is_next = step >= steps;
      if (!is_next || next.exists) {
        fetch(is_next ? next.head : head, is_next ? next.first_key : place_.first_key, is_next ? step - steps : step,
              k_steps, (place_.steps + step) % Shape::kStages);
      }
      ptx::cp_async_commit();
    };
    const auto add_step = [&](Scores& scores, int32_t step) {
      ptx::cp_async_wait<Shape::kStages - 2>();
      __syncthreads();
      fetch_step(step + Shape::kStages - 1);
      const uint32_t rows = ptx::shared_address(shared_) + (place_.steps + step) % Shape::kStages * Shape::kStageBytes;
      add_products(scores, rows + warp_row() * Rows::kPitch, rows + Shape::kRowBytes);
    };
    if (!is_fetched_) {
#pragma unroll 1
      for (int32_t step = 0; step + 1 < Shape::kStages; ++step) fetch_step(step);
    }
    store_row_stats(head);
    Scores p, ds;
    clear(p);
    int32_t step = 0;
#pragma unroll 1
    for (; step < k_steps; ++step) add_step(p, step);
    const QueryRowStats* const stats = row_stats() + warp_row();
    const auto bias = row_bias<T, false, true>(all_params_.bias, place_.first_key, [&](int32_t row) {
      return bias_row_index(all_params_.bias, tile_.sequence, head, place_.first_row + warp_row() + row);
    });
    clear(ds);
    p_and_ds<T, false, bwd_logits_softcap_alibi, true>(p, ds, forward, stats, place_.first_key, bias);
    clear(ds);
#pragma unroll 1
    for (; step < steps; ++step) add_step(ds, step);
    const int32_t lane = ptx::thread() % 32;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ds[0][block][i] = p[0][block][i] * (ds[0][block][i] - stats[i / 2 * 8 + lane / 4].delta);
    }
    const bool is_whole = tile_.num_rows == Shape::kRows && place_.first_key >= place_.keys.common_begin &&
                          place_.first_key + Shape::kKeys <= place_.keys.common_end;
    if (!is_whole) {
      const Visibility visibility(forward, tile_);
      const auto columns_of = [&](int32_t row) {
        const int32_t position = stats[row].position, query = position - visibility.shift;
        const ColumnRange visible = {visibility.begin(query), visibility.end(query)};
        return position != kNoPosition && visible.begin < visible.end ? visible : ColumnRange{0, 0};
      };
      mask(p, ds, columns_of, place_.first_key);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[0][block][i] += ds[0][block][i];
    }
    is_fetched_ = next.exists;
    __syncthreads();
    if (ptx::thread() == 0) {
      place_.stats_head = head;
      place_.steps += steps;
    }
    __syncthreads();
  }

  /// scores += A B^T of the 16 rows at shared address `a` and the kKeys rows at `b`.
  static __device__ __forceinline__ void add_products(Scores& scores, uint32_t a, uint32_t b) {
    Scores small;  // f32: sums of the products with small parts
    if constexpr (!Element<T>::kIs16Bit) clear(small);
    const uint32_t lane = ptx::thread() % 32;
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
    with_bias_type<T>(all_params_.dbias_is_f32, [&](auto type) { store_as<decltype(type)>(); });
  }
  template <typename E>
  __device__ __forceinline__ void store_as() const {
    const BiasSource& bias = all_params_.bias;
    const int32_t lane = ptx::thread() % 32;
    const int64_t matrix = static_cast<int64_t>(place_.sequence) * all_params_.heads + place_.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = place_.first_row + warp_row() + 8 * half + lane / 4;
      if (row >= bias.rows) continue;
      E* const to = static_cast<E*>(all_params_.dbias) + (matrix * bias.rows + row) * bias.keys;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int32_t key = place_.first_key + 8 * block + 2 * (lane % 4);
        const float (&x)[4] = sums_[0][block];
        store_dbias_pair(to, key, bias.keys, make_float2(x[2 * half], x[2 * half + 1]));
      }
    }
  }

  const BiasBackwardParams& all_params_;
  const BackwardParams& params_;
  uint8_t* const shared_;
  QoTile& tile_;
  BiasPlace& place_;
  bool is_fetched_ = false;  // whether the first steps of what comes next have been fetched
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
