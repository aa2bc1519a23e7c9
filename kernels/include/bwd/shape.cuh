// How the gradients' kernels cut up the work, by element type and head dimension; and their shared memory.
//
// A CTA holds rows of two operands in shared memory (dq: Q and dO; dkdv: K and V) and streams blocks of the other two
// past them (dq: K and V; dkdv: Q and dO). kColumnWarps warps have the same rows held and share the gradients' columns.
// Where a block is as many chunks, they share the scores' columns too, and weights go from warp to warp through shared
// memory; else each of them computes all scores.
//
// Shared memory: the rows held, the kStages blocks of the rows streamed, the exchanged weights, what is known of each
// query row (QueryRow) and of each key held (Span), the Pass.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/sequence_segment.cuh"
#include "element.cuh"
#include "shared_rows.cuh"
#include "tiles/attention_bwd.cuh"

namespace xa {

/// Rows as one of kWarps warps that share their columns has them: of kWarps neighbouring groups of 32 bytes one is its
/// own, so that a step from group to group touches no bit that tells the warps apart, as SwizzledRows wants.
template <typename Rows, int kWarps>
struct ColumnGroups : Rows {
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return Rows::moved(address, rows, chunks * kWarps);
  }
};

template <typename Gradient, typename Shape, typename T, int kHeadDim_>
struct BackwardShape : tiles::AttentionBwd<Gradient, Shape, sizeof(T), kHeadDim_> {
  using Choice = tiles::AttentionBwd<Gradient, Shape, sizeof(T), kHeadDim_>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHoldsKeys = std::is_same_v<Gradient, tiles::gradient_dkdv>;
  static constexpr int kWarps = Choice::kRowWarps * Choice::kColumnWarps, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * Choice::kRowTiles;
  /// Rows that the CTA holds.
  static constexpr int kHeld = kWarpRows * Choice::kRowWarps;
  /// Columns of the gradients that a warp computes.
  static constexpr int kColumns = kHeadDim / Choice::kColumnWarps;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr bool kExchanges =
      Choice::kColumnWarps > 1 && Choice::kBlock / Choice::kColumnWarps == Choice::kChunk;
  /// Streamed rows that the CTA takes up at a time.
  static constexpr int kAtOnce = kExchanges ? Choice::kBlock : Choice::kChunk;
  using Rows = SwizzledRows<kRowBytes>;
  using Columns = ColumnGroups<Rows, Choice::kColumnWarps>;

  static constexpr int kHeldBytes = kHeld * Rows::kPitch;
  static constexpr int kBlockBytes = Choice::kBlock * Rows::kPitch;
  /// The first of the streamed blocks: a stage is a block of Q or K and one of dO or V.
  static constexpr int kStreamOffset = 2 * kHeldBytes;
  static constexpr int kExchangeOffset = kStreamOffset + 2 * Choice::kStages * kBlockBytes;
  /// Weights [kHeld, kBlock] of the operands' type: P and dS, or dS alone.
  static constexpr int kExchangePitch = Choice::kBlock * static_cast<int>(sizeof(T)) + 16;
  static constexpr int kExchangeMatrix = kHeld * kExchangePitch;
  static constexpr int kExchangeBytes = kExchanges ? (kHoldsKeys ? 2 : 1) * kExchangeMatrix : 0;
  static constexpr int kQueryRows = kHoldsKeys ? Choice::kStages * Choice::kBlock : kHeld;
  static constexpr int kQueryRowsOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kSpansOffset = kQueryRowsOffset + kQueryRows * static_cast<int>(sizeof(QueryRow));
  static constexpr int kPassOffset = kSpansOffset + (kHoldsKeys ? kHeld * static_cast<int>(sizeof(Span)) : 0);
  static constexpr int kNeededBytes = kPassOffset + static_cast<int>(sizeof(Pass));

  static_assert(Choice::kBlock % Choice::kChunk == 0 && Choice::kChunk % 16 == 0);
  static_assert(Choice::kSharedBytes == kNeededBytes, "shared_bytes in variants.toml is what the launch asks for");
};

}  // namespace xa
