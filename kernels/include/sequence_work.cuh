// Sequences as the planning of decode sees them: how many tiles, of how many units each (work_partition.cuh).
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa {

/// A sequence and the work in it.
template <int kRows, int kKvChunkKeys>
struct Sequence {
  QoTile tile;      // but for the rows
  StartMaxima end;  // where the next one starts
  int32_t num_tiles;
  int32_t chunks;  // of each tile: all count the keys that any row of the sequence sees
  int32_t first_chunk;

  __device__ __forceinline__ int64_t work() const { return static_cast<int64_t>(num_tiles) * chunks; }
  /// Packed rows of tile `index`: the last rows of the sequence come first.
  __device__ __forceinline__ int32_t num_rows(int32_t index, int32_t group) const {
    return index > 0 ? kRows : tile.len_q * group - (num_tiles - 1) * kRows;
  }
  __device__ __forceinline__ QoTile tile_at(int32_t index, int32_t group) const {
    QoTile found = tile;
    found.first_row = (num_tiles - 1 - index) * kRows;
    found.num_rows = num_rows(index, group);
    return found;
  }
  /// From `tile`.
  __device__ __forceinline__ void measure(const AttentionParams& params, bool live) {
    const bool ours = live && tile.len_q >= params.min_queries && tile.len_q <= params.max_queries;
    num_tiles = ours ? (tile.len_q * params.group + kRows - 1) / kRows : 0;
    const Visibility visibility(params, tile);
    const int32_t begin = visibility.begin(0), end = visibility.end(tile.len_q - 1);
    first_chunk = begin < end ? begin / kKvChunkKeys : 0;
    chunks = begin < end ? (end + kKvChunkKeys - 1) / kKvChunkKeys - first_chunk : 1;
  }
};

/// Loads neighbouring sequences, from `first` on, and lets `raise` change their starts; whether these then ascend, as
/// far as `num_seqs` goes.
template <int kCount, int kRows, int kKvChunkKeys, typename Raise>
__device__ __forceinline__ bool load_sequences(const AttentionParams& params, int32_t first, int32_t num_seqs,
                                               Sequence<kRows, kKvChunkKeys> (&sequences)[kCount], const Raise& raise) {
  Metadata<kCount> metadata;
  metadata.load(params, first);
  raise(metadata);
  bool ascend = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool live = first + i < num_seqs;
    ascend &= !live || metadata.ascends(params, i);
    sequences[i].tile = metadata.sequence(params, i, first + i);
    sequences[i].end = StartMaxima{metadata.starts[i + 1], metadata.starts_k[i + 1]};
    sequences[i].measure(params, live);
  }
  return ascend;
}

}  // namespace xa
