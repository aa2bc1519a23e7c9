// The main loop of prefill: each warp has its own query rows, and all warps of the CTA read the same blocks of K and V.
#pragma once

#include <cstdint>
#include <type_traits>

#include "column_warps.cuh"
#include "contiguous_rows.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_tile.cuh"

namespace xa {

/// Whether a logits transform loads something for each block of keys: it then has `fetch_block` and transforms the
/// scores of all of a warp's rows at once (score_bias.cuh).
template <typename LogitsTransform, typename = void>
constexpr bool kFetchesBlocks = false;
template <typename LogitsTransform>
constexpr bool kFetchesBlocks<LogitsTransform, std::void_t<decltype(&LogitsTransform::template fetch_block<false>)>> =
    true;
/// Whether each warp fetches its rows' part of the next block between the parts of the product P V, with
/// `fetch_block_between`.
template <typename LogitsTransform, typename = void>
constexpr bool kFetchesByWarps = false;
template <typename LogitsTransform>
constexpr bool kFetchesByWarps<LogitsTransform, std::enable_if_t<LogitsTransform::kFetchesByWarps>> = true;

/// Streams the keys of the work tile through the CTA's ring of kStages blocks and updates `state`. Every warp copies
/// kKeysPerLoad rows of each block. The warp's query rows begin at row `warp_row` of the tile, whose copies to shared
/// address `query_rows` are already committed as the first cp.async group. `scales` are the TokenScales of rows that
/// have some.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, typename State, typename... Scales>
__device__ __forceinline__ void attend_with_rows(State& state, const AttentionParams& params, const WorkTile& work,
                                                 uint32_t ring, int32_t warp_row, uint32_t query_rows,
                                                 const LogitsTransform& transform, const Scales&... scales) {
  static_assert(sizeof...(Scales) == (kHasTokenScales<Stored> ? 1 : 0));
  using Math = TileMath<T, Stored, typename Shape::Rows, Shape::kRowTiles, Shape::kKeys, Shape::kWarpColumns>;
  constexpr int kStages = Shape::kStages;
  constexpr bool kHoldsQuery = Shape::kRowTiles == 1 && Shape::kQueryRowBytes <= 256;
  // K and V of a block are separate cp.async groups. At this many pending groups the oldest block's next operand is
  // there.
  constexpr int kPending = 2 * kStages - 2;
  // What a transform fetches by warps is a group of its own after K.
  constexpr bool kFetchesNext = kFetchesByWarps<LogitsTransform>;
  static_assert(!kFetchesNext || kStages == 1);
  // K's next copies should start as early as possible, but starting them while the scores are live takes registers.
  constexpr int kAccumulators = Shape::kRowTiles * 4 * (Shape::kKeys + Shape::kWarpColumns) / 8;
  constexpr bool kRefillsEarly = kAccumulators <= (Element<T>::kIs16Bit ? 144 : 72);
  // A bias takes registers: P of a row tile is packed before the softmax of the next one.
  constexpr bool kPacks = kFetchesBlocks<LogitsTransform> && Element<T>::kIs16Bit;
  // Only contiguous keys have a bias.
  using Loader = std::conditional_t<kFetchesBlocks<LogitsTransform>,
                                    ContiguousRowLoader<Stored, Shape::kHeadDim, Shape::kKeysPerLoad>,
                                    RowLoader<Stored, Shape::kHeadDim, Shape::kKeysPerLoad>>;
  const Loader loader(params, work);
  const int32_t first_own_key = threadIdx.x / 32 * Shape::kKeysPerLoad;
  const int32_t first_column = first_warp_column<Shape>();
  const auto keys = [&](int stage) { return ring + stage * Shape::kBlockBytes; };
  const auto values = [&](int stage) { return keys(kStages + stage); };
  const uint32_t own_offset = first_own_key * Shape::Rows::kPitch;
  int32_t first_key = work.keys.begin / Shape::kKeys * Shape::kKeys;

  // Starts to copy the warp's part of the block of K or V from `token` on, whose slot is `slot`.
  const auto load_keys = [&](int stage, int32_t token, const typename Loader::Slot& slot) {
    loader.load_keys(keys(stage) + own_offset, token + first_own_key, slot);
    (scales.load_keys(stage, first_own_key, token + first_own_key, slot), ...);
  };
  const auto load_values = [&](int stage, int32_t token, const typename Loader::Slot& slot) {
    loader.load_values(values(stage) + own_offset, token + first_own_key, slot);
    (scales.load_values(stage, first_own_key, token + first_own_key, slot), ...);
  };

  typename Loader::Slot slots[kStages];
#pragma unroll
  for (int i = 0; i < kStages; ++i) slots[i] = loader.find(first_key + i * Shape::kKeys + first_own_key);
  if constexpr (kFetchesBlocks<LogitsTransform>) {
    if (first_key < work.keys.end) transform.template fetch_block<true>(first_key);
  }
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    const int32_t token = first_key + i * Shape::kKeys;
    if (token < work.keys.end) load_keys(i, token, slots[i]);
    ptx::cp_async_commit();
    if (token < work.keys.end) load_values(i, token, slots[i]);
    ptx::cp_async_commit();
  }
  typename Loader::Slot next_slot = loader.find(first_key + kStages * Shape::kKeys + first_own_key);

  ptx::cp_async_wait<2 * kStages - 1>();
  __syncthreads();
  QueryFragments<Shape::kRowTiles, Shape::kHeadDim, sizeof(T), kHoldsQuery, Shape::kWarpColumns> query(
      query_rows + warp_row * Shape::kQueryPitch + first_column * static_cast<int32_t>(sizeof(T)));
  query.fill();

  int stage = 0;
#pragma unroll 1
  while (first_key < work.keys.end) {
    const int32_t next = ptx::opaque(first_key) + kStages * Shape::kKeys;
    float scores[Shape::kRowTiles][Shape::kKeys / 8][4];
    Math::scores(scores, query, keys(stage) + first_column * static_cast<int32_t>(sizeof(Stored)), params);

    (scales.apply_to_scores(scores, stage), ...);

    // K's stage is free once all warps have passed the barrier below.
    const auto refill_keys = [&] {
      if (next < work.keys.end) load_keys(stage, next, next_slot);
      ptx::cp_async_commit();
    };
    ptx::cp_async_wait<kPending>();
    __syncthreads();
    add_up_block<Shape>(scores, keys(stage));
    if constexpr (kRefillsEarly) refill_keys();

    if constexpr (kFetchesBlocks<LogitsTransform>) {
      transform.apply_to_block(scores, work, warp_row, first_key);
    }

    const bool masked = first_key < work.keys.common_begin || first_key + Shape::kKeys > work.keys.common_end;
    [[maybe_unused]] PackedOperand<T, Shape::kRowTiles, Shape::kKeys / 8> packed;
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
      if constexpr (!kFetchesBlocks<LogitsTransform>) {
        transform.template apply<T>(scores[tile], transform.rows(work, warp_row + 16 * tile), first_key);
      }
      if (masked) apply_mask(scores[tile], params, work.tile, warp_row + 16 * tile, first_key);
      state.update(tile, scores[tile], transform.log2_unit());
      if constexpr (kPacks) packed.set(tile, scores[tile]);
      if constexpr (kHasTokenScales<Stored>) {
        state.apply(tile, scores[tile], (scales, ...).values(stage), masked, ProbableKeys{});
      }
    }
    if constexpr (!kRefillsEarly) refill_keys();
    const uint32_t block_values = values(stage) + first_column * static_cast<int32_t>(sizeof(Stored));
    const auto accumulate = [&](const auto&... between) {
      if constexpr (kPacks) {
        Math::accumulate(state.output, packed, block_values, params, between...);
      } else {
        Math::accumulate(state.output, scores, block_values, params, between...);
      }
    };
    if constexpr (kFetchesNext) {
      transform.fetch_block_between(next, next < work.keys.end, accumulate);
      ptx::cp_async_commit();
    } else {
      accumulate();
    }

    // After this barrier V's stage is free and the next block of K has arrived.
    ptx::cp_async_wait<kPending + (kFetchesNext ? 1 : 0)>();
    __syncthreads();
    if (next < work.keys.end) load_values(stage, next, next_slot);
    if constexpr (kFetchesBlocks<LogitsTransform> && !kFetchesNext) {
      if (next < work.keys.end) transform.template fetch_block<false>(next);
    }
    ptx::cp_async_commit();
    next_slot = loader.find(next + Shape::kKeys + first_own_key);
    first_key += Shape::kKeys;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  state.finish();
}

}  // namespace xa
