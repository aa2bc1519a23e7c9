// The loop over keys of cluster_decode.cu: as in decode (decode_loop.cuh), each warp has its own ring of blocks and
// waits for no other warp. Few short sequences are bound by latency, and most instructions run once, so what counts is
// how many different ones precede the first copy: there is one place that copies blocks, pages are shifted and not
// divided if their size is a power of two, and the query rows are loaded behind the first copies.
#pragma once

#include <cstdint>

#include "new_tokens.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_tile.cuh"

namespace xa {

/// Divides tokens by the page size, of which it may be known that it is a power of two.
template <bool kIsPowerOfTwo = false>
class PageDivider {
 public:
  __device__ __forceinline__ explicit PageDivider(int32_t page_size)
      : page_size_(page_size),
        shift_(kIsPowerOfTwo || (page_size & (page_size - 1)) == 0 ? __ffs(page_size) - 1 : -1) {}
  __device__ __forceinline__ int32_t page(int32_t token) const {
    if (kIsPowerOfTwo || __builtin_expect(shift_ >= 0, true)) return token >> shift_;
    return token / page_size_;
  }
  __device__ __forceinline__ int32_t offset(int32_t token, int32_t page) const { return token - page * page_size_; }

 private:
  int32_t page_size_;
  int32_t shift_;
};

/// A warp's blocks of keys: the first one begins at key `first`, each other one `step` keys after the one before.
struct WarpBlocks {
  int32_t first;
  int32_t step;
  /// If `has_pages`, lane i has the page of load i of kTokensPerLoad keys in `page`, so that no look-up precedes the
  /// first copies.
  bool has_pages;
  int32_t page;
};

/// Yields the slots of a warp's blocks in order. Each lane looks up one token: one per block if blocks cannot straddle
/// pages, so that 32 blocks are looked up at once, otherwise two blocks.
template <int kKeys>
class BlockSlots {
 public:
  __device__ __forceinline__ BlockSlots(const AttentionParams& params, const WorkTile& work, const WarpBlocks& blocks)
      : params_(params),
        work_(work),
        divider_(params.page_size),
        fits_pages_(params.page_size % kKeys == 0),
        step_(blocks.step),
        first_(blocks.first) {
    if (blocks.has_pages) {
      const int32_t token = first_ + static_cast<int32_t>(threadIdx.x % 32) * step_;
      next_ = TokenSlot{blocks.page, divider_.offset(token, divider_.page(token))};
      advance();
    } else {
      look_up();
    }
  }

  /// The slot of the next block: if its tokens lie in one page, every lane gets the slot of the first token; otherwise
  /// lane i gets that of token i % kKeys.
  __device__ __forceinline__ TokenSlot next() {
    if (used_ == 32) {
      slots_ = next_;
      used_ = 0;
    }
    const int32_t lane = fits_pages_ ? used_ : used_ + threadIdx.x % kKeys;
    return TokenSlot{__shfl_sync(~0u, slots_.page, lane), __shfl_sync(~0u, slots_.offset, lane)};
  }
  /// Follows the copies from the slot. Looks up further blocks while those of the last look-up are in use.
  __device__ __forceinline__ void prefetch() {
    if (__builtin_expect(used_ == 0, false)) look_up();
    used_ += fits_pages_ ? 1 : kKeys;
  }
  __device__ __forceinline__ bool fits_pages() const { return fits_pages_; }

 private:
  __device__ __forceinline__ void look_up() {
    const KeyRange& keys = work_.keys;
    if (first_ >= keys.end) return;
    const int32_t lane = threadIdx.x % 32;
    const int32_t token = first_ + (fits_pages_ ? lane * step_ : lane / kKeys * step_ + lane % kKeys);
    advance();
    // Entries of the table from ceil(len_k / page_size) on, and those of pages before the window, may be invalid.
    next_ = TokenSlot{0, 0};
    if (token >= keys.end || token + (fits_pages_ ? kKeys - 1 : 0) < keys.begin) return;
    if (has_contiguous_keys(params_)) {
      next_.offset = work_.tile.start_k + token;
    } else {
      const int32_t page = divider_.page(token);
      next_.page = __ldg(params_.block_table + work_.tile.sequence * params_.block_table_stride + page);
      next_.offset = divider_.offset(token, page);
    }
  }
  /// No advance past the end, so that positions cannot overflow.
  __device__ __forceinline__ void advance() {
    if (first_ < work_.keys.end) first_ += (fits_pages_ ? 32 : 32 / kKeys) * step_;
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  const PageDivider<> divider_;
  const bool fits_pages_;
  const int32_t step_;
  int32_t first_;      // of the blocks to look up next
  int32_t used_ = 32;  // lanes of `slots_` that have served
  TokenSlot slots_;
  TokenSlot next_;
};

/// Copies a block of K and the block of V that follows it in shared memory. The lanes of one instruction copy K and V
/// of the same token, which are adjacent in memory if both are in one buffer. Keys outside of the tile's [begin, end)
/// become zeros without being read.
template <typename T, int kHeadDim, int kKeys, int kValuesOffset>
class BlockLoader {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kRowBytes / 16, kElements = 16 / sizeof(T);
  using Rows = SwizzledRows<kRowBytes>;
  using Grid = LaneGrid<2 * kRowBytes>;
  static constexpr int kSteps = Grid::kStepsPerRow;
  static_assert(kKeys % Grid::kRowsPerStep == 0 && kKeys < 32 && 2 * kChunks % 32 == 0 || 2 * kChunks < 32);

 public:
  __device__ __forceinline__ BlockLoader(const AttentionParams& params, const WorkTile& work)
      : params_(params), work_(work), policy_(ptx::evict_first_policy()) {}

  __device__ __forceinline__ void load(uint32_t destination, int32_t first, const TokenSlot& slot,
                                       bool fits_pages) const {
    const Grid grid;
    // The lane's row among those of an instruction. If that is one, all row numbers are constants.
    const uint32_t lane_row = Grid::kRowsPerStep == 1 ? 0 : grid.row;
    const uint32_t visible = visible_keys(first) >> lane_row;
    const int32_t page = clamp(slot.page, 0, params_.num_pages - 1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int32_t chunk = grid.chunk + 32 * step;
      // With 32 chunks per row or a multiple, a whole step belongs to K or to V.
      const bool is_value = kChunks % 32 == 0 ? 32 * step >= kChunks : chunk >= kChunks;
      const KvSource& source = is_value ? params_.v : params_.k;
      const int32_t row_chunk = chunk - (is_value ? kChunks : 0);
      const bool is_inside = row_chunk * kElements < (is_value ? params_.value_dim : params_.head_dim);
      const uint32_t copied = is_inside ? visible : 0;
      const T* const column = static_cast<const T*>(source.base) + work_.kv_head * source.head_stride +
                              (is_inside ? row_chunk * kElements : 0);
      const uint32_t to = destination + (is_value ? kValuesOffset : 0) + Rows::offset(lane_row, row_chunk);
      if (__builtin_expect(fits_pages, true)) {
        const T* from = column + page * source.page_stride + (slot.offset + lane_row) * source.token_stride;
        const int64_t row_step = Grid::kRowsPerStep * source.token_stride;
#pragma unroll
        for (int row = 0; row < kKeys; row += Grid::kRowsPerStep) {
          ptx::cp_async_16(row_address(to, row), from, (copied & 1u << row) != 0, policy_);
          from += row_step;
        }
      } else {
#pragma unroll 1
        for (int row = 0; row < kKeys; row += Grid::kRowsPerStep) {
          const int32_t page_of_row = __shfl_sync(~0u, page, row + lane_row);
          const int32_t offset = __shfl_sync(~0u, slot.offset, row + lane_row);
          ptx::cp_async_16(row_address(to, row),
                           column + page_of_row * source.page_stride + offset * source.token_stride,
                           (copied & 1u << row) != 0, policy_);
        }
      }
    }
  }

 private:
  /// The address of a chunk `row` rows below the one at `address`; the two row numbers have no bit in common.
  static __device__ __forceinline__ uint32_t row_address(uint32_t address, int row) {
    static_assert(kRowBytes % 128 == 0, "eight chunks are permuted by the row's index");
    return (address ^ row % 8 * 16) + row * Rows::kPitch;
  }
  /// Bit i says whether key `first` + i, which is below the end for i = 0, is one of the tile's.
  __device__ __forceinline__ uint32_t visible_keys(int32_t first) const {
    const int32_t before = clamp(work_.keys.begin - first, 0, kKeys), count = min(work_.keys.end - first, kKeys);
    return (1u << count) - (1u << min(before, count));
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  const uint64_t policy_;
};

/// The tile's query rows on the way to shared memory, 16 bytes per thread at a time. Rows past the last one and columns
/// past head_dim become zeros.
template <typename Shape, typename T>
class QueryRows {
  static constexpr int kChunks = Shape::kQueryRowBytes / 16, kElements = 16 / sizeof(T);
  static constexpr int kItems = Shape::kRows * kChunks, kSteps = (kItems + Shape::kThreads - 1) / Shape::kThreads;
  uint4 chunks_[kSteps];

 public:
  /// Starts to load the rows from row `first_row` of the map on.
  __device__ __forceinline__ void load(const AttentionParams& params, const RowMap& map, int32_t first_row) {
    const int32_t chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int32_t row = first_row + (step * Shape::kThreads + threadIdx.x) / kChunks;
      chunks_[step] = make_uint4(0, 0, 0, 0);
      if (row >= map.num_rows || chunk * kElements >= params.head_dim) continue;
      const T* const from = static_cast<const T*>(params.q) + map.token(row) * params.q_token_stride +
                            map.head(row) * params.q_head_stride;
      chunks_[step] = __ldg(reinterpret_cast<const uint4*>(from + chunk * kElements));
    }
  }
  /// Stores them at the beginning of `shared`. A barrier must follow.
  __device__ __forceinline__ void store(uint8_t* shared) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int32_t row = (step * Shape::kThreads + threadIdx.x) / kChunks;
      if (kItems < Shape::kThreads && row >= Shape::kRows) continue;
      *reinterpret_cast<uint4*>(shared + row * Shape::kQueryPitch + threadIdx.x % kChunks * 16) = chunks_[step];
    }
  }
};

/// Computes the blocks of a warp's ring, which begin at key `first` and `step` keys apart, until `is_past_end(key)`.
/// `fetch(stage, key)` starts to copy a block and advances `key`; `begin()` is called when the first copies are under
/// way, `compute(stage, key)` for each block. The first kStages rounds only copy, so that the instructions that copy
/// are there once.
template <int kStages, typename IsPast, typename Begin, typename Compute, typename Fetch>
__device__ __forceinline__ void for_ring_blocks(int32_t first, int32_t step, const IsPast& is_past_end,
                                                const Begin& begin, const Compute& compute, const Fetch& fetch) {
  int32_t stage = 0, key = first, fetched = first;
#pragma unroll 1
  for (int32_t round = -kStages;; ++round) {
    if (round >= 0) {
      if (round == 0) begin();
      if (is_past_end(key)) break;
      compute(stage, key);
      key += step;
    }
    fetch(stage, fetched);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

/// Streams the warp's keys of a tile through its ring of kStages stages. A stage is a block of K followed by the block
/// of V, copied as one cp.async group.
template <typename Shape, typename T>
class ClusterLoop {
  using Math = TileMath<T, T, typename Shape::Rows, 1, Shape::kKeys, Shape::kHeadDim>;
  static constexpr int kStages = Shape::kStages;
  static constexpr bool kHoldsQuery = Shape::kQueryRowBytes <= 256;

 public:
  using State = SoftmaxState<1, Shape::kHeadDim / 8>;

  /// `rings` is the shared address of the CTA's rings. Issues the first loads of page ids.
  __device__ __forceinline__ ClusterLoop(const AttentionParams& params, const WorkTile& work, const WarpBlocks& blocks,
                                         uint32_t rings)
      : params_(params),
        work_(work),
        ring_(rings + threadIdx.x / 32 * Shape::kRingBytes),
        first_key_(blocks.first),
        step_(blocks.step),
        slots_(params, work, blocks),
        loader_(params, work) {}

  /// Sets `state` to that of the warp's keys. `store_query` is called when the first copies are under way, and stores
  /// the query rows at shared address `query_rows`.
  template <typename LogitsTransform, typename StoreQuery>
  __device__ __forceinline__ void attend(State& state, uint32_t query_rows, const LogitsTransform& transform,
                                         const StoreQuery& store_query) {
    QueryFragments<1, Shape::kHeadDim, sizeof(T), kHoldsQuery> query(query_rows);
    for_ring_blocks<kStages>(
        first_key_, step_, [&](int32_t key) { return key >= work_.keys.end; },
        [&] {
          store_query();
          __syncthreads();
          query.fill();
          state = State();
        },
        [&](int32_t stage, int32_t key) { compute(state, query, transform, keys(stage), key); },
        [&](int32_t stage, int32_t& fetched) { fetch(stage, fetched); });
    state.finish();
  }

 private:
  template <typename Query, typename LogitsTransform>
  __device__ __forceinline__ void compute(State& state, const Query& query, const LogitsTransform& transform,
                                          uint32_t block, int32_t key) const {
    const bool has_some = has_new_tokens(params_) && key + Shape::kKeys > first_new_key(work_.tile);
    if (__builtin_expect(has_some, false)) put_new_keys<Shape, T>(params_, work_, key, block, wait);
    wait();
    float scores[1][Shape::kKeys / 8][4];
    multiply(scores[0], query, block);
    transform.template apply<T>(scores[0], transform.rows(work_, 0), key);
    const bool masked = key < work_.keys.common_begin || key + Shape::kKeys > work_.keys.common_end;
    if (__builtin_expect(masked, false)) apply_mask(scores[0], params_, work_.tile, 0, key);
    state.update(0, scores[0], transform.log2_unit(), work_.tile.num_rows > 8);
    Math::accumulate(state.output, scores, block + Shape::kBlockBytes, params_);
    // All lanes must have read the blocks before they are overwritten.
    __syncwarp();
  }
  /// scores = Q K^T. As `TileMath::scores`, but in two sums, since nothing else hides the latency of adding up one.
  template <typename Query>
  static __device__ __forceinline__ void multiply(float (&scores)[Shape::kKeys / 8][4], const Query& query,
                                                  uint32_t block) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t from = block + Shape::Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float sums[2][1][2][4];
    clear(sums[0]);
    clear(sums[1]);
#pragma unroll
    for (int step = 0; step < Shape::kQueryRowBytes / 32; ++step) {
      uint32_t q[4], k[4];
      query.get(q, step, 0);
      ptx::ldmatrix_x4(k, Shape::Rows::moved(from, 0, 2 * step));
#pragma unroll
      for (int half = 0; half < 2; ++half) Element<T>::mma(sums[step % 2][0][half], q, k[2 * half], k[2 * half + 1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[half][i] = sums[0][0][half][i] + sums[1][0][half][i];
    }
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
    if (key < work_.keys.end) {
      const TokenSlot slot = slots_.next();
      loader_.load(keys(stage), key, slot, slots_.fits_pages());
      slots_.prefetch();
      key += step_;
    }
    ptx::cp_async_commit();
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  uint32_t ring_;
  int32_t first_key_;
  int32_t step_;
  BlockSlots<Shape::kKeys> slots_;
  BlockLoader<T, Shape::kHeadDim, Shape::kKeys, Shape::kBlockBytes> loader_;
};

}  // namespace xa
