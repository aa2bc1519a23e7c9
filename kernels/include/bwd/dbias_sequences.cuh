// The sequences that share a bias, with the rows of them that a CTA of attention_bwd_dbias_aligned has.
#pragma once

#include <cstdint>

#include "bwd/ptx_extra.cuh"
#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa {

/// A sequence that has some of the CTA's rows, which attend to some key.
struct DbiasSequence {
  int32_t first_token;  // row of q of the CTA's first row
  int32_t num_rows;
  int32_t start_k;
  int32_t len_k;
  KeyRange keys;  // of its rows among those of the CTA
  int32_t leftpad_k;
  int32_t shift;

  /// Whether some row attends to some of `count` keys from `first_key` on.
  __device__ __forceinline__ bool attends(int32_t first_key, int32_t count) const {
    return keys.begin < first_key + count && keys.end > first_key;
  }
  __device__ __forceinline__ Visibility visibility(const AttentionParams& params) const {
    QoTile tile = {};
    tile.leftpad_k = leftpad_k;
    tile.len_k = len_k;
    return Visibility(params, tile, shift);
  }
};

/// Up to kCount adjacent sequences at a time, without those that have no row of the CTA. In shared memory.
struct DbiasSequences {
  static constexpr int kCount = 20;

  DbiasSequence of[kCount];
  int32_t count;
  int32_t reserved;
  StartMaxima maxima;  // of the starts before the next ones

  /// Describes sequences from `first` on, of which those from `end` on do not exist. If `continues`, `maxima` are of
  /// the starts before. All threads of the CTA call it, between barriers.
  template <int kRows>
  __device__ __forceinline__ void describe(const AttentionParams& params, int32_t first, int32_t end, int32_t first_row,
                                           bool continues) {
    static_assert(kCount <= 32);
    if (ptx::thread() >= 32) return;
    const int32_t lane = ptx::thread();
    StartMaxima raised = {0, 0};
    if (continues) {
      raised = maxima;
    } else {
      raise_maxima(params, 0, first, raised);
    }
    Metadata<1> metadata;
    metadata.load(params, first + lane);
    metadata.ascend(params, raised);
    raised = {__shfl_sync(~0u, metadata.starts[1], kCount - 1), __shfl_sync(~0u, metadata.starts_k[1], kCount - 1)};
    QoTile tile = metadata.sequence(params, 0, first + lane);
    tile.first_row = first_row;
    tile.num_rows = lane < kCount && first + lane < end ? min(tile.len_q - first_row, kRows) : 0;
    DbiasSequence sequence = {
        tile.first_token + first_row, tile.num_rows, tile.start_k, tile.len_k, {}, tile.leftpad_k, 0};
    if (tile.num_rows > 0) {
      const Visibility visibility(params, tile);
      sequence.shift = visibility.shift;
      sequence.keys = visible_keys(visibility, first_row, first_row + tile.num_rows - 1);
    }
    // All lanes have read `maxima`.
    const uint32_t present = __ballot_sync(~0u, sequence.keys.begin < sequence.keys.end);
    if (present >> lane & 1) of[__popc(present & ((1u << lane) - 1))] = sequence;
    if (lane == 0) {
      count = __popc(present);
      maxima = raised;
    }
  }

  /// The first sequence from `slot` on whose rows attend to some of `keys` keys from `first_key` on.
  __device__ __forceinline__ int32_t next(int32_t slot, int32_t first_key, int32_t keys) const {
#pragma unroll 1
    while (slot < count && !of[slot].attends(first_key, keys)) ++slot;
    return slot;
  }
};

}  // namespace xa
