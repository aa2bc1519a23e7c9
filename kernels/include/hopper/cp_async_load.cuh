// Loads of K and V row by row with cp.async, from pages that TMA boxes cannot describe.
//
// An SM copies 32 bytes per cycle in this way, so that the copies of a block take three quarters of the time of its
// products, and the load warps have to issue little else. Both copy half of the rows of each block of K and of V:
// blocks arrive in the order in which they are needed, K a block ahead of V. They do not wait for their copies. The
// mbarrier `copied` of a stage completes when the rows have arrived. wgmma reads shared memory through the async proxy,
// so a thread must execute a proxy fence between the copies and wgmma: the publish warp waits for `copied`, fences and
// arrives at the full barrier.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/load_query.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

/// Copies a load warp's half of the rows of blocks. The lanes that copy a row together are as many as an atom's row has
/// 16-byte chunks.
///
/// A lane finds one row per round of 32 rows. The lanes share the offsets of their rows, from the head's first row and
/// in 16-byte chunks, in two lists in shared memory, one for K and one for V: broadcasting by shuffles takes more
/// instructions per row. The host has checked that offsets fit 32 bits.
template <typename Shape>
class CpAsyncLoader {
  using Atom = typename Shape::Atom;
  static constexpr int kLanesPerRow = Atom::kChunks;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  static constexpr int kRows = Shape::kKeys / 2;
  static constexpr int kRounds = Shape::kRowEntries / 32;

 public:
  __device__ __forceinline__ CpAsyncLoader(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                           int32_t warp)
      : params_(params), pipeline_(pipeline), warp_(warp) {}

  /// Starts a tile and finds the rows of `block`, the first one to load.
  __device__ __forceinline__ void begin(const PrefillTile& tile, int32_t block) {
    const AttentionParams& params = params_.attention;
    const int32_t head = divide(tile.work.kv_head, params_.packs_per_kv_head);
    // Recomputed for each tile to save a register.
    const int32_t lane_byte = xa::ptx::opaque(lane() % kLanesPerRow * 16);
    const auto head_base = [&](const KvSource& source) {
      return reinterpret_cast<uint64_t>(source.base) + 2 * head * source.head_stride + lane_byte;
    };
    tile_ = &tile;
    key_base_ = head_base(params.k);
    value_base_ = head_base(params.v);
    pages_of_sequence_ = params.block_table + tile.work.tile.sequence * params.block_table_stride;
    look_up_pages(block);
    find_rows();
  }
  /// Reads the pages of the rows of `block` from the block table.
  __device__ __forceinline__ void look_up_pages(int32_t block) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t row_key = key(block, round), page_index = divide(row_key, params_.page_divisor);
      pages_[round] = __ldg(pages_of_sequence_ + page_index);
      in_page_[round] = row_key - page_index * params_.attention.page_size;
    }
  }
  /// Finds the rows of the block whose pages were looked up last. The list of V receives those of the block before.
  __device__ __forceinline__ void find_rows() {
    const AttentionParams& params = params_.attention;
    uint32_t* const entries = pipeline_.row_entries(warp_) + lane();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t page = clamp(pages_[round], 0, params.num_pages - 1);
      const auto offset = [&](const KvSource& source) {
        return page * static_cast<uint32_t>(source.page_stride >> 3) +
               in_page_[round] * static_cast<uint32_t>(source.token_stride >> 3);
      };
      entries[32 * round] = offset(params.k);
      entries[32 * (kRounds + round)] = value_rows_[round];
      value_rows_[round] = offset(params.v);
    }
    __syncwarp();
  }
  /// Issues the load of the block in the list of K, the CTA's block of K number `count`.
  __device__ __forceinline__ void load_keys(int32_t count) const { copy<true>(count); }
  /// Issues the load of the block in the list of V, the CTA's block of V number `count`.
  __device__ __forceinline__ void load_values(int32_t count) const { copy<false>(count); }

 private:
  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  /// The key of this lane's entry in a round of 32 rows. Entries are in the order in which lanes copy the rows.
  /// Invisible keys are replaced by the nearest visible one, so that only valid pages are looked up and read; the masks
  /// hide what is copied into their rows.
  __device__ __forceinline__ int32_t key(int32_t block, int round) const {
    const int32_t row = lane() % kLanesPerRow * kRowsAtOnce + lane() / kLanesPerRow;
    return clamp(block * Shape::kKeys + warp_ * kRows + 32 * round + row, tile_->visible_begin, tile_->visible_end - 1);
  }
  /// Copies this warp's rows of a block of K or V.
  template <bool kOfKeys>
  __device__ __forceinline__ void copy(int32_t count) const {
    using Block = std::conditional_t<kOfKeys, typename Shape::KeyBlock, typename Shape::ValueBlock>;
    const PipelineState<kOfKeys ? Shape::kStages : Shape::kValueStages> state(count);
    const uint32_t* const entries = pipeline_.row_entries(warp_) + (kOfKeys ? 0 : Shape::kRowEntries);
    // Chunks from this lane's first one to the end of the row. Those of the tile past it become zeros.
    const uint32_t dim = kOfKeys ? params_.attention.head_dim : params_.attention.value_dim;
    const int32_t chunks_left = dim / 8 - lane() % kLanesPerRow;
    const uint64_t base = kOfKeys ? key_base_ : value_base_;
    (kOfKeys ? pipeline_.keys_empty(state) : pipeline_.values_empty(state)).producer_wait();
    // Destination of this lane's chunk in each of its rows of a row group.
    uint32_t to[8 / kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < 8 / kRowsAtOnce; ++i) {
      to[i] = (kOfKeys ? pipeline_.keys(state.stage) : pipeline_.values(state.stage)) +
              warp_ * (kRows / 8 * Block::kStrideByteOffset) +
              Atom::offset(i * kRowsAtOnce + lane() / kLanesPerRow, lane() % kLanesPerRow);
    }
#pragma unroll
    for (int first = 0; first < kRows; first += 4 * kRowsAtOnce) {
      // The entries of four rows that this lane copies, which `key` places next to each other.
      const int step = first % 32 / kRowsAtOnce;
      const uint4 offsets =
          reinterpret_cast<const uint4*>(entries + first / 32 * 32 + step)[lane() / kLanesPerRow * kLanesPerRow / 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + i * kRowsAtOnce;
        if (row >= kRows) break;
        const uint64_t from = base + uint64_t{16} * (&offsets.x)[i];
        const uint32_t row_to = to[row % 8 / kRowsAtOnce] + row / 8 * Block::kStrideByteOffset;
#pragma unroll
        for (int column = 0; column < Block::kAtomColumns; ++column) {
          xa::ptx::cp_async_16(row_to + column * Block::kLeadingByteOffset,
                               reinterpret_cast<const void*>(from + column * Atom::kRowBytes),
                               column * Atom::kChunks < chunks_left);
        }
      }
    }
    ptx::cp_async_arrive((kOfKeys ? pipeline_.keys_copied(state) : pipeline_.values_copied(state)).address);
    // `find_rows` replaces the entries.
    __syncwarp();
  }

  const HopperPrefillParams& params_;
  const Pipeline<Shape>& pipeline_;
  const int32_t warp_;
  const PrefillTile* tile_;
  const int32_t* pages_of_sequence_;
  uint64_t key_base_, value_base_;  // addresses of this lane's chunk of the head's first rows
  int32_t pages_[kRounds];          // of this lane's rows
  uint32_t in_page_[kRounds];
  uint32_t value_rows_[kRounds] = {};  // of the block in the list of K
};

/// Loads the blocks of all tiles of the CTA. Run by load warps 0 and 1.
template <typename Shape>
__device__ __forceinline__ void load_rows(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                          int32_t warp) {
  CpAsyncLoader<Shape> loader(params, pipeline, warp);
  int32_t block_count = 0;
  bool has_tile = true;
  // `count` counts the scheduler's tiles, `tile_count` those that have keys.
#pragma unroll 1
  for (int32_t count = 0, tile_count = 0; has_tile; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const typename Shape::Tile& tile = pipeline.tile(tile_state);
    has_tile = tile.work.tile.num_rows > Shape::kNoRows;
    const int32_t first = tile.first_block, last = tile.end_block - 1;
    if (has_tile && last >= first) {
      // The stages of the tile's first blocks of V have O of the tile before.
      const bool waits_for_output = stages_output_in_values<Shape>(params) && tile_count > 0;
      loader.begin(tile, last);
      // K of `block`, then V of the block before.
#pragma unroll 1
      for (int32_t block = last; block >= first - 1; --block) {
        const bool has_keys = block >= first;
        if (has_keys) {
          loader.load_keys(block_count);
          loader.look_up_pages(block - 1);
        }
        if (block < last) {
          const bool is_first = block == last - 1;
          if (waits_for_output && is_first) pipeline.output_left(0, tile_count - 1).wait();
          loader.load_values(block_count - 1);
          if (waits_for_output && is_first) pipeline.output_left(1, tile_count - 1).wait();
        }
        if (has_keys) {
          loader.find_rows();
          ++block_count;
        }
      }
      ++tile_count;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

/// Loads Q of all tiles of the CTA and publishes the blocks that `load_rows` loads, if the call loads rows. Run by the
/// publish warp.
template <typename Shape>
__device__ __forceinline__ void publish_rows(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  if (!loads_by_cp_async<Shape>(params)) return;
  if (params.query_boxes_are_columns != 0) clear_rest_of_query<Shape>(params.attention, pipeline);
  // One thread is enough, and cannot diverge.
  if (threadIdx.x % 32 != 0) return;
  const auto publish = [](const Barrier& copied, const Barrier& full) {
    copied.wait();
    ptx::fence_proxy_async_shared();
    full.arrive();
  };
  int32_t keys_count = 0, values_count = 0;
  const auto publish_values = [&] {
    const PipelineState<Shape::kValueStages> state(values_count++);
    publish(pipeline.values_copied(state), pipeline.values_full(state));
  };
  bool has_tile = true;
#pragma unroll 1
  for (int32_t count = 0, tile_count = 0; has_tile; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const typename Shape::Tile& tile = pipeline.tile(tile_state);
    has_tile = tile.work.tile.num_rows > Shape::kNoRows;
    const int32_t first = tile.first_block, last = tile.end_block - 1;
    if (has_tile && last >= first) {
      const int32_t wanted_at = min(first + Shape::kBlocksToGo, last);
      load_query<Shape>(params, pipeline, tile, tile_count++);
      // In the order of the loads.
#pragma unroll 1
      for (int32_t block = last; block >= first; --block) {
        if (block == wanted_at) pipeline.want_tile(count);
        const PipelineState<Shape::kStages> state(keys_count++);
        publish(pipeline.keys_copied(state), pipeline.keys_full(state));
        if (block < last) publish_values();
      }
      publish_values();
    } else {
      pipeline.want_tile(count);
    }
    pipeline.tile_empty(tile_state).arrive();
  }
}

}  // namespace xa::hopper
