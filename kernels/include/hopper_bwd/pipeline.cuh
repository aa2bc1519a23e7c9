// The producer-consumer pipeline of a backward CTA up to 128 columns. As in hopper/pipeline.cuh, a buffer has a *full*
// and an *empty* mbarrier: producers wait for empty and arrive at full, consumers wait for full and arrive at empty.
//
//   buffer             producer                    consumers
//   BackwardTile [2]   K and Q load warp           V and dO load warp, compute warps, dQ warps
//   K, V               TMA                         compute warps
//   Q, lse [3]         TMA, cp.async               compute warps     (with bounds of rows: and ranges of keys)
//   dO, delta [2]      TMA, cp.async               compute warps
//   dS [2]             compute warps               compute warps of both warpgroups
//   dQ, two halves     one warpgroup per half      dQ warps
//   bias [warpgroup]   TMA, kBiasStages each       compute warps, which may leave its gradient there
#pragma once

#include <cstdint>

#include "hopper/pipeline.cuh"
#include "hopper_bwd/ptx.cuh"
#include "hopper_bwd/shape.cuh"

namespace xa::hopper {

/// A work tile: a block of keys, query heads of its KV head, and the query blocks that attend to some of it.
struct BackwardTile {
  int32_t key_block;   // of the sequence; negative past the last tile
  int32_t kv_head;     // counts parts of KV heads (HopperBackwardParams::head_splits)
  int32_t first_head;  // the query heads of the tile
  int32_t num_heads;
  int8_t keys_descend;    // whether the tiles of a head go from the last key block to the first, and dQ is added so
  int8_t queries_ascend;  // whether the tile goes from its first query block to the last
  int16_t hidden_keys;    // SequenceStart::hidden_keys; only with a bias
  int32_t first_block;
  int32_t num_blocks;
  int32_t first_query;
  int32_t num_queries;
  int32_t first_key;
  int32_t num_keys;
  int32_t shift;
  int32_t first_row_tile;
  int32_t first_query_block;
  int32_t sequence;
  int32_t key_block_index;  // over all sequences; only with bounds of rows
};
static_assert(sizeof(BackwardTile) <= 64);

/// What the warp that copies the bias `[matrix, row, key]` keeps in shared memory.
template <int kStages>
struct BiasPlaces {
  struct Step {
    int32_t key, query, matrix, unused;
  };
  /// The places of the tile's first query, of its first key and of its sequence.
  int32_t first_query, first_key, first_matrix, unused;
  /// Rows of a matrix before those that the tile's steps have, rows of the steps, all others, and how many of these are
  /// cleared in a step (HiddenRows).
  int32_t rows_before_steps, rows_of_steps, hidden_rows, hidden_share;
  /// Of each stage, the step whose bias it has. `matrix` is -1 before the first one.
  Step steps[kStages];
};

/// The stage of a ring buffer and the phase parity of its mbarriers, advanced as CUTLASS's PipelineState. Unlike
/// PipelineState of hopper/pipeline.cuh, kStages need not be a power of two.
template <int kStages>
struct RingPipelineState {
  int32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <typename Shape>
class BackwardPipeline {
  enum : int {
    kTileFull = 0,
    kTileEmpty = 2,
    kKeysFull = 4,
    kKeysEmpty,
    kValuesFull,
    kValuesEmpty,
    kQueryFull,
    kQueryEmpty = kQueryFull + Shape::kQueryStages,
    kDoutFull = kQueryEmpty + Shape::kQueryStages,
    kDoutEmpty = kDoutFull + Shape::kDoutStages,
    kDsFull = kDoutEmpty + Shape::kDoutStages,
    kDqFull = kDsFull + 2,                            // [step & 1][warpgroup]
    kDqEmpty = kDqFull + 4,                           // [warpgroup]
    kBiasFull = kDqEmpty + 2,                         // [stage][warpgroup]
    kBiasEmpty = kBiasFull + 2 * Shape::kBiasStages,  // [stage][warpgroup]
    kBarriers = kBiasEmpty + 2 * Shape::kBiasStages,
  };
  static_assert(Shape::kBarriersOffset + 8 * kBarriers <= Shape::kBiasPlacesOffset);
  /// Of a step's bias.
  using BiasState = PipelineState<Shape::kHasBias ? Shape::kBiasStages : 1>;
  /// TMA, and the lanes that copy the row statistics with cp.async.
  static constexpr int kLoadArrivals = 1 + 32;

 public:
  __device__ __forceinline__ explicit BackwardPipeline(uint8_t* shared)
      : shared_(shared), address_(xa::ptx::shared_address(shared)) {}

  /// Called by one thread; __syncthreads must follow.
  __device__ __forceinline__ void init() const {
    const auto init = [&](int first, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier(first + i, 0).address, arrivals);
    };
    constexpr int kWarps = Shape::kComputeWarps;
    init(kTileFull, 2, 1);
    init(kTileEmpty, 2, kWarps + 3);
    init(kKeysFull, 1, 1);
    init(kKeysEmpty, 1, kWarps);
    init(kValuesFull, 1, 1);
    init(kValuesEmpty, 1, kWarps);
    init(kQueryFull, Shape::kQueryStages, kLoadArrivals);
    init(kQueryEmpty, Shape::kQueryStages, kWarps);
    init(kDoutFull, Shape::kDoutStages, kLoadArrivals);
    init(kDoutEmpty, Shape::kDoutStages, kWarps);
    init(kDsFull, 2, kWarps);
    init(kDqFull, 4, kWarps / 2);
    init(kDqEmpty, 2, 1);
    if constexpr (Shape::kHasBias) {
      init(kBiasFull, 2 * Shape::kBiasStages, 1);
      init(kBiasEmpty, 2 * Shape::kBiasStages, kWarps / 2);
    }
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_shared();
  }

  __device__ __forceinline__ Barrier tile_full(PipelineState<2> state) const {
    return barrier(kTileFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier tile_empty(PipelineState<2> state) const {
    return barrier(kTileEmpty + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier keys_full(int32_t tile_count) const { return barrier(kKeysFull, tile_count & 1); }
  __device__ __forceinline__ Barrier keys_empty(int32_t tile_count) const {
    return barrier(kKeysEmpty, tile_count & 1);
  }
  __device__ __forceinline__ Barrier values_full(int32_t tile_count) const {
    return barrier(kValuesFull, tile_count & 1);
  }
  __device__ __forceinline__ Barrier values_empty(int32_t tile_count) const {
    return barrier(kValuesEmpty, tile_count & 1);
  }
  __device__ __forceinline__ Barrier query_full(RingPipelineState<Shape::kQueryStages> state) const {
    return barrier(kQueryFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier query_empty(RingPipelineState<Shape::kQueryStages> state) const {
    return barrier(kQueryEmpty + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier dout_full(PipelineState<2> state) const {
    return barrier(kDoutFull + state.stage, state.phase);
  }
  __device__ __forceinline__ Barrier dout_empty(PipelineState<2> state) const {
    return barrier(kDoutEmpty + state.stage, state.phase);
  }
  /// dS of a step is written by both warpgroups.
  __device__ __forceinline__ Barrier ds_full(PipelineState<2> state) const {
    return barrier(kDsFull + state.stage, state.phase);
  }
  /// A warpgroup's half of dQ of a step is written. Even and odd steps have separate mbarriers: a warp that waits for
  /// every second phase of a shared one could miss a phase and take the next one for it.
  __device__ __forceinline__ Barrier dq_full(PipelineState<2> state, int32_t warpgroup) const {
    return barrier(kDqFull + 2 * state.stage + warpgroup, state.phase);
  }
  __device__ __forceinline__ Barrier dq_empty(int32_t step, int32_t warpgroup) const {
    return barrier(kDqEmpty + warpgroup, step & 1);
  }
  __device__ __forceinline__ Barrier bias_full(int32_t step, int32_t warpgroup) const {
    const BiasState state(step);
    return barrier(kBiasFull + 2 * state.stage + warpgroup, state.phase);
  }
  __device__ __forceinline__ Barrier bias_empty(int32_t step, int32_t warpgroup) const {
    const BiasState state(step);
    return barrier(kBiasEmpty + 2 * state.stage + warpgroup, state.phase);
  }

  __device__ __forceinline__ uint32_t keys() const { return address_ + Shape::kKeysOffset; }
  __device__ __forceinline__ uint32_t values() const { return address_ + Shape::kValuesOffset; }
  __device__ __forceinline__ uint32_t queries(int32_t stage) const {
    return address_ + Shape::kQueriesOffset + stage * Shape::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t douts(int32_t stage) const {
    return address_ + Shape::kDoutsOffset + stage * Shape::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t lses(int32_t stage) const {
    return address_ + Shape::kLsesOffset + stage * Shape::kLseBytes;
  }
  __device__ __forceinline__ uint32_t deltas(int32_t stage) const {
    return address_ + Shape::kDeltasOffset + stage * Shape::kRowStatBytes;
  }
  __device__ __forceinline__ uint32_t ds(int32_t stage) const {
    return address_ + Shape::kDsOffset + stage * Shape::kDsBytes;
  }
  __device__ __forceinline__ uint32_t dq(int32_t warpgroup) const {
    return address_ + Shape::kDqOffset + warpgroup * Shape::kFirstDqHalfBytes;
  }
  __device__ __forceinline__ uint32_t bias(int32_t step, int32_t warpgroup) const {
    return address_ + Shape::kBiasOffset + (2 * BiasState(step).stage + warpgroup) * Shape::kBiasBytes;
  }
  __device__ __forceinline__ auto& bias_places() const {
    return *reinterpret_cast<BiasPlaces<Shape::kBiasStages>*>(shared_ + Shape::kBiasPlacesOffset);
  }
  __device__ __forceinline__ BackwardTile& tile(PipelineState<2> state) const {
    return *reinterpret_cast<BackwardTile*>(shared_ + Shape::kTilesOffset + 64 * state.stage);
  }

 private:
  __device__ __forceinline__ Barrier barrier(int index, uint32_t phase) const {
    return Barrier{address_ + Shape::kBarriersOffset + 8 * index, phase};
  }

  uint8_t* shared_;
  uint32_t address_;
};

}  // namespace xa::hopper
