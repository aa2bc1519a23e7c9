// The loop over keys of cluster_decode.cu in plain calls (cluster_call.cuh). As in cluster_loop.cuh, each warp has its
// own ring of blocks, and there is one place that copies blocks. In addition
//
//  - a block of keys is in one page, of which all rows are copied, and rows of V past the last key are cleared later;
//  - a tile has eight rows. Q K^T leaves row g of the probabilities in lanes 4g to 4g + 3, which is where operand B of
//    O^T = V^T P^T has column g. So half as many instructions accumulate O, in half of the registers;
//  - a warp loads its fragments of q from global memory, behind the first copies, so that no warp waits for another.
#pragma once

#include <cmath>
#include <cstdint>

#include "cluster_loop.cuh"
#include "element.cuh"
#include "new_tokens.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "partial_rows.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

/// The softmax state of eight rows and their outputs, transposed.
template <int kHeadDim>
struct EightRowState {
  // Of row lane / 4.
  float max;
  float sum;  // of the lane's columns; `finish` adds up the lanes
  /// Of 16 columns each: columns lane / 4 and lane / 4 + 8 of rows lane % 4 * 2 and the next one.
  float output[kHeadDim / 16][4];

  __device__ __forceinline__ void clear() {
    max = -INFINITY;
    sum = 0.0f;
#pragma unroll
    for (auto& columns : output) columns[0] = columns[1] = columns[2] = columns[3] = 0.0f;
  }
  /// Updates the state with the scores of a block of 16 keys, and turns these into probabilities. A block in which a
  /// row has no visible key leaves its state bitwise unchanged.
  __device__ __forceinline__ void update(float (&scores)[2][4], float log2_unit) {
    float row_max = fmaxf(fmaxf(scores[0][0], scores[0][1]), fmaxf(scores[1][0], scores[1][1]));
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    row_max = fmaxf(max, fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2)));
    if (__any_sync(~0u, row_max != max)) {
      const float rescale = merge_weight(max, row_max, log2_unit);
      const int32_t row = threadIdx.x % 4 * 2;
      const float rescales[2] = {__shfl_sync(~0u, rescale, 4 * row), __shfl_sync(~0u, rescale, 4 * row + 4)};
#pragma unroll
      for (auto& columns : output) {
#pragma unroll
        for (int i = 0; i < 4; ++i) columns[i] *= rescales[i % 2];
      }
      sum *= rescale;
      max = row_max;
    }
    // Subtracted before they are scaled, so that the exponent of a large maximum is as exact as that of a small one.
    const float base = row_max == -INFINITY ? 0.0f : row_max;
    float block_sum = 0.0f;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scores[block][i] = ptx::exp2_approx((scores[block][i] - base) * log2_unit);
        block_sum += scores[block][i];
      }
    }
    sum += block_sum;
  }
  /// Adds up the sums of a row's lanes. Call it once, after the last block.
  __device__ __forceinline__ void finish() {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
};

/// Stores the warp's state of the tile's live rows where `WarpStates` (tile_result.cuh) finds them.
template <typename Shape, int kHeadDim>
__device__ __forceinline__ void store_live_rows(uint8_t* shared, const EightRowState<kHeadDim>& state,
                                                int32_t num_rows) {
  constexpr int kRows = Shape::kRows, kPitch = Shape::kWarpStatesPitch;
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane % 4 * 2;
  float* const outputs = reinterpret_cast<float*>(shared);
  float2* const states = reinterpret_cast<float2*>(outputs + Shape::kWarps * kRows * kPitch);
  float* const to = outputs + (warp * kRows + row) * kPitch + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + i >= num_rows) break;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      to[i * kPitch + 16 * step] = state.output[step][i];
      to[i * kPitch + 16 * step + 8] = state.output[step][2 + i];
    }
  }
  if (lane % 4 == 0 && lane / 4 < num_rows) states[warp * kRows + lane / 4] = make_float2(state.max, state.sum);
}

/// Copies blocks of K and V to the warp's ring, from one page each. All that depends on neither is computed once.
template <typename Shape, typename T>
class PageCopier {
  static constexpr int kKeys = Shape::kKeys, kChunks = Shape::kRowBytes / 16;
  static constexpr int kItems = 2 * kChunks;  // of a row of K and of V
  static constexpr int kSteps = (kItems + 31) / 32, kRowsPerStep = kItems < 32 ? 32 / kItems : 1;
  using Rows = typename Shape::Rows;
  static_assert(!Shape::kIsPlain || (kKeys == 16 && (kItems % 32 == 0 || 32 % kItems == 0)));

 public:
  /// `rings` is the shared address of the CTA's rings.
  __device__ __forceinline__ void init(const AttentionParams& params, uint32_t rings) {
    const uint32_t lane = threadIdx.x % 32, lane_row = lane / kItems;
    policy_ = ptx::evict_first_policy();
    last_page_ = params.num_pages - 1;
    page_size_ = params.page_size;
    page_bytes_ = static_cast<uint32_t>(params.k.page_stride) * static_cast<uint32_t>(sizeof(T));
    token_bytes_ = static_cast<uint32_t>(params.k.token_stride) * static_cast<uint32_t>(sizeof(T));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t item = lane % kItems + 32 * step;
      // With 32 chunks per row or a multiple, a whole step belongs to K or to V.
      const bool is_value = kChunks % 32 == 0 ? 32 * step >= kChunks : item >= kChunks;
      const uint32_t chunk = item % kChunks;
      const uint32_t head_bytes = static_cast<uint32_t>(params.k.head_stride) * static_cast<uint32_t>(sizeof(T));
      const uint64_t from = reinterpret_cast<uint64_t>(is_value ? params.v.base : params.k.base) +
                            static_cast<uint64_t>(blockIdx.x) * head_bytes +
                            static_cast<uint64_t>(lane_row) * token_bytes_ + 16 * chunk;
      const uint32_t to = rings + threadIdx.x / 32 * Shape::kRingBytes + (is_value ? Shape::kBlockBytes : 0) +
                          Rows::offset(lane_row, chunk);
      from_[step] = make_uint2(computed_here(static_cast<uint32_t>(from)), computed_here(from >> 32));
      to_[step] = computed_here(to);
    }
  }
  /// Starts to copy the block of `page` that begins at key `key` of a sequence to a stage.
  __device__ __forceinline__ void copy(int32_t stage, int32_t page, int32_t key) const {
    const uint64_t offset = static_cast<uint64_t>(static_cast<uint32_t>(clamp(page, 0, last_page_))) * page_bytes_ +
                            static_cast<uint64_t>(static_cast<uint32_t>(key & (page_size_ - 1))) * token_bytes_;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t first = static_cast<uint64_t>(from_[step].y) << 32 | from_[step].x;
      const uint8_t* const from = reinterpret_cast<const uint8_t*>(first + offset);
      const uint32_t to = to_[step] + stage * 2 * Shape::kBlockBytes;
#pragma unroll
      for (int row = 0; row < kKeys; row += kRowsPerStep) {
        const uint32_t to_row = (to ^ row % 8 * 16) + row * Rows::kPitch;
        ptx::cp_async_16(to_row, from + static_cast<uint64_t>(row) * token_bytes_, true, policy_);
      }
    }
  }

 private:
  /// `x`, which the compiler would otherwise compute where it is used. At D 256 there are no registers for it.
  static __device__ __forceinline__ uint32_t computed_here(uint32_t x) { return kSteps == 1 ? ptx::opaque(x) : x; }

  uint2 from_[kSteps];  // halves of an address
  uint32_t to_[kSteps];
  uint32_t page_bytes_;
  uint32_t token_bytes_;
  int32_t page_size_;
  int32_t last_page_;
  uint64_t policy_;
};

/// Streams the warp's keys of a tile through its ring of kStages stages. A stage is a block of K followed by the block
/// of V, copied as one cp.async group.
template <typename Shape, typename T>
class ClusterPlainLoop {
  static constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages, kHeadDim = Shape::kHeadDim;
  static constexpr int kChunks = Shape::kRowBytes / 16, kQuerySteps = kHeadDim / 16;
  using Rows = typename Shape::Rows;
  static_assert(kKeys == 16 && sizeof(T) == 2);

 public:
  using State = EightRowState<kHeadDim>;

  /// `end` is the end of the keys of `work`, and `sequence` its sequence. `all` has the parameters that are not known.
  /// `rings` is the shared address of the CTA's rings.
  __device__ __forceinline__ ClusterPlainLoop(const AttentionParams& params, const AttentionParams& all,
                                              const PageCopier<Shape, T>& copier, const WorkTile& work,
                                              const WarpBlocks& blocks, int32_t sequence, int32_t end, uint32_t rings)
      : params_(params),
        all_(all),
        copier_(copier),
        work_(work),
        table_(params.block_table + sequence * params.block_table_stride),
        end_(end),
        first_key_(blocks.first),
        step_(blocks.step),
        pages_(blocks.page),
        used_(blocks.has_pages ? 0 : 32),
        fragment_offset_(ptx::opaque(fragment_offset())),
        ring_(rings + threadIdx.x / 32 * Shape::kRingBytes) {}

  /// Sets `state` to that of the warp's keys. `first_copies_issued` is called when these are under way.
  template <typename Transform, typename FirstCopiesIssued>
  __device__ __forceinline__ void attend(State& state, const Transform& transform,
                                         const FirstCopiesIssued& first_copies_issued) {
    uint32_t query[kQuerySteps][4];
    int32_t stage = 0, key = first_key_, fetched = first_key_;
    // The first rounds only copy, so that the instructions that copy are there once.
#pragma unroll 1
    for (int32_t round = 1 - kStages;; ++round) {
      fetch(stage, fetched);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (round < 0) continue;
      if (round == 0) {
        first_copies_issued();
        load_query(query);
        state.clear();
      }
      if (key >= end_) break;
      compute(state, query, transform, keys(stage), key);
      key += step_;
    }
    state.finish();
  }

 private:
  /// Operand A has row lane / 4 of q in two of four registers. The products of the others are not used. They have the
  /// row again, as different numbers for the compiler: zeros or copies it would set again for each product.
  __device__ __forceinline__ void load_query(uint32_t (&query)[kQuerySteps][4]) const {
    const RowMap map(params_, in_sequence(work_.tile), blockIdx.x);
    const int32_t row = work_.tile.first_row + threadIdx.x % 32 / 4, zero = ptx::opaque(threadIdx.x) >> 10;
    const T* const from = static_cast<const T*>(params_.q) + map.token(row) * params_.q_token_stride +
                          map.head(row) * params_.q_head_stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t columns = 0;
        if (row < map.num_rows) columns = __ldg(reinterpret_cast<const uint32_t*>(from + 16 * step + 8 * half));
        query[step][2 * half] = columns;
        query[step][2 * half + 1] = columns + zero;
      }
    }
  }

  template <typename Transform>
  __device__ __forceinline__ void compute(State& state, const uint32_t (&query)[kQuerySteps][4],
                                          const Transform& transform, uint32_t block, int32_t key) const {
    const bool has_some = has_new_tokens(all_) && key + kKeys > first_new_key(work_.tile);
    if (__builtin_expect(has_some, false)) put_new_keys<Shape, T>(all_, work_, key, block, wait);
    wait();
    const bool is_last = key + kKeys > end_;
    if (__builtin_expect(is_last, false)) clear_values(block + Shape::kBlockBytes, end_ - key);
    float scores[2][4];
    multiply(scores, query, block);
    const bool is_masked = key + kKeys > work_.keys.common_end;
    if (__builtin_expect(is_masked, false)) {
      apply_mask(scores, params_, in_sequence(work_.tile), work_.tile.first_row, key);
    }
    state.update(scores, transform.log2_unit());
    accumulate(state, scores, block + Shape::kBlockBytes);
    // All lanes must have read the blocks before they are overwritten.
    __syncwarp();
  }
  /// scores = Q K^T, in two sums, since nothing else hides the latency of adding up one.
  __device__ __forceinline__ void multiply(float (&scores)[2][4], const uint32_t (&query)[kQuerySteps][4],
                                           uint32_t block) const {
    const uint32_t from = block + fragment_offset_;
    float sums[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, Rows::moved(from, 0, 2 * step));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Element<T>::mma(sums[step % 2][half], query[step], k[2 * half], k[2 * half + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[half][i] = sums[0][half][i] + sums[1][half][i];
    }
  }
  /// output += V^T P^T.
  __device__ __forceinline__ void accumulate(State& state, const float (&p)[2][4], uint32_t block) const {
    const uint32_t from = block + fragment_offset_;
    const uint32_t low = Element<T>::pack(p[0][0], p[0][1]), high = Element<T>::pack(p[1][0], p[1][1]);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, Rows::moved(from, 0, 2 * step));
      Element<T>::mma(state.output[step], v, low, high);
    }
  }
  /// The lane's offset in a block for ldmatrix_x4: matrices are (keys 0 to 7, columns 0 to 7), (same keys, columns 8 to
  /// 15), then keys 8 to 15.
  static __device__ __forceinline__ uint32_t fragment_offset() {
    const uint32_t lane = threadIdx.x % 32;
    return Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  /// Clears the rows from `first` on, in which the cache may have anything. Their probabilities are 0.
  static __device__ __forceinline__ void clear_values(uint32_t block, int32_t first) {
#pragma unroll 1
    for (uint32_t item = first * kChunks + threadIdx.x % 32; item < kKeys * kChunks; item += 32) {
      ptx::clear_shared_16(block + Rows::offset(item / kChunks, item % kChunks));
    }
    __syncwarp();
  }
  static __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
  }

  /// Shared address of a stage's block of K; the block of V follows it.
  __device__ __forceinline__ uint32_t keys(int32_t stage) const { return ring_ + stage * 2 * Shape::kBlockBytes; }

  /// Starts to copy the block that begins at `key`, and advances `key`. Past the end of the keys it commits an empty
  /// group, so that the number of pending groups stays the same.
  __device__ __forceinline__ void fetch(int32_t stage, int32_t& key) {
    if (key < end_) {
      if (__builtin_expect(used_ == 32, false)) look_up(key);
      const int32_t page = __shfl_sync(~0u, pages_, used_);
      ++used_;
      copier_.copy(stage, page, key);
      key += step_;
    }
    ptx::cp_async_commit();
  }
  /// Looks up the pages of the next 32 blocks, of which `key` is in the first, a block per lane.
  __device__ __forceinline__ void look_up(int32_t key) {
    const int32_t token = key + static_cast<int32_t>(threadIdx.x % 32) * step_;
    // Entries of the table past the last key may be invalid.
    pages_ = token < end_ ? __ldg(table_ + PageDivider<true>(params_.page_size).page(token)) : 0;
    used_ = 0;
  }

  const AttentionParams& params_;
  const AttentionParams& all_;
  const PageCopier<Shape, T>& copier_;
  const WorkTile& work_;
  const int32_t* const table_;
  const int32_t end_;
  const int32_t first_key_;
  const int32_t step_;
  int32_t pages_;  // of block i of the last look-up in lane i
  int32_t used_;   // lanes of `pages_` that have served
  const uint32_t fragment_offset_;
  const uint32_t ring_;
};

}  // namespace xa
