// The gradient of a bias that sequences or heads share, from dS that attention_bwd_dkdv has stored (ScoreGradients):
// the sums over them, in f32 and in an order that only shapes decide. The design is explained in
// docs/dev/kernels/bias_gradients.md.
//
// A lane has twice 8 keys of a row, whose sequences and heads, the items, it visits in order. Where that would leave
// SMs without work, several warps have the same row, each every so many heads, or sequences where no head shares; their
// sums are added in the order of warps.
//
// Compiled once for each value of
//   XA_DTYPE   f16, bf16
// Launch: kDbiasSumThreads threads, a CTA per `tiles_per_cta` times kDbiasSumKeys keys and as many rows of a sequence
// and head of the bias as it has warps, over `dbias_warps_per_row`.

#include "bwd/dbias_rows.cuh"
#include "bwd/dbias_sequences.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/row_blocks.cuh"
#include "bwd/score_gradients.cuh"
#include "chunk_window.cuh"
#include "element.cuh"
#include "params/bias.cuh"

namespace xa {

struct DbiasSumState {
  static constexpr int32_t kWarps = kDbiasSumThreads / 32;

  DbiasSequences sequences;
  ScoreGradientRow rows[DbiasSequences::kCount][kWarps];  // of the sequences' head 0
  float sums[kWarps][32][9];  // a lane's 8; the ninth place keeps loads and stores free of bank conflicts
};

template <typename T>
class DbiasSum {
  static constexpr int32_t kWarps = DbiasSumState::kWarps, kHalves = 2, kHalfKeys = kDbiasSumKeys / kHalves;
  static_assert(kHalfKeys == 32 * 8);

 public:
  __device__ __forceinline__ DbiasSum(const BiasBackwardParams& params, DbiasSumState& state)
      : params_(params), forward_(params.backward.forward), state_(state) {
    const int32_t warps_per_row = params.dbias_warps_per_row, rows = kWarps / warps_per_row;
    const int32_t blocks = (params.bias.rows + rows - 1) / rows;
    const int32_t cta_keys = params.tiles_per_cta * kDbiasSumKeys;
    const int32_t parts = (params.bias.keys + cta_keys - 1) / cta_keys;
    const int32_t block = blockIdx.x / parts, warp = threadIdx.x / 32;
    matrix_ = block / blocks;
    first_row_ = block % blocks * rows;
    row_ = first_row_ + warp / warps_per_row;
    first_key_ = blockIdx.x % parts * cta_keys;
    part_ = warp % warps_per_row;
  }

  __device__ __forceinline__ void run() {
    find_key_period<kDbiasSumThreads>(params_, [](int32_t) {});
    const int32_t live = live_sequences(forward_), own = matrix_ / params_.heads;
    const int32_t begin = params_.seqs == 1 ? 0 : min(own, live), end = params_.seqs == 1 ? live : min(own + 1, live);
    const int32_t end_key = min(first_key_ + params_.tiles_per_cta * kDbiasSumKeys, params_.bias.keys);
    const bool is_single = end - begin <= DbiasSequences::kCount;
    bool shifts = false;
#pragma unroll 1
    for (int32_t tile_key = first_key_; tile_key < end_key; tile_key += kDbiasSumKeys) {
      key_ = tile_key + static_cast<int32_t>(threadIdx.x) % 32 * 8;
#pragma unroll
      for (int i = 0; i < 8 * kHalves; ++i) sums_[i / 8][i % 8] = 0.0f;
#pragma unroll 1
      for (int32_t first = begin; first < end; first += DbiasSequences::kCount) {
        if (!is_single || tile_key == first_key_) {
          __syncthreads();
          state_.sequences.template describe<kWarps>(forward_, first, end, first_row_, first != begin);
          __syncthreads();
          shifts = __syncthreads_or(describe_rows()) != 0;
        }
        if (row_ >= params_.bias.rows) continue;
        if (shifts) {
          add_sequences<true>();
        } else {
          add_sequences<false>();
        }
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (params_.dbias_warps_per_row > 1) add_warps(sums_[half]);
        if (part_ == 0 && row_ < params_.bias.rows) store(sums_[half], key_ + half * kHalfKeys);
      }
    }
  }

 private:
  /// Finds the CTA's rows of the sequences that are described. Returns whether keys of one that this thread has found
  /// do not begin with a chunk.
  __device__ __forceinline__ bool describe_rows() const {
    bool shifts = false;
    for (int32_t index = threadIdx.x; index < state_.sequences.count * kWarps; index += kDbiasSumThreads) {
      const int32_t slot = index / kWarps, row = index % kWarps, query = first_row_ + row;
      const DbiasSequence& sequence = state_.sequences.of[slot];
      ScoreGradientRow found = {0, 0, 0};
      if (row < sequence.num_rows) {
        const Visibility visibility = sequence.visibility(forward_);
        const int64_t element = static_cast<int64_t>(sequence.first_token + row) * params_.ds.pitch;
        // dS has no columns past those of the bias.
        const int32_t end_key = min(visibility.end(query), params_.bias.keys);
        const int32_t key_0 = column_of_key_0(params_, sequence.start_k);
        found = ScoreGradientRow::of(element, visibility.begin(query), end_key, key_0);
        shifts |= key_0 != 0;
      }
      state_.rows[slot][row] = found;
    }
    return shifts;
  }

  /// The lane's keys of the row in dS of a sequence and head: chunks kHalfKeys apart, of which the row attends to
  /// columns [begin, end), counted from the first chunk; its keys begin at element `shift`.
  struct Place {
    const T* from;
    int32_t begin, end, shift;

    __device__ __forceinline__ uint4 chunk(int32_t column) const {
      const bool exists = column < end && column + 8 > begin;
      return exists ? __ldg(reinterpret_cast<const uint4*>(from + column)) : make_uint4(0, 0, 0, 0);
    }
  };
  __device__ __forceinline__ Place place_of(int32_t slot, int32_t head) const {
    if (slot >= state_.sequences.count) return {nullptr, 0, 0, 0};
    const ScoreGradientRow row = state_.rows[slot][row_ - first_row_];
    const int64_t of_head = head * head_elements();
    const T* const from = static_cast<const T*>(params_.ds.data) + row.element + of_head + key_;
    return {from, row.begin - key_, row.end - key_, column_of_key_0(params_, state_.sequences.of[slot].start_k)};
  }
  __device__ __forceinline__ int64_t head_elements() const {
    return static_cast<int64_t>(forward_.num_tokens) * params_.ds.pitch;
  }

  /// Adds the items of the sequences that are described. Everything but the keys is the same for all lanes. Without
  /// `kShifts` the keys of all sequences begin with a chunk.
  template <bool kShifts>
  __device__ __forceinline__ void add_sequences() {
    constexpr int kAtOnce = kShifts ? 2 : 4;
    const bool sums_heads = params_.heads == 1;
    const int32_t num_heads = forward_.num_kv_heads * forward_.group, own_head = matrix_ % params_.heads;
    const int32_t step = params_.dbias_warps_per_row, head_step = sums_heads ? step : num_heads;
    const int32_t first_head = sums_heads ? part_ : own_head, slot_step = sums_heads ? 1 : step;
    const int64_t stride = step * head_elements();
    int32_t slot = sums_heads ? 0 : part_, head = first_head;
    Place place = place_of(slot, head);
#pragma unroll 1
    while (slot < state_.sequences.count) {
      ChunkWindow windows[kAtOnce][kHalves];
      int32_t shifts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          windows[i][half].first = place.chunk(half * kHalfKeys);
          if constexpr (kShifts) windows[i][half].second = place.chunk(half * kHalfKeys + 8);
        }
        shifts[i] = place.shift;
        head += head_step;
        place.from += stride;
        if (head < num_heads) continue;
        head = first_head;
        slot += slot_step;
        place = place_of(slot, head);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          add<kShifts>(windows[i][half], shifts[i], sums_[half]);
        }
      }
    }
  }
  template <bool kShifts>
  static __device__ __forceinline__ void add(const ChunkWindow& window, int32_t shift, float (&sums)[8]) {
    const uint4 chunk = kShifts ? window.from(shift) : window.first;
    const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float2 x = unpack<T>(pairs[pair]);
      sums[2 * pair] += x.x;
      sums[2 * pair + 1] += x.y;
    }
  }

  /// Adds the sums of the row's other warps to those of the first one.
  __device__ __forceinline__ void add_warps(float (&sums)[8]) const {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();  // the first warps have read those of the keys before
#pragma unroll
    for (int i = 0; i < 8; ++i) state_.sums[warp][lane][i] = sums[i];
    __syncthreads();
    if (part_ != 0) return;
#pragma unroll 1
    for (int32_t other = warp + 1; other < warp + params_.dbias_warps_per_row; ++other) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += state_.sums[other][lane][i];
    }
  }

  /// Stores the sums of 8 keys from `key` on.
  __device__ __forceinline__ void store(const float (&sums)[8], int32_t key) const {
    with_bias_type<T>(params_.dbias_is_f32, [&](auto type) {
      using E = decltype(type);
      const int64_t index = static_cast<int64_t>(matrix_) * params_.bias.rows + row_;
      E* const to = static_cast<E*>(params_.dbias) + index * params_.dbias_keys;
      if constexpr (sizeof(E) == 2) {
        store_chunks(to, sums, key);
      } else {
        store_elements(to, sums, key);
      }
    });
  }

  /// Stores the sums of a row of f32, which may begin at any element. They pass through shared memory, so that adjacent
  /// lanes store adjacent elements.
  __device__ __forceinline__ void store_elements(float* row, const float (&sums)[8], int32_t key) const {
    const int32_t lane = threadIdx.x % 32, first = key - lane * 8;
    auto& of_warp = state_.sums[threadIdx.x / 32];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) of_warp[lane][i] = sums[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int32_t index = i * 32 + lane;
      if (first + index < params_.dbias_keys) row[first + index] = of_warp[index / 8][index % 8];
    }
  }

  /// Stores the sums of a row of 16-bit elements, which may begin at any element: a lane stores the chunk of 16 bytes
  /// that its first keys and the last ones of the lane before are in, and the elements at either end one by one.
  template <typename E>
  __device__ __forceinline__ void store_chunks(E* row, const float (&sums)[8], int32_t key) const {
    const int32_t lane = threadIdx.x % 32, keys = params_.dbias_keys;
    const auto packed = [&](int i) { return Element<E>::pack(sums[2 * i], sums[2 * i + 1]); };
    ChunkWindow window;
    window.second = make_uint4(packed(0), packed(1), packed(2), packed(3));
    const auto before = [](uint32_t x) { return __shfl_up_sync(~0u, x, 1); };
    const uint4& own = window.second;
    window.first = make_uint4(before(own.x), before(own.y), before(own.z), before(own.w));
    const auto misaligned = static_cast<int32_t>(reinterpret_cast<uint64_t>(row) / sizeof(E) % 8);
    const bool stores = (lane > 0 || misaligned == 0) && key - misaligned + 8 <= keys;
    const uint4 chunk = misaligned == 0 ? own : window.from(8 - misaligned);
    if (stores) *reinterpret_cast<uint4*>(row + key - misaligned) = chunk;
    const bool next_stores = __shfl_down_sync(~0u, stores, 1) && lane < 31;
    const uint32_t pairs[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_stored = i < 8 - misaligned ? stores : next_stores;
      if (!is_stored && key + i < keys) row[key + i] = E{static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16)};
    }
  }

  const BiasBackwardParams& params_;
  const AttentionParams& forward_;
  DbiasSumState& state_;
  int32_t matrix_, first_row_, row_, first_key_, key_, part_;
  float sums_[kHalves][8];
};

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
}  // namespace

extern "C" __global__ void __launch_bounds__(xa::kDbiasSumThreads, 3)
    XA_ENTRY(const __grid_constant__ xa::BiasBackwardParams params) {
  __shared__ xa::DbiasSumState state;
  xa::DbiasSum<T>(params, state).run();
}
