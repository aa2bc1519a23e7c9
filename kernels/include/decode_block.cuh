// What a warp of decode does with the scores of a block of keys: scales, logits transform, mask, softmax and P V.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "params/attention.cuh"
#include "softmax.cuh"
#include "work_tile.cuh"

namespace xa {

/// The `Scales` of a loop over rows that have no scales of their own (token_scales.cuh).
struct NoTokenScales {};

/// The `Bias` of a loop without one (loaded_bias.cuh).
struct NoBias {
  /// Whether keys may be in pages.
  static constexpr bool kHasPages = true;
  __device__ __forceinline__ void fetch(int32_t) const {}
  template <int kKeyTiles>
  __device__ __forceinline__ void add(float (&)[kKeyTiles][4], int32_t) const {}
};

/// Updates `state` by q . k of the block of keys from `key` on, `scores`, which become probabilities. The block of V is
/// at shared address `values`; `scales` has the scales of stage `stage` if rows of type `Stored` have some. `Math` is
/// the TileMath of the loop. `bias` has fetched that of the block.
template <typename Math, typename T, typename Stored, typename State, int kKeyTiles, typename LogitsTransform,
          typename Scales, typename Bias = const NoBias>
__device__ __forceinline__ void attend_scores(State& state, float (&scores)[1][kKeyTiles][4],
                                              const LogitsTransform& transform, const Scales& scales,
                                              const AttentionParams& params, const WorkTile& work, int32_t stage,
                                              int32_t key, uint32_t values, Bias& bias = Bias{}) {
  constexpr int kKeys = 8 * kKeyTiles;
  if constexpr (kHasTokenScales<Stored>) scales.apply_to_scores(scores, stage);
  transform.template apply<T>(scores[0], transform.rows(work, 0), key);
  bias.add(scores[0], key);
  const bool masked = key < work.keys.common_begin || key + kKeys > work.keys.common_end;
  if (masked) apply_mask(scores[0], params, work.tile, 0, key);
  [[maybe_unused]] VisibleKeys<State::kHalves> visible;
  if constexpr (kHasTokenScales<Stored>) {
    if (masked) visible.find(scores[0]);
  }
  state.update(0, scores[0], transform.log2_unit(), work.tile.num_rows > 8);
  if constexpr (kHasTokenScales<Stored>) {
    state.apply(0, scores[0], scales.values(stage), masked, visible, work.tile.num_rows > 8);
  }
  Math::accumulate(state.output, scores, values, params);
}

}  // namespace xa
