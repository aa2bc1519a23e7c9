// The main loop of decode: all warps of a CTA have the same 16 query rows, and warp w the blocks w, w + kKeyWarps, ...
// of keys. Each warp has its own ring of blocks in shared memory, so the loop has no barrier of the CTA.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "column_warps.cuh"
#include "decode_block.cuh"
#include "fp8.cuh"
#include "new_tokens.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "row_pairs.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "whole_rows.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// The first key of the warp's first block. Blocks start at multiples of kKeys of the sequence, whichever keys the tile
/// attends to, and block b belongs to warp b % kKeyWarps.
template <typename Shape>
__device__ __forceinline__ int32_t first_block_key(const KeyRange& keys) {
  const int32_t block = keys.begin / Shape::kKeys, warp = threadIdx.x / 32;
  return (block + (warp - block % Shape::kKeyWarps + Shape::kKeyWarps) % Shape::kKeyWarps) * Shape::kKeys;
}

/// Streams the warp's keys of a work tile through its ring of kStages stages. A stage is a block of K followed by the
/// block of V, copied as one cp.async group, with their `Scales` if rows have some. `Bias` is added to scores.
template <typename Shape, typename T, typename Stored, typename Scales = NoTokenScales,
          typename State_ = SoftmaxState<1, Shape::kWarpColumns / 8, Shape::kTileRows>, typename Bias = NoBias>
class DecodeLoop {
  using Math = TileMath<T, Stored, typename Shape::Rows, 1, Shape::kKeys, Shape::kWarpColumns, Shape::kTileRows>;
  static constexpr int kStages = Shape::kStages, kStep = Shape::kKeys * Shape::kKeyWarps;
  /// Whether three CTAs of longer rows share the registers of an SM. Numbers of the thread are then computed where they
  /// are used.
  static constexpr bool kIsTight = sizeof(Stored) == 2 && Shape::kRowBytes >= 256 && Shape::kCtasPerSm == 3;
  using PagedSlots =
      PageTableReader<Shape::kKeys, kStep, (Shape::kRowBytes < 1024), kHasTokenScales<Stored> || kIsTight>;
  using Slots = std::conditional_t<Bias::kHasPages, PagedSlots, ContiguousSlots<Shape::kKeys, kStep>>;
  /// Loads whose addresses are computed together.
  static constexpr int kLoads = Shape::kHoldsAddresses ? Shape::kKeys / kTokensPerLoad : 1;

 public:
  using State = State_;
  using Query =
      QueryFragments<1, Shape::kHeadDim, sizeof(T), Shape::kHoldsQuery, Shape::kWarpColumns, Shape::kTileRows>;

  /// `rings` is the shared address of the CTA's rings. Issues the first loads of page ids.
  __device__ __forceinline__ DecodeLoop(const AttentionParams& params, const WorkTile& work, uint32_t rings,
                                        const Scales& scales = {}, const Bias& bias = {})
      : params_(params),
        work_(work),
        rings_(rings),
        first_key_(first_block_key<Shape>(work.keys)),
        slots_(params, work, first_key_),
        loader_(params, work, first_warp_column<Shape>()),
        scales_(scales),
        bias_(bias) {}

  /// Starts to copy the first blocks and waits for the query rows, whose copies to shared address `query_rows` are
  /// already committed as the most recent cp.async group.
  __device__ __forceinline__ Query begin(uint32_t query_rows) {
#pragma unroll 1
    for (int32_t stage = 0; stage < kStages; ++stage) fetch(stage, first_key_ + stage * kStep);
    bias_.fetch(first_key_);
    ptx::cp_async_wait<kStages>();
    __syncthreads();
    Query query(query_rows + first_warp_column<Shape>() * static_cast<int32_t>(sizeof(T)),
                opaque_if<Shape::kHasTokenScales>(threadIdx.x) % 32);
    query.fill();
    return query;
  }

  /// Updates `state` by the warp's keys.
  template <typename LogitsTransform>
  __device__ __forceinline__ void attend(State& state, const Query& query, const LogitsTransform& transform) {
    int32_t stage = 0;
#pragma unroll 1
    for (int32_t key = first_key_; key < work_.keys.end; key += kStep) {
      const int32_t next = ptx::opaque(key) + kStages * kStep;
      attend_block(state, query, transform, stage, key);
      fetch(stage, next);
      stage = next_stage(stage);
    }
    state.finish();
  }

  /// batch_invariant: as `attend`, but computes each fixed-size split of the work tile from a fresh state, and then
  /// calls `store(state, area, begin)` in all warps. `area` is the shared address of memory for the warp's output; 0:
  /// the warp had no keys of the split, which begins at chunk `begin` of the tile. `store` ends with a barrier of the
  /// CTA.
  template <typename LogitsTransform, typename Store>
  __device__ __forceinline__ void attend_fixed_splits(const WorkRange& range, const Query& query,
                                                      const LogitsTransform& transform, const Store& store) {
    int32_t stage = 0, key = first_key_, begin = range.split_begin;
#pragma unroll 1
    while (begin < range.split_end) {
      State state;
      const int32_t end = fixed_split_end(range, begin);
      const bool has_keys = key < end;
#pragma unroll 1
      while (key < end) {
        // The stage of the block before this one, which may be the last one of another split, is free.
        if (key != first_key_) fetch(previous_stage(stage), key + (kStages - 1) * kStep);
        attend_block(state, query, transform, stage, key);
        key += kStep;
        stage = next_stage(stage);
      }
      state.finish();
      store(state, has_keys ? keys(previous_stage(stage)) : 0, begin);
      begin += range.fixed_split_chunks;
    }
  }

 private:
  /// The end of the keys of the fixed-size split that begins at chunk `begin` of the tile.
  __device__ __forceinline__ int32_t fixed_split_end(const WorkRange& range, int32_t begin) const {
    const int32_t end = begin + range.fixed_split_chunks;
    return end < range.split_end ? (range.first_chunk + end) * kStep : work_.keys.end;
  }
  static __device__ __forceinline__ int32_t next_stage(int32_t stage) { return stage + 1 == kStages ? 0 : stage + 1; }
  static __device__ __forceinline__ int32_t previous_stage(int32_t stage) {
    return stage == 0 ? kStages - 1 : stage - 1;
  }

  /// Updates `state` by the blocks of a stage, which begin at `key`.
  template <typename LogitsTransform>
  __device__ __forceinline__ void attend_block(State& state, const Query& query, const LogitsTransform& transform,
                                               int32_t stage, int32_t key) {
    wait_for_blocks(stage, key);
    float scores[1][Shape::kKeys / 8][4];
    Math::scores(scores, query, keys(stage), params_);
    if constexpr (Shape::kColumnWarps > 1) {
      // Each warp's part of the scores takes the place of its columns of K.
      __syncwarp();
      const int32_t warp = threadIdx.x / 32;
      add_up_columns<Shape::kColumnWarps>(scores, keys(stage) - warp * Shape::kRingBytes, Shape::kRingBytes, warp,
                                          [] { __syncthreads(); });
    }
    attend_scores<Math, T, Stored>(state, scores, transform, scales_, params_, work_, stage, key,
                                   keys(stage) + Shape::kBlockBytes, bias_);
    // All lanes must have read the blocks before they are overwritten.
    __syncwarp();
  }

  static __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
  }
  /// Waits for the blocks of a stage, which begin at `key`, and writes new tokens to their rows.
  __device__ __forceinline__ void wait_for_blocks(int32_t stage, int32_t key) const {
    if constexpr (Shape::kAppendsKv) {
      const bool has_some = has_new_tokens(params_) && key + Shape::kKeys > first_new_key(work_.tile);
      if (has_some) put_new_keys<Shape, Stored>(params_, work_, key, keys(stage), wait);
    }
    wait();
  }

  /// Shared address of a stage's block of K; the block of V follows it.
  __device__ __forceinline__ uint32_t keys(int32_t stage) const {
    // Loops without a spare register do not keep the address of the warp's ring.
    const uint32_t warp = opaque_if<(Shape::kRowBytes >= 1024 || kIsTight)>(threadIdx.x) / 32;
    return rings_ + warp * Shape::kRingBytes + stage * 2 * Shape::kBlockBytes;
  }

  /// Starts to copy the next blocks, which begin at `key`. Past the end of the keys it commits an empty group, so that
  /// the number of pending groups stays the same.
  __device__ __forceinline__ void fetch(int32_t stage, int32_t key) {
    // Not unrolled for 8-bit rows, whose loader has many instructions: more of the loop over keys fit the instruction
    // cache. Where rows have scales such a loop spills.
#pragma unroll(sizeof(Stored) == 1 && !kHasTokenScales<Stored> ? 1 : Shape::kKeys)
    for (int first = 0; first < Shape::kKeys; first += kLoads * kTokensPerLoad) {
      TokenSlot slots[kLoads];
#pragma unroll
      for (TokenSlot& slot : slots) slot = slots_.next();
      // In the last block, the loader fills keys past the end with zeros.
      if (key < work_.keys.end) load(stage, first, key + first, slots);
    }
    ptx::cp_async_commit();
  }
  /// Starts loads from key `key` on, whose tokens lie at `slots`, to rows from `first_row` on of a stage.
  __device__ __forceinline__ void load(int32_t stage, int32_t first_row, int32_t key,
                                       const TokenSlot (&slots)[kLoads]) {
    const uint32_t destination = keys(stage) + first_row * Shape::Rows::kPitch;
    constexpr int kLoadBytes = kTokensPerLoad * Shape::Rows::kPitch;
    if constexpr (sizeof(Stored) > 1) {
      loader_.load(destination, key, slots[0], slots_.fits_pages());
    } else if (loader_.template is_usual<kLoads * kTokensPerLoad>(key, slots_.fits_pages())) {
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        loader_.load_usual(destination + load * kLoadBytes, slots[load]);
        if constexpr (kHasTokenScales<Stored>) {
          scales_.load_usual(stage, first_row + load * kTokensPerLoad, slots[load]);
        }
      }
    } else {
      // Not unrolled, so that more of the loop over keys fits the instruction cache.
#pragma unroll 1
      for (int load = 0; load < kLoads; ++load) {
        const TokenSlot slot = load == 0 ? slots[0] : slots[kLoads - 1];
        const int32_t row = load * kTokensPerLoad;
        loader_.load_other(destination + load * kLoadBytes, key + row, slot, slots_.fits_pages());
        if constexpr (kHasTokenScales<Stored>) {
          scales_.load_other(stage, first_row + row, key + row, slot, slots_.fits_pages());
        }
      }
    }
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  uint32_t rings_;
  int32_t first_key_;
  Slots slots_;
  DecodeLoader<Stored, Shape::kWarpColumns, Shape::kBlockBytes, Shape::kHoldsAddresses> loader_;
  Scales scales_;
  Bias bias_;
};

}  // namespace xa
