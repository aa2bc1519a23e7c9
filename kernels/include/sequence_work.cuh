// The work in a sequence: how many tiles it has, and how many KV chunks each of them (work_partition.cuh).
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa {

/// A sequence and the work in it. A KV chunk is kKvChunkKeys keys from an absolute multiple on: one step of a CTA.
template <int kRows, int kKvChunkKeys>
struct SequenceWork {
  QoTile tile;      // first_row and num_rows are not set
  StartMaxima end;  // where the next sequence starts
  int32_t num_tiles;
  int32_t chunks;  // of each tile: those with keys that any row of the sequence attends to, at least 1
  int32_t first_chunk;

  __device__ __forceinline__ int64_t work() const { return static_cast<int64_t>(num_tiles) * chunks; }
  /// Packed rows of tile `index`. Tile 0 has the last rows of the sequence, the only ones that may be fewer than kRows.
  __device__ __forceinline__ int32_t num_rows(int32_t index, int32_t group) const {
    return index > 0 ? kRows : tile.len_q * group - (num_tiles - 1) * kRows;
  }
  __device__ __forceinline__ QoTile tile_at(int32_t index, int32_t group) const {
    QoTile result = tile;
    result.first_row = (num_tiles - 1 - index) * kRows;
    result.num_rows = num_rows(index, group);
    return result;
  }
  /// Counts the tiles and their chunks from `tile`. A sequence that is not live, or whose number of queries is another
  /// launch's, has no tiles.
  __device__ __forceinline__ void measure(const AttentionParams& params, bool live) {
    const bool ours = live && tile.len_q >= params.min_queries && tile.len_q <= params.max_queries;
    num_tiles = ours ? (tile.len_q * params.group + kRows - 1) / kRows : 0;
    const Visibility visibility(params, tile);
    const int32_t begin = visibility.begin(0), end = visibility.end(tile.len_q - 1);
    first_chunk = begin < end ? begin / kKvChunkKeys : 0;
    chunks = begin < end ? (end + kKvChunkKeys - 1) / kKvChunkKeys - first_chunk : 1;
  }
};

/// Loads adjacent sequences, from `first` on; `raise` may change their starts. Returns whether the starts of
/// the sequences below `num_seqs` then ascend.
template <int kCount, int kRows, int kKvChunkKeys, typename Raise>
__device__ __forceinline__ bool load_sequences(const AttentionParams& params, int32_t first, int32_t num_seqs,
                                               SequenceWork<kRows, kKvChunkKeys> (&sequences)[kCount],
                                               const Raise& raise) {
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
