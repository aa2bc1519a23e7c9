// Prefill: the warps of a CTA have rows of their own and share each block of keys.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile_math.cuh"
#include "work_tile.cuh"

namespace xa {

/// Streams the keys of the tile through the CTA's ring, of which each warp fetches as many rows, and takes them
/// up into `state`. The warp's rows are those from row `warp_row` of the tile; the tile's are on their way to
/// `query_rows`, as the first group of copies.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, typename State>
__device__ __forceinline__ void attend_with_rows(State& state, const AttentionParams& params, const WorkTile& plan,
                                                 uint32_t ring, int32_t warp_row, uint32_t query_rows,
                                                 const LogitsTransform& transform) {
  using Math = TileMath<T, Stored, typename Shape::Rows, Shape::kRowTiles, Shape::kKeys, Shape::kHeadDim>;
  constexpr int kStages = Shape::kStages;
  constexpr bool kHoldsQuery = Shape::kRowTiles == 1 && Shape::kQueryRowBytes <= 256;
  // Each block is two groups of copies, K's and V's. Those that may be under way while the oldest is waited for.
  constexpr int kPending = 2 * kStages - 2;
  // The sooner K is fetched again the better, but a refill beside the scores takes registers.
  constexpr int kAccumulators = Shape::kRowTiles * 4 * (Shape::kKeys + Shape::kHeadDim) / 8;
  constexpr bool kRefillsEarly = kAccumulators <= (Element<T>::kIs16Bit ? 144 : 72);
  const RowLoader<Stored, Shape::kHeadDim, Shape::kKeysPerLoad> loader(params, plan);
  const int32_t share = threadIdx.x / 32 * Shape::kKeysPerLoad;
  const auto keys = [&](int stage) { return ring + stage * Shape::kBlockBytes; };
  const auto values = [&](int stage) { return keys(kStages + stage); };
  const uint32_t share_bytes = share * Shape::Rows::kPitch;
  int32_t first_key = plan.keys.begin / Shape::kKeys * Shape::kKeys;

  TokenSlot slots[kStages];
#pragma unroll
  for (int i = 0; i < kStages; ++i) slots[i] = loader.find(first_key + i * Shape::kKeys + share);
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    const int32_t token = first_key + i * Shape::kKeys;
    if (token < plan.keys.end) loader.load_keys(keys(i) + share_bytes, token + share, slots[i]);
    ptx::cp_async_commit();
    if (token < plan.keys.end) loader.load_values(values(i) + share_bytes, token + share, slots[i]);
    ptx::cp_async_commit();
  }
  TokenSlot ahead = loader.find(first_key + kStages * Shape::kKeys + share);

  ptx::cp_async_wait<2 * kStages - 1>();
  __syncthreads();
  QueryFragments<Shape::kRowTiles, Shape::kHeadDim, sizeof(T), kHoldsQuery> query(query_rows +
                                                                                  warp_row * Shape::kQueryPitch);
  query.fill();

  int stage = 0;
#pragma unroll 1
  while (first_key < plan.keys.end) {
    const int32_t next = ptx::opaque(first_key) + kStages * Shape::kKeys;
    float scores[Shape::kRowTiles][Shape::kKeys / 8][4];
    Math::scores(scores, query, keys(stage), params);

    // K's block is free again once all have read it.
    const auto refill_keys = [&] {
      if (next < plan.keys.end) loader.load_keys(keys(stage) + share_bytes, next + share, ahead);
      ptx::cp_async_commit();
    };
    ptx::cp_async_wait<kPending>();
    __syncthreads();
    if constexpr (kRefillsEarly) refill_keys();

    const bool masked = first_key < plan.keys.common_begin || first_key + Shape::kKeys > plan.keys.common_end;
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
      transform.template apply<T>(scores[tile], plan, warp_row + 16 * tile, first_key);
      if (masked) apply_mask(scores[tile], params, plan.tile, warp_row + 16 * tile, first_key);
      state.absorb(tile, scores[tile], transform.log2_unit());
    }
    if constexpr (!kRefillsEarly) refill_keys();
    Math::accumulate(state.output, scores, values(stage), params);

    // V's block is free again once all have read it, and the next K has to be there.
    ptx::cp_async_wait<kPending>();
    __syncthreads();
    if (next < plan.keys.end) loader.load_values(values(stage) + share_bytes, next + share, ahead);
    ptx::cp_async_commit();
    ahead = loader.find(next + Shape::kKeys + share);
    first_key += Shape::kKeys;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  state.finish();
}

}  // namespace xa
