// The gradient of a bias of the operands' 16-bit type that sequences or heads share and whose rows begin with chunks of
// 16 bytes, without a soft cap and ALiBi, up to 128 columns: attention_bwd_dbias with larger tiles and without
// branches between products. The design is explained in docs/dev/kernels/bias_gradients.md.
//
// A CTA has rows of one sequence and head of the bias and a number of adjacent tiles of keys. For each tile it visits
// the sequences and heads that share it in order, recomputes their P and dP, and sums dS in registers. It reads delta
// from the workspace, where attention_bwd_dq or attention_bwd_delta has stored it.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  64, 128: the bucket; D and Dv up to it run, padded with zeros in shared memory
// Launch: kThreads threads, a CTA per `tiles_per_cta` tiles of keys, kRows rows, sequence and head of the bias, dynamic
// shared memory for `dbias_stages` stages.

#include "bwd/dbias_rows.cuh"
#include "bwd/dbias_sequences.cuh"
#include "bwd/key_order.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/rows.cuh"
#include "element.cuh"
#include "log2_units.cuh"
#include "params/attention_bwd.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"
#include "shared_rows.cuh"
#include "warp_products.cuh"
#include "work_tile.cuh"

namespace xa {

/// A tile of kRows rows and kKeys keys. The columns of its operands are streamed: 64 of Q and K at a time, then as many
/// of dO and V. In shared memory: the stages, the bias, DbiasState.
struct AlignedDbiasShape {
  static constexpr int kThreads = kAlignedDbiasThreads, kRows = kAlignedDbiasRows, kKeys = kAlignedDbiasKeys;
  static constexpr int kColumns = 64;
  /// A warp has 32 rows and half of the keys.
  static constexpr int kTiles = 2, kBlocks = 8, kKeyWarps = 2;
  static_assert(kThreads / 32 == kRows / (16 * kTiles) * kKeyWarps && kKeys == 8 * kBlocks * kKeyWarps);
  using Rows = SwizzledRows<2 * kColumns>;
  static constexpr int kOperandBytes = kRows * Rows::kPitch, kStageBytes = 2 * kOperandBytes;
  static_assert(kRows == kKeys && kStageBytes == kAlignedDbiasStageBytes);
  /// The bias of a thread's scores: chunks of 8 keys, each in an array of all threads.
  static constexpr int kChunks = 2 * kTiles * kBlocks / 4, kBiasBytes = 16 * kChunks * kThreads;
};

/// A head of a sequence that shares the bias, for a tile.
struct DbiasItem {
  int32_t first_key;  // of the tile
  int32_t slot;       // the sequence; their number past the last one
  int32_t head;
};

/// What all threads know, in shared memory, because registers are scarce.
struct DbiasState {
  DbiasItem items[4];      // item n is n % 4: what is fetched comes up to two items after what is added
  uint32_t first_item;     // of the tile
  float stats[2][2][128];  // of an item: lse and delta of its rows
  int32_t matrix;          // the CTA's sequence and head of the bias
  int32_t first_row;
  int32_t first_key;  // of the tile
  int32_t end_key;
  int32_t begin_sequence, end_sequence;
  int32_t first_head, end_head;
  DbiasSequences sequences;
};
static_assert(AlignedDbiasShape::kBiasBytes + sizeof(DbiasState) == kAlignedDbiasOtherBytes,
              "what the launch asks for");

template <typename T, int kHeadDim>
class AlignedDbias {
  using Shape = AlignedDbiasShape;
  using Rows = Shape::Rows;
  static constexpr int kTiles = Shape::kTiles, kBlocks = Shape::kBlocks;
  using Scores = float[kTiles][kBlocks][4];

 public:
  __device__ __forceinline__ AlignedDbias(const BiasBackwardParams& params, uint8_t* shared)
      : all_params_(params),
        params_(params.backward),
        shared_(shared),
        state_(*reinterpret_cast<DbiasState*>(shared + params.dbias_stages * Shape::kStageBytes + Shape::kBiasBytes)) {
    if (ptx::thread() == 0) {
      const auto tiles = [](int32_t count, int32_t size) { return (count + size - 1) / size; };
      const int32_t keys = params.tiles_per_cta * Shape::kKeys, parts = tiles(params.bias.keys, keys);
      const int32_t blocks = tiles(params.bias.rows, Shape::kRows), index = blockIdx.x;
      const int32_t live = live_sequences(params_.forward);
      state_.first_item = 0;
      state_.matrix = index / parts / blocks;
      state_.first_row = index / parts % blocks * Shape::kRows;
      state_.first_key = index % parts * keys;
      state_.end_key = min(state_.first_key + keys, params.bias.keys);
      const int32_t own = state_.matrix / params.heads;
      state_.first_head = params.heads == 1 ? 0 : state_.matrix % params.heads;
      state_.end_head =
          params.heads == 1 ? params_.forward.num_kv_heads * params_.forward.group : state_.first_head + 1;
      state_.begin_sequence = params.seqs == 1 ? 0 : min(own, live);
      state_.end_sequence = params.seqs == 1 ? live : min(own + 1, live);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    bool is_described = false;
#pragma unroll 1
    while (true) {
      fetch_bias();
      clear(sums_);
      int32_t first = state_.begin_sequence;
#pragma unroll 1
      do {
        if (!is_described) start_sequences(first);
        add_items();
        first += DbiasSequences::kCount;
        is_described = is_single();
      } while (first < state_.end_sequence);
      store();
      const int32_t next = state_.first_key + Shape::kKeys;
      if (next >= state_.end_key) break;
      __syncthreads();
      if (ptx::thread() == 0) {
        state_.first_key = next;
        state_.first_item = item_;
      }
      __syncthreads();
    }
    ptx::cp_async_wait<0>();
  }

 private:
  static __device__ __forceinline__ uint32_t warp() { return static_cast<uint32_t>(ptx::thread()) / 32; }
  static __device__ __forceinline__ int32_t warp_row() { return warp() / Shape::kKeyWarps * 16 * kTiles; }
  static __device__ __forceinline__ int32_t warp_key() { return warp() % Shape::kKeyWarps * 8 * kBlocks; }

  /// Steps of Q and K, and of all operands of an item.
  static constexpr uint32_t kSteps = kHeadDim / Shape::kColumns, kItemSteps = 2 * kSteps;
  __device__ __forceinline__ int32_t first_head() const { return state_.first_head; }
  __device__ __forceinline__ int32_t end_head() const { return state_.end_head; }
  /// Whether all sequences are described at once.
  __device__ __forceinline__ bool is_single() const {
    return state_.end_sequence - state_.begin_sequence <= DbiasSequences::kCount;
  }
  /// An even number, which tells the compiler which steps are fetched where an item has two.
  __device__ __forceinline__ uint32_t stages() const { return all_params_.dbias_stages / 2u * 2u; }
  /// How many steps are fetched before they are computed.
  __device__ __forceinline__ uint32_t ahead() const { return stages() - 1; }
  /// The stage of step `step`, any number, counted from item `item_` on.
  __device__ __forceinline__ uint32_t stage_of(uint32_t step) const {
    return ptx::shared_address(shared_) + ((item_ * kItemSteps + step) & (stages() - 1)) * Shape::kStageBytes;
  }
  __device__ __forceinline__ DbiasItem& item(uint32_t number) const { return state_.items[number % 4]; }
  /// The statistics of an item's rows. With two stages there is one item at a time.
  __device__ __forceinline__ float* stats_of(uint32_t item) const { return state_.stats[item & (stages() / 2 - 1)][0]; }

  /// Describes sequences from `first` on, since all threads have finished with those before, and fetches the first
  /// steps of their items.
  __device__ __forceinline__ void start_sequences(int32_t first) {
    // Steps past the last item have been fetched as zeros.
    if (item_ > 0) ptx::cp_async_wait<0>();
    __syncthreads();
    state_.sequences.describe<Shape::kRows>(params_.forward, first, state_.end_sequence, state_.first_row,
                                            first > state_.begin_sequence);
    __syncthreads();
    if (ptx::thread() == 0) {
      const int32_t key = state_.first_key;
      item(item_) = {key, state_.sequences.next(0, key, Shape::kKeys), first_head()};
    }
#pragma unroll 1
    for (uint32_t step = 0; step < ahead(); ++step) {
      __syncthreads();
      fetch(step);
      find_next(step);
    }
  }

  /// Adds dS of the items of the tile whose sequences are described.
  __device__ __forceinline__ void add_items() {
    const DbiasSequences& sequences = state_.sequences;
#pragma unroll 1
    while (item(item_).slot < sequences.count && item(item_).first_key == state_.first_key) {
      add_item(sequences.of[item(item_).slot]);
      ++item_;
    }
  }

  /// Starts the copies of step `index`, counted from item `item_` on; of zeros if there is no such item. Rows and keys
  /// past the last ones of the sequence are copies of the last ones, and their scores are masked.
  __device__ __forceinline__ void fetch(uint32_t index) {
    const uint32_t step = index % kItemSteps, number = item_ + index / kItemSteps;
    const bool is_k = step < kSteps;
    const DbiasItem& item = this->item(number);
    const bool exists = item.slot < state_.sequences.count;
    const AttentionParams& forward = params_.forward;
    const DbiasSequence& sequence = state_.sequences.of[exists ? item.slot : 0];
    const int32_t kv_head = divide_small(item.head, forward.group_reciprocal);
    const KvSource& kv = is_k ? forward.k : forward.v;
    const uint32_t thread = ptx::thread(), chunk = thread % 8, row = thread / 8;
    const int32_t column = step % kSteps * Shape::kColumns + chunk * 8;
    const bool has_column = exists && column < (is_k ? forward.head_dim : forward.value_dim);
    const int32_t first_column = has_column ? column : 0;
    const uint32_t to = stage_of(index) + Rows::offset(row, chunk);
    const auto fetch_rows = [&](uint32_t to, const void* base, int32_t head, int64_t head_stride, int32_t first,
                                int64_t stride, int32_t row, int32_t count) {
      const T* rows = moved(static_cast<const T*>(base) + first_column, head, head_stride);
      rows = ptx::opaque(moved(rows, first, stride));
#pragma unroll
      for (int32_t i = 0; i < Shape::kRows; i += Shape::kThreads / 8)
        ptx::cp_async_16(to + i * Rows::kPitch, moved(rows, min(row + i, count - 1), stride), has_column);
    };
    fetch_rows(to, is_k ? forward.q : params_.dout, item.head, is_k ? forward.q_head_stride : params_.dout_head_stride,
               sequence.first_token, is_k ? forward.q_token_stride : params_.dout_token_stride, row, sequence.num_rows);
    fetch_rows(to + Shape::kOperandBytes, kv.base, kv_head, kv.head_stride, sequence.start_k + item.first_key,
               kv.token_stride, KeysOfLanes::of_row(row), sequence.len_k - item.first_key);
    if (step == kSteps && exists) {
      const int32_t of_row = min(static_cast<int32_t>(thread % Shape::kRows), sequence.num_rows - 1);
      const int64_t index = static_cast<int64_t>(item.head) * forward.num_tokens + sequence.first_token + of_row;
      const float* const stats = thread < Shape::kRows ? forward.lse : params_.delta;
      ptx::cp_async_4(ptx::shared_address(stats_of(number)) + thread * 4, stats + index);
    }
    ptx::cp_async_commit();
  }
  /// Finds the item after the one whose last step is step `index`.
  __device__ __forceinline__ void find_next(uint32_t index) {
    const uint32_t number = item_ + index / kItemSteps;
    if (index % kItemSteps == kItemSteps - 1 && ptx::thread() == 0) item(number + 1) = after(item(number));
  }
  /// `count` strides, of less than 2^31 bytes, after `from`.
  static __device__ __forceinline__ const T* moved(const T* from, uint32_t count, int64_t stride) {
    const uint32_t bytes = static_cast<uint32_t>(stride) * static_cast<uint32_t>(sizeof(T));
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(from) + static_cast<uint64_t>(count) * bytes);
  }
  /// The item after `of`: the next head, sequence, or, if all sequences are described, tile.
  __device__ __forceinline__ DbiasItem after(DbiasItem of) const {
    const DbiasSequences& sequences = state_.sequences;
    if (of.slot == sequences.count || ++of.head < end_head()) return of;
    of.head = first_head();
    of.slot = sequences.next(of.slot + 1, of.first_key, Shape::kKeys);
    if (!is_single()) return of;
#pragma unroll 1
    while (of.slot == sequences.count && of.first_key + Shape::kKeys < state_.end_key) {
      of.first_key += Shape::kKeys;
      of.slot = sequences.next(0, of.first_key, Shape::kKeys);
    }
    return of;
  }

  /// Waits until all threads have copied step `step` of item `item_` and have finished with the one of that stage
  /// before, starts the copies of a later one, and returns the shared address of the step's stage.
  __device__ __forceinline__ uint32_t next_stage(uint32_t step) {
    if (stages() > 2) {
      ptx::cp_async_wait<2>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    fetch(step + ahead());
    return stage_of(step);
  }

  /// Adds dS of item `item_`, of a sequence.
  __device__ __forceinline__ void add_item(const DbiasSequence& sequence) {
    const AttentionParams& forward = params_.forward;
    Scores p, dp;
    clear(p);
    const auto nothing = [](int) {};
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
      add_products(p, next_stage(step), nothing);
      find_next(step + ahead());
    }
    const float* const stats = stats_of(item_) + warp_row() + ptx::thread() % 32 / 4;
    if (item_ == state_.first_item) ptx::cp_async_wait<0>();  // for the bias
    uint32_t stage = next_stage(kSteps);
    // dP - delta: the sum begins with -delta.
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float delta = stats[Shape::kRows + 16 * tile + 8 * half];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
          dp[tile][block][2 * half] = dp[tile][block][2 * half + 1] = -delta;
      }
    }
#pragma unroll
    for (uint32_t step = kSteps + 1; step < kItemSteps; ++step) {
      add_products(dp, stage, nothing);
      find_next(step - 1 + ahead());
      stage = next_stage(step);
    }
    uint4 chunk;
    float negative;
    // P, a sixteenth beside each group of products.
    add_products(dp, stage, [&](int index) {
      const int tile = index / 8, half = index / 4 % 2, part = index / 2 % 2;
      if (part == 0 && index % 2 == 0) negative = negative_lse(stats[16 * tile + 8 * half]);
      if (index % 2 == 0) chunk = *bias_chunk(tile, half, part);
      const uint32_t pairs[2] = {index % 2 == 0 ? chunk.x : chunk.z, index % 2 == 0 ? chunk.y : chunk.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float (&x)[4] = p[tile][4 * part + index % 2 * 2 + i];
        const float2 pair = unpack<T>(pairs[i]);
        const float first = __fmaf_rn(pair.x, kLog2E, negative), second = __fmaf_rn(pair.y, kLog2E, negative);
        x[2 * half] = ptx::exp2_approx(__fmaf_rn(x[2 * half], forward.softmax_scale_log2, first));
        x[2 * half + 1] = ptx::exp2_approx(__fmaf_rn(x[2 * half + 1], forward.softmax_scale_log2, second));
      }
    });
    find_next(kItemSteps - 1 + ahead());
    const int32_t first_key = state_.first_key;
    const bool is_whole = sequence.num_rows == Shape::kRows && first_key >= sequence.keys.common_begin &&
                          first_key + Shape::kKeys <= sequence.keys.common_end;
    if (is_whole) {
      add(p, dp, [](int) { return [](int) { return false; }; });
    } else {
      add(p, dp, [&](int of_lane) {
        const uint32_t lane = ptx::thread() % 32;
        const int32_t index = warp_row() + of_lane + lane / 4, query = state_.first_row + index;
        const Visibility visibility = sequence.visibility(forward);
        const int32_t begin = visibility.begin(query);
        const int32_t count = index < sequence.num_rows ? max(visibility.end(query) - begin, 0) : 0;
        const int32_t first = first_key + warp_key() + KeysOfLanes::of_lane(lane % 4) - begin;
        return [=](int offset) { return static_cast<uint32_t>(first + offset) >= static_cast<uint32_t>(count); };
      });
    }
  }

  /// Adds dS = P times `dp`, which is dP - delta, unless a score is masked. `mask_of(row of the lane)` returns which of
  /// its keys are.
  template <typename MaskOf>
  __device__ __forceinline__ void add(const Scores& p, const Scores& dp, const MaskOf& mask_of) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto is_masked = mask_of(16 * tile + 8 * half);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            // A selection, because what is masked may be NaN.
            float& sum = sums_[tile][block][i];
            const float next = __fmaf_rn(p[tile][block][i], dp[tile][block][i], sum);
            sum = is_masked(KeysOfLanes::offset(block, i % 2)) ? sum : next;
          }
        }
      }
    }
  }

  /// scores += A B^T of the warp's rows and keys of a stage. Calls `beside(index)` after each of 16 groups of products.
  template <typename Beside>
  static __device__ __forceinline__ void add_products(Scores& scores, uint32_t stage, const Beside& beside) {
    const uint32_t lane = ptx::thread() % 32;
    const uint32_t from_a = stage + warp_row() * Rows::kPitch + Rows::offset(lane % 16, lane / 16);
    const uint32_t from_b =
        stage + Shape::kOperandBytes + warp_key() * Rows::kPitch + Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < Shape::kColumns / 16; ++step) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) ptx::ldmatrix_x4(a[tile], Rows::moved(from_a, 16 * tile, 2 * step));
#pragma unroll
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, Rows::moved(from_b, 16 * pair, 2 * step));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            Element<T>::mma(scores[tile][2 * pair + half], a[tile], b[2 * half], b[2 * half + 1]);
        }
        beside(kBlocks / 2 * step + pair);
      }
    }
  }

  /// The bias of four pairs of adjacent keys of a row of the thread's scores.
  __device__ __forceinline__ uint4* bias_chunk(int tile, int half, int part) const {
    auto* const chunks = reinterpret_cast<uint4*>(shared_ + all_params_.dbias_stages * Shape::kStageBytes);
    return chunks + ((2 * tile + half) * (kBlocks / 4) + part) * Shape::kThreads + ptx::thread();
  }
  /// Calls `visit(tile, half, part, row of the bias, key)` for these chunks.
  template <typename Visit>
  __device__ __forceinline__ void for_chunks(const Visit& visit) const {
    const int32_t lane = ptx::thread() % 32, row = state_.first_row + warp_row() + lane / 4;
    const int32_t key = state_.first_key + warp_key() + KeysOfLanes::of_lane(lane % 4);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int part = 0; part < kBlocks / 4; ++part)
          visit(tile, half, part, row + 16 * tile + 8 * half, key + 32 * part);
      }
    }
  }
  /// Starts to copy the tile's bias to where this thread reads it.
  __device__ __forceinline__ void fetch_bias() const {
    const BiasSource& bias = all_params_.bias;
    const T* const data = static_cast<const T*>(bias.data);
    for_chunks([&](int tile, int half, int part, int32_t row, int32_t key) {
      const bool exists = row < bias.rows && key < bias.keys;
      const int64_t index = (static_cast<int64_t>(state_.matrix) * bias.rows + row) * bias.keys + key;
      ptx::cp_async_16(ptx::shared_address(bias_chunk(tile, half, part)), data + (exists ? index : 0), exists);
    });
  }

  /// Stores the sums.
  __device__ __forceinline__ void store() const {
    with_bias_type<T>(all_params_.dbias_is_f32, [&](auto type) {
      using E = decltype(type);
      const int32_t keys = all_params_.dbias_keys;
      for_chunks([&](int tile, int half, int part, int32_t row, int32_t key) {
        if (row >= all_params_.bias.rows) return;
        const int64_t index = static_cast<int64_t>(state_.matrix) * all_params_.bias.rows + row;
        E* const to = static_cast<E*>(all_params_.dbias) + index * keys + key;
        const auto pair = [&](int i) {
          const float (&x)[4] = sums_[tile][4 * part + i];
          return make_float2(x[2 * half], x[2 * half + 1]);
        };
        if constexpr (sizeof(E) == 2) {
          const auto packed = [&](int i) { return Element<E>::pack(pair(i).x, pair(i).y); };
          if (keys % 8 == 0) {
            if (key < keys) *reinterpret_cast<uint4*>(to) = make_uint4(packed(0), packed(1), packed(2), packed(3));
            return;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) store_dbias_pair(to - key, key + 2 * i, keys, pair(i));
      });
    });
  }

  const BiasBackwardParams& all_params_;
  const BackwardParams& params_;
  uint8_t* const shared_;
  DbiasState& state_;
  uint32_t item_ = 0;  // number of the item whose dS is added
  Scores sums_;
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
}  // namespace

extern "C" __global__ void __launch_bounds__(xa::AlignedDbiasShape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::AlignedDbias<T, XA_HEAD_DIM>(params, shared).run();
}
