// The load warps of a prefill CTA: by TMA, the K warp loads Q and K, the V warp loads V (row by row:
// cp_async_load.cuh). Blocks of a tile are loaded from the last to the first, because the last blocks of a causal tile
// are those that need a mask.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/cp_async_load.cuh"
#include "hopper/key_range_tile.cuh"
#include "hopper/load_query.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shape.cuh"
#include "hopper/swizzle_atom.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

enum class Operand { keys, values };

/// Loads blocks of K or V by TMA. Paged: a block is several boxes, one per lane, each within a page.
template <typename Shape, Operand kOperand, bool kPaged>
class TmaLoader {
  static constexpr bool kOfKeys = kOperand == Operand::keys;
  static constexpr int kRowGroups = Shape::kKeys / 8;
  using Block = std::conditional_t<kOfKeys, typename Shape::LoadedKeyBlock, typename Shape::LoadedValueBlock>;
  static constexpr int kStages = kOfKeys ? Shape::kLoadedKeyStages : Shape::kLoadedValueStages;
  static constexpr int kAtomElements = Shape::kHeadDim / Shape::kQueryAtomColumns;
  /// Memory of keys that no query of the sequence attends to may hold NaN, and 0 * NaN is NaN, so the V warp clears
  /// their rows.
  static constexpr bool kClears = !kOfKeys && Shape::kHasLeanLoop && !Shape::kConvertsKv;
  using Tile = typename Shape::Tile;

 public:
  __device__ __forceinline__ TmaLoader(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline)
      : params_(params),
        pipeline_(pipeline),
        lane_(threadIdx.x % 32),
        box_row_groups_(params.box_row_groups),
        boxes_per_block_(kPaged ? kRowGroups / params.box_row_groups : 1),
        column_boxes_(params.clips_columns != 0 ? Block::kAtomColumns : 1) {}

  /// Starts a tile whose first block to load is `block`.
  __device__ __forceinline__ void begin(const Tile& tile, int32_t block) {
    head_ = divide(tile.work.kv_head, params_.packs_per_kv_head);
    reads_once_ = Shape::kSplitsKeys && tile.work.tile.len_q <= params_.attention.tile_queries.divisor;
    tile_ = &tile;
    if constexpr (kPaged) {
      table_ = params_.attention.block_table + tile.work.tile.sequence * params_.attention.block_table_stride;
      head_atom_column_ = head_ * (kOfKeys ? params_.k_head_atom_columns : params_.v_head_atom_columns);
    } else {
      start_ = tile.work.tile.start_k;
    }
    next_box_ = find_box(block);
  }

  /// Issues the load of `block`, the CTA's block number `count`. Blocks of a tile come in descending order without
  /// gaps.
  __device__ __forceinline__ void load(int32_t block, int32_t count) {
    const PipelineState<kStages> state(count);
    const Box box = next_box_;
    next_box_ = find_box(block - 1);
    const int32_t first_key = block * Shape::kKeys;
    bool clears = kClears && (first_key < tile_->visible_begin || first_key + Shape::kKeys > tile_->visible_end);
    if constexpr (kClears && Shape::kTakesKeyRanges) clears |= tile_->has_gaps != 0;
    Barrier full = kOfKeys ? pipeline_.loaded_keys_full(state) : pipeline_.loaded_values_full(state);
    if (clears) full = pipeline_.partial_values_full(partial_blocks_);
    const uint32_t to = kOfKeys ? pipeline_.loaded_keys(state.stage) : pipeline_.loaded_values(state.stage);
    const TensorMap& map = kOfKeys ? params_.k : params_.v;
    if (loads_for_cluster()) {
      wait_for_stage(count);
    } else {
      // The other CTA loads the block into both, perhaps before this one expects it, but not before it is complete
      // here.
      full.producer_wait();
    }
    // The phase of `full` cannot complete before lane 0's arrival below, so no lane misses the phase of `empty`.
    __syncwarp();
    if constexpr (kPaged) {
      const uint32_t visible = __ballot_sync(~0u, box.row_group >= 0);
      if (lane_ == 0) full.arrive_expect_tx(__popc(visible) * box_row_groups_ * (Block::kBytes / kRowGroups));
      __syncwarp();
      if (box.row_group >= 0) {
        const int32_t page = clamp(box.page, 0, params_.attention.num_pages - 1);
        for_each_box(to + lane_ * box_row_groups_ * Block::kStrideByteOffset, [&](uint32_t box_to, int32_t column) {
          load_box(box_to, map, full.address, column, 0, head_atom_column_, box.row_group, page);
        });
      }
    } else if (lane_ == 0) {
      full.arrive_expect_tx(Block::kBytes);
      if (loads_for_cluster()) {
        for_each_box(to, [&](uint32_t box_to, int32_t column) {
          load_box(box_to, map, full.address, column, start_ + first_key, 0, head_, 0);
        });
      }
    }
    if (!clears) return;
    ++partial_blocks_;
    full.wait();
    const auto clear_rows = [&](int32_t first, int32_t end) {
      clear_whole_tile_rows<typename Shape::Atom, Block, Shape::kKeys>(to, first, end);
    };
    clear_rows(0, tile_->visible_begin - first_key);
    clear_rows(tile_->visible_end - first_key, Shape::kKeys);
    if constexpr (Shape::kTakesKeyRanges) clear_gaps<Shape, Block>(params_, *tile_, to, first_key);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) pipeline_.values_full(state).arrive();
  }

 private:
  /// Blocks that are loaded ahead if no other CTA reads them: 128 KB of K and V. With more, K and V of a key, which may
  /// be adjacent in DRAM, are further apart in time (D 128: 4 % slower with three blocks; D 64: 8 % with two).
  static constexpr int kBlocks = (128 << 10) / (Shape::LoadedKeyBlock::kBytes + Shape::LoadedValueBlock::kBytes);
  static constexpr int kBlocksAhead = kBlocks < 2 ? 2 : kBlocks < kStages ? kBlocks : kStages;

  /// Whether this CTA loads the operand, for all CTAs of the cluster.
  static __device__ __forceinline__ bool loads_for_cluster() {
    if constexpr (Shape::kClusterSize == 1) return true;
    return blockIdx.y == (kOfKeys ? Pipeline<Shape>::kKeysRank : Pipeline<Shape>::kValuesRank);
  }

  /// Waits until block `count` may be loaded.
  __device__ __forceinline__ void wait_for_stage(int32_t count) const {
    if constexpr (Shape::kSplitsKeys) {
      const int32_t blocks_ahead = reads_once_ ? kBlocksAhead : kStages;
      if (count < blocks_ahead) return;
      const PipelineState<kStages> last(count - blocks_ahead);
      (kOfKeys ? pipeline_.loaded_keys_empty(last) : pipeline_.loaded_values_empty(last)).wait();
    } else {
      const PipelineState<kStages> state(count);
      (kOfKeys ? pipeline_.loaded_keys_empty(state) : pipeline_.loaded_values_empty(state)).producer_wait();
    }
  }
  /// Loads a box, which another CTA reads too unless the sequence has one tile.
  __device__ __forceinline__ void load_box(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t x0, int32_t x1,
                                           int32_t x2, int32_t x3, int32_t x4) const {
    if constexpr (Shape::kClusterSize > 1) {
      ptx::tma_load_pair(to, map, barrier, x0, x1, x2, x3, x4);
    } else if (Shape::kSplitsKeys && reads_once_) {
      ptx::tma_load(to, map, barrier, x0, x1, x2, x3, x4, xa::ptx::evict_first_policy());
    } else {
      ptx::tma_load(to, map, barrier, x0, x1, x2, x3, x4);
    }
  }
  /// Calls `load(address, first column)` for the box of all atom columns, or for that of each one.
  template <typename Load>
  __device__ __forceinline__ void for_each_box(uint32_t to, const Load& load) const {
#pragma unroll 1
    for (int32_t box = 0; box < column_boxes_; ++box) {
      load(to + box * Block::kLeadingByteOffset, box * kAtomElements);
    }
  }
  /// This lane's box of a block.
  struct Box {
    int32_t page;  // as the block table has it: clamped when the box is loaded, because the next block's entry is still
                   // on its way while this one is loaded
    int32_t row_group;  // first row group in the page; -1 where no key of the box is visible and nothing is loaded
  };
  __device__ __forceinline__ Box find_box(int32_t block) const {
    Box box = {0, -1};
    if constexpr (kPaged) {
      const int32_t first = block * Shape::kKeys + lane_ * 8 * box_row_groups_;
      // Entries of the block table past ceil(len_k / page_size) and for pages without a visible key are not read.
      if (lane_ < boxes_per_block_ && first < tile_->visible_end &&
          first + 8 * box_row_groups_ > tile_->visible_begin) {
        const uint32_t index = divide(first, params_.page_divisor);
        box.page = __ldg(table_ + index);
        box.row_group = (first - index * params_.page_divisor.divisor) / 8;
      }
    }
    return box;
  }

  const HopperPrefillParams& params_;
  const Pipeline<Shape>& pipeline_;
  const int32_t lane_;
  const int32_t box_row_groups_;
  const int32_t boxes_per_block_;
  const int32_t column_boxes_;
  Box next_box_;                // of the block that is loaded next: its page is looked up one block ahead
  int32_t partial_blocks_ = 0;  // blocks of which rows have been cleared
  int32_t head_;
  int32_t start_;
  const Tile* tile_;
  int32_t head_atom_column_;
  const int32_t* table_;
  bool reads_once_;  // hopper_split_kv: the sequence has one tile, so no other CTA reads its keys
};

/// Lets the V warp start once the first block of K is there, and the K warp go on once Q is. All CTAs start at the same
/// time and compete for memory bandwidth: the first wgmma needs K and Q before V and the second block of K. The K warp
/// may wait for these two barriers although it consumes neither, because it starts their next phases itself.
template <typename Shape>
__device__ __forceinline__ void wait_for_first_loads(const Pipeline<Shape>& pipeline) {
  pipeline.keys_full(PipelineState<Shape::kStages>(0)).wait();
  if (threadIdx.x % 32 == 0) pipeline.first_keys_loaded().arrive();
  pipeline.query_full(0).wait();
}

/// Loads the blocks of all tiles of the CTA.
template <typename Shape, Operand kOperand, bool kPaged>
__device__ __forceinline__ void load_blocks_with(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  TmaLoader<Shape, kOperand, kPaged> loader(params, pipeline);
  // hopper_split_kv is bound by loads from its start.
  constexpr bool kWaits = !Shape::kSplitsKeys;
  if (kOperand == Operand::keys && params.query_boxes_are_columns != 0) {
    clear_rest_of_query<Shape>(params.attention, pipeline);
  }
  int32_t block_count = 0;
  bool has_tile = true;
  // `count` counts the scheduler's tiles, `tile_count` those that have keys, for which Q is loaded.
#pragma unroll 1
  for (int32_t count = 0, tile_count = 0; has_tile; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const typename Shape::Tile& tile = pipeline.tile(tile_state);
    int32_t block = tile.end_block - 1;
    if (tile.work.tile.num_rows > Shape::kNoRows && block >= tile.first_block) {
      int32_t wanted_at = min(tile.first_block + Shape::kBlocksToGo, block);
      if constexpr (Shape::kTakesKeyRanges) {
        // That block may be passed over.
        if (tile.has_gaps != 0) wanted_at = block;
      }
      loader.begin(tile, block);
      if (kWaits && block_count == 0 && kOperand == Operand::values) pipeline.first_keys_loaded().wait();
      // The stages of the tile's first blocks of V have O of the tile before.
      const bool waits_for_output = kOperand == Operand::values && !Shape::kConvertsKv &&
                                    stages_output_in_values<Shape>(params) && tile_count > 0;
      if (waits_for_output) pipeline.output_left(0, tile_count - 1).wait();
#pragma unroll 1
      for (; block >= tile.first_block; block = block_before(tile, block)) {
        if (kOperand == Operand::keys && block == wanted_at && threadIdx.x % 32 == 0) {
          pipeline.want_tile(count);
        }
        loader.load(block, block_count);
        if (kOperand == Operand::keys && block == tile.end_block - 1) {
          load_query<Shape>(params, pipeline, tile, tile_count);
        }
        ++block_count;
        if (waits_for_output && block == tile.end_block - 1) pipeline.output_left(1, tile_count - 1).wait();
        if (kWaits && block_count == 1 && kOperand == Operand::keys) wait_for_first_loads(pipeline);
      }
      ++tile_count;
    } else if (kOperand == Operand::keys && threadIdx.x % 32 == 0) {
      pipeline.want_tile(count);
    }
    has_tile = tile.work.tile.num_rows > Shape::kNoRows;
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

/// The K warp or the V warp, which load by TMA.
template <typename Shape, Operand kOperand>
__device__ __forceinline__ void load_blocks(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  constexpr bool kPaged = Shape::kStorage == Storage::paged || Shape::kConvertsKv;
  if constexpr (!kPaged && Shape::kTakesClippedPages) {
    if (params.box_row_groups != 0) {
      load_blocks_with<Shape, kOperand, true>(params, pipeline);
      return;
    }
  }
  load_blocks_with<Shape, kOperand, kPaged>(params, pipeline);
}

/// Load warp 0 or 1 of 16-bit operands.
template <typename Shape>
__device__ __forceinline__ void load_blocks(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                            int32_t warp) {
  if constexpr (Shape::kHasCpAsyncLoader) {
    if (loads_by_cp_async<Shape>(params)) {
      load_rows<Shape>(params, pipeline, warp);
      return;
    }
  }
  if (warp == 0) {
    load_blocks<Shape, Operand::keys>(params, pipeline);
  } else {
    load_blocks<Shape, Operand::values>(params, pipeline);
  }
}

}  // namespace xa::hopper
