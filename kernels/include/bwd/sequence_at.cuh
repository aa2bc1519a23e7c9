// A sequence that is found by its number, where a CTA or a warp does not visit those before it.
#pragma once

#include <cstdint>

#include "work_tile.cuh"

namespace xa {

/// Describes sequence `sequence`, whose starts are raised to those of all sequences before. `maxima` are of the starts
/// before sequence `scanned`, and become those before `sequence`. All lanes of a warp call it.
__device__ __forceinline__ QoTile sequence_at(const AttentionParams& params, int32_t sequence, int32_t scanned,
                                              StartMaxima& maxima) {
  raise_maxima(params, scanned, sequence, maxima);
  Metadata<1> metadata;
  metadata.load(params, sequence);
  metadata.starts[0] = max(metadata.starts[0], maxima.q);
  metadata.starts[1] = max(metadata.starts[1], metadata.starts[0]);
  metadata.starts_k[0] = max(metadata.starts_k[0], maxima.k);
  metadata.starts_k[1] = max(metadata.starts_k[1], metadata.starts_k[0]);
  return metadata.sequence(params, 0, sequence);
}

}  // namespace xa
