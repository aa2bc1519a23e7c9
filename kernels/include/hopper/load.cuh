// The warps of a prefill CTA that fetch: one the query rows and K, one V. A tile's blocks come last first, because the
// last ones of a causal tile are those that need a mask.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/pipeline.cuh"
#include "hopper/shape.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa::hopper {

enum class Operand { keys, values };

/// Fetches blocks of K or of V of one tile, as boxes.
template <typename Shape, Operand kOperand>
class BoxLoader {
  static constexpr bool kPaged = Shape::kStorage == Storage::paged;
  static constexpr bool kOfKeys = kOperand == Operand::keys;
  static constexpr int kOctets = Shape::kKeys / 8;
  using Block = std::conditional_t<kOfKeys, typename Shape::KeyBlock, typename Shape::FetchedBlock>;

 public:
  __device__ __forceinline__ BoxLoader(const PrefillParams& params, const Pipeline<Shape>& pipeline)
      : params_(params),
        pipeline_(pipeline),
        lane_(threadIdx.x % 32),
        octets_(params.box_octets),
        boxes_(kPaged ? kOctets / params.box_octets : 1) {}

  __device__ __forceinline__ void begin(const TilePlan& plan, int32_t block) {
    head_ = plan.plan.kv_head / params_.packs_per_kv_head;
    if constexpr (kPaged) {
      seen_begin_ = plan.seen_begin;
      seen_end_ = plan.seen_end;
      table_ = params_.attention.block_table + plan.plan.tile.sequence * params_.attention.block_table_stride;
      first_panel_ = head_ * (kOfKeys ? params_.key_panels : params_.value_panels);
    } else {
      start_ = plan.plan.tile.start_k;
    }
    place_ = find(block);
  }

  /// Starts the copy of `block`, as the turn-th of the CTA; blocks come one after the other, from the tile's last one.
  __device__ __forceinline__ void load(int32_t block, int32_t turn_number) {
    const PipelineState<Shape::kStages> turn(turn_number);
    const Place place = place_;
    place_ = find(block - 1);
    const Barrier full = kOfKeys ? pipeline_.keys_full(turn) : pipeline_.fetched_full(turn);
    const Barrier empty = kOfKeys ? pipeline_.keys_empty(turn) : pipeline_.fetched_empty(turn);
    const uint32_t to = kOfKeys ? pipeline_.keys(turn.stage) : pipeline_.fetched_values(turn.stage);
    const TensorMap& map = kOfKeys ? params_.k : params_.v;
    empty.producer_wait();
    // Without the copy the phase lasts: no lane can miss it.
    __syncwarp();
    if constexpr (kPaged) {
      const uint32_t box_bytes = octets_ * Block::kGroupDistance;
      const uint32_t seen = __ballot_sync(~0u, place.octet >= 0);
      if (lane_ == 0) full.arrive_expect_tx(__popc(seen) * box_bytes);
      __syncwarp();
      if (place.octet >= 0) {
        ptx::tma_load(to + lane_ * box_bytes, map, full.address, 0, 0, first_panel_, place.octet, place.page);
      }
    } else if (lane_ == 0) {
      full.arrive_expect_tx(Block::kBytes);
      ptx::tma_load(to, map, full.address, 0, start_ + block * Shape::kKeys, 0, head_, 0);
    }
  }
  /// The copy engine says itself when a block is there.
  __device__ __forceinline__ void finish(int32_t) const {}

 private:
  /// Where this lane's box of a block is.
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

  const PrefillParams& params_;
  const Pipeline<Shape>& pipeline_;
  const int32_t lane_;
  const int32_t octets_;  // of a box
  const int32_t boxes_;   // of a block
  Place place_;           // in the next block
  int32_t head_;
  int32_t start_;
  int32_t seen_begin_;
  int32_t seen_end_;
  int32_t first_panel_;
  const int32_t* table_;
};

/// Fetches blocks of K or of V of one tile row by row, from pages that boxes cannot fetch. As many lanes as a row of a
/// panel has chunks copy a row together.
///
/// Where a row is, one lane finds out for all: shared memory has a word for each row of a block, first its page, which
/// is asked for with the block before, then its place. Registers are few here, and shuffles in a loop cost many.
template <typename Shape, Operand kOperand>
class RowLoader {
  static constexpr bool kOfKeys = kOperand == Operand::keys;
  using Panel = typename Shape::Panel;
  using Block = std::conditional_t<kOfKeys, typename Shape::KeyBlock, typename Shape::ValueBlock>;
  static constexpr int kLanes = Panel::kChunks;  // of a row
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static constexpr int kRounds = Shape::kRowWords / 32;

 public:
  __device__ __forceinline__ RowLoader(const PrefillParams& params, const Pipeline<Shape>& pipeline)
      : params_(params), pipeline_(pipeline) {}

  __device__ __forceinline__ void begin(const TilePlan& plan, int32_t block) {
    const int32_t head = plan.plan.kv_head / params_.packs_per_kv_head;
    plan_ = &plan;
    base_ = reinterpret_cast<uint64_t>(source().base) + 2 * head * source().head_stride +
            xa::ptx::opaque(lane() % kLanes * 16);  // not worth a register from tile to tile
    look_up(block);
    xa::ptx::cp_async_commit();
    xa::ptx::cp_async_wait<0>();
  }

  /// Starts the copy of `block`, as the turn-th of the CTA; `finish` must follow.
  __device__ __forceinline__ void load(int32_t block, int32_t turn_number) const {
    const PipelineState<Shape::kStages> turn(turn_number);
    uint32_t* const words = row_words();
    uint32_t mine[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) mine[round] = place_of(key(block, round), words[32 * round + lane()]);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) words[32 * round + lane()] = mine[round];
    __syncwarp();
    (kOfKeys ? pipeline_.keys_empty(turn) : pipeline_.values_empty(turn)).producer_wait();
    // Of a lane's rows in each octet, where its chunk goes.
    uint32_t to[8 / kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < 8 / kRowsAtOnce; ++i) {
      to[i] = (kOfKeys ? pipeline_.keys(turn.stage) : pipeline_.values(turn.stage)) +
              Panel::offset(i * kRowsAtOnce + lane() / kLanes, lane() % kLanes);
    }
#pragma unroll
    for (int first = 0; first < Shape::kKeys; first += 4 * kRowsAtOnce) {
      // Of four rows that this lane copies.
      const int step = first % 32 / kRowsAtOnce;
      const uint4 places = reinterpret_cast<const uint4*>(words + first / 32 * 32 + step)[lane() / kLanes * kLanes / 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + i * kRowsAtOnce;
        if (row >= Shape::kKeys) break;
        const uint64_t from = base_ + uint64_t{16} * (&places.x)[i];
        const uint32_t row_to = to[row % 8 / kRowsAtOnce] + row / 8 * Block::kGroupDistance;
#pragma unroll
        for (int panel = 0; panel < Block::kPanels; ++panel) {
          xa::ptx::cp_async_16(row_to + panel * Block::kPanelDistance,
                               reinterpret_cast<const void*>(from + panel * Panel::kRowBytes), true);
        }
      }
    }
    __syncwarp();
    look_up(block - 1);
  }
  /// The lanes themselves wait for what they copy, and for the pages that they have asked for.
  __device__ __forceinline__ void finish(int32_t turn_number) const {
    const PipelineState<Shape::kStages> turn(turn_number);
    xa::ptx::cp_async_commit();
    xa::ptx::cp_async_wait<0>();
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) (kOfKeys ? pipeline_.keys_full(turn) : pipeline_.values_full(turn)).arrive();
  }

 private:
  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ const KvSource& source() const {
    return kOfKeys ? params_.attention.k : params_.attention.v;
  }
  __device__ __forceinline__ uint32_t* row_words() const { return pipeline_.row_words(kOfKeys ? 0 : 1); }
  /// This lane's key of a round of 32 rows, whose words lie in the order in which lanes copy the rows. For a key that
  /// nobody sees stands the nearest one that is seen: nothing else is looked up or read, and what comes into its row
  /// does not count.
  __device__ __forceinline__ int32_t key(int32_t block, int round) const {
    const int32_t row = lane() % kLanes * kRowsAtOnce + lane() / kLanes;
    return clamp(block * Shape::kKeys + 32 * round + row, plan_->seen_begin, plan_->seen_end - 1);
  }
  /// Asks for the pages of the rows of `block`.
  __device__ __forceinline__ void look_up(int32_t block) const {
    const AttentionParams& params = params_.attention;
    const int32_t* const table = params.block_table + plan_->plan.tile.sequence * params.block_table_stride;
    const uint32_t to = xa::ptx::shared_address(row_words() + lane());
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      ptx::cp_async_4(to + 4 * 32 * round, table + page_of(key(block, round)));
    }
  }
  /// key / page_size
  __device__ __forceinline__ uint32_t page_of(uint32_t key) const {
    return __umulhi(2 * key, params_.page_divisor.reciprocal) >> params_.page_divisor.shift;
  }
  /// Where a key's row is, in 16 bytes from the head's first; the host has seen to it that 32 bits are enough.
  __device__ __forceinline__ uint32_t place_of(uint32_t key, int32_t page) const {
    const uint32_t in_page = key - page_of(key) * params_.attention.page_size;
    return clamp(page, 0, params_.attention.num_pages - 1) * static_cast<uint32_t>(source().page_stride >> 3) +
           in_page * static_cast<uint32_t>(source().token_stride >> 3);
  }

  const PrefillParams& params_;
  const Pipeline<Shape>& pipeline_;
  const TilePlan* plan_;
  uint64_t base_;  // of this lane's chunk of the head's rows
};

/// Starts the copy of a tile's query rows. What follows the sequence's last one comes along, and is nobody's.
template <typename Shape>
__device__ __forceinline__ void load_query(const PrefillParams& params, const Pipeline<Shape>& pipeline,
                                           const TilePlan& plan, int32_t tile) {
  if (threadIdx.x % 32 != 0) return;
  const Barrier full = pipeline.query_full(tile);
  pipeline.query_empty(tile).producer_wait();
  full.arrive_expect_tx(Shape::kQueryBytes);
  const int32_t token = plan.plan.tile.first_token + plan.plan.tile.first_row / params.attention.group;
  ptx::tma_load(pipeline.query(), params.q, full.address, 0, plan.plan.kv_head * params.attention.group, token, 0);
}

/// All CTAs start at once, and memory is slow to give each of them all that it asks for: first what is needed first.
/// This warp alone may wait for these barriers, because it is what starts their next phase.
template <typename Shape>
__device__ __forceinline__ void wait_for_first(const Pipeline<Shape>& pipeline) {
  pipeline.keys_full(PipelineState<Shape::kStages>(0)).wait();
  if (threadIdx.x % 32 == 0) pipeline.first_keys().arrive();
  pipeline.query_full(0).wait();
}

/// Fetches the blocks of all tiles of the CTA.
template <typename Shape, Operand kOperand, typename Loader>
__device__ __forceinline__ void load_blocks_by(Loader loader, const PrefillParams& params,
                                               const Pipeline<Shape>& pipeline) {
  int32_t turn = 0;
  bool goes_on = true;
#pragma unroll 1
  for (int32_t count = 0, tile = 0; goes_on; ++count) {
    const PipelineState<2> plan_turn(count);
    pipeline.plan_full(plan_turn).wait();
    const TilePlan& plan = pipeline.plan(plan_turn);
    int32_t block = plan.end_block - 1;
    if (plan.plan.tile.num_rows > 0 && block >= plan.first_block) {
      loader.begin(plan, block);
      if (turn == 0 && kOperand == Operand::values) pipeline.first_keys().wait();
#pragma unroll 1
      for (; block >= plan.first_block; --block) {
        loader.load(block, turn);
        if (kOperand == Operand::keys && block == plan.end_block - 1) load_query<Shape>(params, pipeline, plan, tile);
        loader.finish(turn++);
        if (turn == 1 && kOperand == Operand::keys) wait_for_first(pipeline);
      }
      ++tile;
    }
    goes_on = plan.plan.tile.num_rows > 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.plan_empty(plan_turn).arrive();
  }
}

/// The work of one warp.
template <typename Shape, Operand kOperand>
__device__ __forceinline__ void load_blocks(const PrefillParams& params, const Pipeline<Shape>& pipeline) {
  if constexpr (Shape::kFetchesRows) {
    if (params.box_octets == 0) {
      load_blocks_by<Shape, kOperand>(RowLoader<Shape, kOperand>(params, pipeline), params, pipeline);
      return;
    }
  }
  load_blocks_by<Shape, kOperand>(BoxLoader<Shape, kOperand>(params, pipeline), params, pipeline);
}

}  // namespace xa::hopper
