// The loop over keys of cluster_decode.cu for 8-bit K and V: as in cluster_loop.cuh, each warp has its own ring of
// blocks, and there is one place that copies blocks. Conversion to f16 takes most instructions, so tiles have eight
// rows (tile_math.cuh), blocks have up to 32 keys, and a copy takes as few instructions as possible:
//
//  - In a usual cache each load of kTokensPerLoad tokens is in one page, and K and V have the same strides. A lane
//    looks up one load, for 32 loads at once. All rows of a load are copied; rows of V of keys that are not the tile's
//    are cleared in shared memory.
//  - Loads from other caches are those of decode (row_pairs.cuh). A lane looks up one token, one block ahead.
#pragma once

#include <cstdint>

#include "cluster_loop.cuh"
#include "decode_block.cuh"
#include "fp8.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "row_pairs.cuh"
#include "shared_rows.cuh"
#include "tile_math.cuh"
#include "whole_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// Yields the slots of the loads of a warp's blocks in order, in a usual cache. A block has kLoads loads.
template <int kLoads>
class LoadSlots {
 public:
  __device__ __forceinline__ LoadSlots(const AttentionParams& params, const WorkTile& work, const WarpBlocks& blocks,
                                       bool is_usual)
      : params_(params),
        work_(work),
        divider_(params.page_size),
        step_(blocks.step),
        first_(blocks.first),
        page_(blocks.page) {
    if (is_usual && !blocks.has_pages) look_up();
  }

  /// Precedes the loads of a block.
  __device__ __forceinline__ void begin_block() {
    if (__builtin_expect(used_ < 32, true)) return;
    const int32_t token = own_token();
    slots_ = TokenSlot{clamp(page_, 0, params_.num_pages - 1), divider_.offset(token, divider_.page(token))};
    used_ = 0;
    // No advance past the end, so that positions cannot overflow.
    if (first_ < work_.keys.end) first_ += 32 / kLoads * step_;
    look_up();
  }
  /// The slot of the first token of the next load.
  __device__ __forceinline__ TokenSlot next() {
    const TokenSlot slot = {__shfl_sync(~0u, slots_.page, used_), __shfl_sync(~0u, slots_.offset, used_)};
    ++used_;
    return slot;
  }

 private:
  /// The first token of the lane's load in the batch that begins at token `first_`.
  __device__ __forceinline__ int32_t own_token() const {
    const int32_t lane = threadIdx.x % 32;
    return first_ + lane / kLoads * step_ + lane % kLoads * kTokensPerLoad;
  }
  /// Starts to read the page of the lane's load.
  __device__ __forceinline__ void look_up() {
    const KeyRange& keys = work_.keys;
    const int32_t token = own_token();
    page_ = 0;
    // Entries of the table from ceil(len_k / page_size) on, and those of pages before the window, may be invalid.
    if (first_ >= keys.end || token >= keys.end || token + kTokensPerLoad <= keys.begin) return;
    const int32_t* const table = params_.block_table + work_.tile.sequence * params_.block_table_stride;
    page_ = __ldg(table + divider_.page(token));
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  const PageDivider<> divider_;
  const int32_t step_;
  int32_t first_;      // of the batch of 32 loads to look up next
  int32_t used_ = 32;  // lanes of `slots_` that have served
  int32_t page_;       // of the lane's load in the batch that was looked up last
  TokenSlot slots_;
};

/// Copies the rows of K and V of loads from a usual cache, V's kValuesOffset bytes after K's. The lanes of one
/// instruction copy K and V of the same tokens, which are adjacent in memory if both are in one buffer. Columns past D
/// or Dv become zeros.
template <int kColumns, int kValuesOffset>
class UsualLoader {
  static constexpr int kChunks = kColumns / 16, kRowsPerStep = 16 / kChunks;
  using Rows = SwizzledRows<kColumns>;
  static_assert(kRowsPerStep * kChunks == 16, "a step is whole rows of K and V");

 public:
  __device__ __forceinline__ UsualLoader(const AttentionParams& params, int32_t kv_head)
      : page_stride_(low_half(params.k.page_stride)), token_stride_(low_half(params.k.token_stride)) {
    const uint32_t lane = threadIdx.x % 32, row = lane / (2 * kChunks), chunk = lane % kChunks;
    const bool is_value = lane / kChunks % 2 != 0;
    const KvSource& source = is_value ? params.v : params.k;
    copies_ = static_cast<int32_t>(16 * chunk) < (is_value ? params.value_dim : params.head_dim);
    from_ = static_cast<const uint8_t*>(source.base) + kv_head * source.head_stride +
            static_cast<uint64_t>(row) * token_stride_ + (copies_ ? 16 * chunk : 0);
    to_ = Rows::offset(row, chunk) + (is_value ? kValuesOffset : 0);
  }

  /// Whether K and V are a usual cache.
  static __device__ __forceinline__ bool takes(const AttentionParams& params) {
    const KvSource &k = params.k, &v = params.v;
    return !has_contiguous_keys(params) && params.page_size % kTokensPerLoad == 0 && params.has_narrow_rows == 0 &&
           k.page_stride == v.page_stride && k.token_stride == v.token_stride && fits_low_half(k.page_stride) &&
           fits_low_half(k.token_stride);
  }

  /// Starts to copy the rows of a load, whose tokens lie at `slot`.
  __device__ __forceinline__ void load(uint32_t destination, const TokenSlot& slot) const {
    const uint32_t page = slot.page, offset = slot.offset;
    const uint8_t* from =
        from_ + static_cast<uint64_t>(page) * page_stride_ + static_cast<uint64_t>(offset) * token_stride_;
#pragma unroll
    for (int step = 0; step < kTokensPerLoad; step += kRowsPerStep) {
      ptx::cp_async_16(Rows::stepped(to_ + destination, step), from, copies_);
      from += static_cast<uint64_t>(kRowsPerStep) * token_stride_;
    }
  }

 private:
  const uint8_t* from_;  // the lane's chunk in the first step of a load, of page 0 and token 0
  uint32_t to_;          // bytes from the beginning of the load in shared memory
  uint32_t page_stride_;
  uint32_t token_stride_;
  bool copies_;  // whether the chunk is one of D or Dv
};

/// Streams the warp's keys of a tile through its ring of kStages stages. A stage is a block of K followed by the block
/// of V, copied as one cp.async group, with their `Scales` if rows have some.
template <typename Shape, typename T, typename Stored, typename Scales, typename State_>
class Cluster8BitLoop {
  using Rows = typename Shape::Rows;
  using Math = TileMath<T, Stored, Rows, 1, Shape::kKeys, Shape::kHeadDim, Shape::kTileRows>;
  static constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages, kLoads = kKeys / kTokensPerLoad;
  static constexpr bool kHoldsQuery = Shape::kQueryRowBytes <= 256;

 public:
  using State = State_;

  /// `rings` is the shared address of the CTA's rings. Issues the first loads of page ids.
  __device__ __forceinline__ Cluster8BitLoop(const AttentionParams& params, const WorkTile& work,
                                             const WarpBlocks& blocks, uint32_t rings, const Scales& scales)
      : params_(params),
        work_(work),
        ring_(rings + threadIdx.x / 32 * Shape::kRingBytes),
        first_key_(blocks.first),
        step_(blocks.step),
        end_(work.keys.end),
        is_usual_(UsualLoader<Shape::kHeadDim, Shape::kBlockBytes>::takes(params)),
        slots_(params, work, blocks, is_usual_),
        usual_(params, work.kv_head),
        others_(params, work, 0),
        scales_(scales) {
    if (!is_usual_) look_up_other(first_key_);
  }

  /// Sets `state` to that of the warp's keys. `store_query` is called when the first copies are under way, and stores
  /// the query rows at shared address `query_rows`.
  template <typename LogitsTransform, typename StoreQuery>
  __device__ __forceinline__ void attend(State& state, uint32_t query_rows, const LogitsTransform& transform,
                                         const StoreQuery& store_query) {
    QueryFragments<1, Shape::kHeadDim, sizeof(T), kHoldsQuery, Shape::kHeadDim, Shape::kTileRows> query(query_rows);
    for_ring_blocks<kStages>(
        first_key_, step_, [&](int32_t key) { return key >= end_; },
        [&] {
          store_query();
          __syncthreads();
          query.fill();
          state = State();
        },
        [&](int32_t stage, int32_t key) { compute(state, query, transform, stage, key); },
        [&](int32_t stage, int32_t& fetched) { fetch(stage, fetched); });
    state.finish();
  }

 private:
  template <typename Query, typename LogitsTransform>
  __device__ __forceinline__ void compute(State& state, const Query& query, const LogitsTransform& transform,
                                          int32_t stage, int32_t key) const {
    const uint32_t block = keys(stage), values = block + Shape::kBlockBytes;
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    const bool is_cut = key + kKeys > end_ || key < work_.keys.begin;
    if (__builtin_expect(is_cut, false)) clear_values(values, key);
    float scores[1][kKeys / 8][4];
    Math::scores(scores, query, block, params_);
    attend_scores<Math, T, Stored>(state, scores, transform, scales_, params_, work_, stage, key, values);
    // All lanes must have read the blocks before they are overwritten.
    __syncwarp();
  }
  /// Clears the rows of V of keys that are not the tile's, in which a usual cache may have anything. Their
  /// probabilities are 0.
  __device__ __forceinline__ void clear_values(uint32_t values, int32_t first) const {
    constexpr int kChunks = Shape::kRowBytes / 16;
    const Interval visible = {work_.keys.begin, end_ - work_.keys.begin};
#pragma unroll 1
    for (uint32_t item = threadIdx.x % 32; item < kKeys * kChunks; item += 32) {
      const int32_t row = item / kChunks;
      if (!visible.holds(first + row)) ptx::clear_shared_16(values + Rows::offset(row, item % kChunks));
    }
    __syncwarp();
  }

  /// Shared address of a stage's block of K; the block of V follows it.
  __device__ __forceinline__ uint32_t keys(int32_t stage) const { return ring_ + stage * 2 * Shape::kBlockBytes; }

  /// Starts to copy the block that begins at `key`, and advances `key`. Past the end of the keys it commits an empty
  /// group, so that the number of pending groups stays the same.
  __device__ __forceinline__ void fetch(int32_t stage, int32_t& key) {
    if (key < end_) {
      if (__builtin_expect(is_usual_, true)) {
        slots_.begin_block();
#pragma unroll
        for (int row = 0; row < kKeys; row += kTokensPerLoad) {
          const TokenSlot slot = slots_.next();
          usual_.load(keys(stage) + row * Rows::kPitch, slot);
          if constexpr (Shape::kHasTokenScales) scales_.load_usual(stage, row, slot);
        }
      } else {
        fetch_other(stage, key);
      }
      key += step_;
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void fetch_other(int32_t stage, int32_t key) {
#pragma unroll 1
    for (int row = 0; row < kKeys; row += kTokensPerLoad) {
      const int32_t lane = row + threadIdx.x % kTokensPerLoad;
      const TokenSlot slot = {__shfl_sync(~0u, ahead_.page, lane), __shfl_sync(~0u, ahead_.offset, lane)};
      others_.load(keys(stage) + row * Rows::kPitch, key + row, slot, false);
      if constexpr (Shape::kHasTokenScales) scales_.load_other(stage, row, key + row, slot, false);
    }
    look_up_other(key + step_);
  }
  /// Looks up a token per lane of the block that begins at `key`.
  __device__ __forceinline__ void look_up_other(int32_t key) {
    const int32_t token = key + static_cast<int32_t>(threadIdx.x % kKeys);
    const Interval visible = {work_.keys.begin, end_ - work_.keys.begin};
    ahead_ = visible.holds(token) ? slot_of(params_, work_.tile, token) : TokenSlot{0, 0};
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  const uint32_t ring_;
  const int32_t first_key_;
  const int32_t step_;
  const int32_t end_;
  const bool is_usual_;
  LoadSlots<kLoads> slots_;
  const UsualLoader<Shape::kHeadDim, Shape::kBlockBytes> usual_;
  const PairLoader<Stored, Shape::kHeadDim, Shape::kBlockBytes> others_;
  TokenSlot ahead_;  // for `others_`: of a token of the next block
  const Scales scales_;
};

}  // namespace xa
