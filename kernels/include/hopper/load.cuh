// The warps of a prefill CTA that fetch: one the query rows and K, one V. A tile's blocks come last first, because the
// last ones of a causal tile are those that need a mask.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/params.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shape.cuh"
#include "tile_plan.cuh"

namespace xa::hopper {

enum class Operand { keys, values };

/// Fetches blocks of K or of V of one tile.
template <typename Shape, Operand kOperand>
class BlockLoader {
  static constexpr bool kPaged = Shape::kStorage == Storage::paged;
  static constexpr bool kOfKeys = kOperand == Operand::keys;
  static constexpr int kOctets = Shape::kKeys / 8;
  using Block = std::conditional_t<kOfKeys, typename Shape::KeyBlock, typename Shape::FetchedBlock>;

 public:
  __device__ __forceinline__ BlockLoader(const PrefillParams& params, const Pipeline<Shape>& pipeline)
      : params_(params),
        pipeline_(pipeline),
        lane_(threadIdx.x % 32),
        octets_(params.box_octets),
        boxes_(kPaged ? kOctets / params.box_octets : 1) {}

  __device__ __forceinline__ void begin(const TilePlan& plan) {
    head_ = plan.plan.kv_head / params_.packs_per_kv_head;
    if constexpr (kPaged) {
      seen_begin_ = plan.seen_begin;
      seen_end_ = plan.seen_end;
      table_ = params_.attention.block_table + plan.plan.tile.sequence * params_.attention.block_table_stride;
      first_panel_ = head_ * (kOfKeys ? params_.key_panels : params_.value_panels);
    } else {
      start_ = plan.plan.tile.start_k;
    }
  }

  /// Where this lane's box of a block is; to be asked for ahead of `load`.
  struct Place {
    int32_t page;
    int32_t octet;  // of the page; -1 where no key of the box is seen
  };
  __device__ __forceinline__ Place find(int32_t block) const {
    Place place = {0, -1};
    if constexpr (kPaged) {
      const int32_t first = block * Shape::kKeys + lane_ * 8 * octets_;
      // The table is read below ceil(len_k / page_size) only, and not for pages that nobody sees.
      if (lane_ < boxes_ && first < seen_end_ && first + 8 * octets_ > seen_begin_) {
        const uint32_t page_size = params_.attention.page_size, index = static_cast<uint32_t>(first) / page_size;
        place.page = clamp(__ldg(table_ + index), 0, params_.attention.num_pages - 1);
        place.octet = (first - index * page_size) / 8;
      }
    }
    return place;
  }

  /// Starts the copy of `block`, as the turn-th of the CTA.
  __device__ __forceinline__ void load(int32_t block, int32_t turn_number, const Place& place) const {
    const Turn<Shape::kStages> turn(turn_number);
    const Barrier full = kOfKeys ? pipeline_.keys_full(turn) : pipeline_.fetched_full(turn);
    const Barrier empty = kOfKeys ? pipeline_.keys_empty(turn) : pipeline_.fetched_empty(turn);
    const uint32_t to = kOfKeys ? pipeline_.keys(turn.slot) : pipeline_.fetched_values(turn.slot);
    const TensorMap& map = kOfKeys ? params_.k : params_.v;
    empty.wait_for_reuse();
    if constexpr (kPaged) {
      const uint32_t box_bytes = octets_ * Block::kGroupDistance;
      const uint32_t seen = __ballot_sync(~0u, place.octet >= 0);
      if (lane_ == 0) full.expect(__popc(seen) * box_bytes);
      __syncwarp();
      if (place.octet >= 0) {
        ptx::copy_box(to + lane_ * box_bytes, map, full.address, 0, 0, first_panel_, place.octet, place.page);
      }
    } else if (lane_ == 0) {
      full.expect(Block::kBytes);
      ptx::copy_box(to, map, full.address, 0, start_ + block * Shape::kKeys, 0, head_, 0);
    }
  }

 private:
  const PrefillParams& params_;
  const Pipeline<Shape>& pipeline_;
  const int32_t lane_;
  const int32_t octets_;  // of a box
  const int32_t boxes_;   // of a block
  int32_t head_;
  int32_t start_;
  int32_t seen_begin_;
  int32_t seen_end_;
  int32_t first_panel_;
  const int32_t* table_;
};

/// Starts the copy of a tile's query rows. What follows the sequence's last one comes along, and is nobody's.
template <typename Shape>
__device__ __forceinline__ void load_query(const PrefillParams& params, const Pipeline<Shape>& pipeline,
                                           const TilePlan& plan, int32_t tile) {
  if (threadIdx.x % 32 != 0) return;
  const Barrier full = pipeline.query_full(tile);
  pipeline.query_empty(tile).wait_for_reuse();
  full.expect(Shape::kQueryBytes);
  const int32_t token = plan.plan.tile.first_token + plan.plan.tile.first_row / params.attention.group;
  ptx::copy_box(pipeline.query(), params.q, full.address, 0, plan.plan.kv_head * params.attention.group, token, 0);
}

/// Fetches the blocks of all tiles of the CTA. The work of one warp.
template <typename Shape, Operand kOperand>
__device__ __forceinline__ void load_blocks(const PrefillParams& params, const Pipeline<Shape>& pipeline) {
  BlockLoader<Shape, kOperand> loader(params, pipeline);
  int32_t turn = 0, rows = 1;
#pragma unroll 1
  for (int32_t count = 0, tile = 0; rows > 0; ++count) {
    const Turn<2> plan_turn(count);
    pipeline.plan_full(plan_turn).wait();
    const TilePlan& plan = pipeline.plan(plan_turn);
    rows = plan.plan.tile.num_rows;
    const int32_t first = plan.first_block;
    int32_t block = plan.end_block - 1;
    if (rows > 0 && block >= first) {
      loader.begin(plan);
      auto place = loader.find(block);
      // All CTAs start at once, and memory is slow to give each of them all that it asks for: first what is needed
      // first.
      const bool is_start = tile == 0;
      if (is_start && kOperand == Operand::values) pipeline.keys_full(Turn<Shape::kStages>(0)).wait();
      loader.load(block, turn, place);
      if (kOperand == Operand::keys) load_query<Shape>(params, pipeline, plan, tile);
      if (is_start && kOperand == Operand::keys) pipeline.query_full(0).wait();
      ++turn;
      if (block > first) place = loader.find(block - 1);
#pragma unroll 1
      while (--block >= first) {
        const auto ahead = loader.find(max(block - 1, first));
        loader.load(block, turn++, place);
        place = ahead;
      }
      ++tile;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.plan_empty(plan_turn).arrive();
  }
}

}  // namespace xa::hopper
