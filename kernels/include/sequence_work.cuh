// The work in a sequence: how many tiles it has, and how many KV chunks each of them (work_partition.cuh).
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "work_tile.cuh"

namespace xa {

/// Whether a tile ends with any packed row, or has whole queries, as many as AttentionParams::tile_queries says.
enum class TileEnd { kRow, kQuery };

/// What work is counted in: tiles of up to kRows packed rows, and KV chunks, which are kKvChunkKeys keys from an
/// absolute multiple on: one step of a CTA.
template <int kRows_, int kKvChunkKeys_, TileEnd kTileEnd_ = TileEnd::kRow>
struct WorkUnit {
  static constexpr int kRows = kRows_, kKvChunkKeys = kKvChunkKeys_;
  static constexpr bool kHasWholeQueries = kTileEnd_ == TileEnd::kQuery;

  /// Rows of a tile.
  static __device__ __forceinline__ int32_t rows(const AttentionParams& params) {
    return kHasWholeQueries ? params.tile_queries.divisor * params.group : kRows;
  }
  /// Tiles of a sequence of `len_q` queries.
  static __device__ __forceinline__ int32_t count_tiles(const AttentionParams& params, int32_t len_q) {
    if constexpr (kHasWholeQueries) return divide(len_q + params.tile_queries.divisor - 1, params.tile_queries);
    return (len_q * params.group + kRows - 1) / kRows;
  }
};

/// A sequence and the work in it.
template <typename Unit>
struct SequenceWork {
  QoTile tile;      // first_row and num_rows are not set
  StartMaxima end;  // where the next sequence starts
  int32_t num_tiles;
  int32_t chunks;  // of each tile: those with keys that any row of the sequence attends to, at least 1
  int32_t first_chunk;

  __device__ __forceinline__ int64_t work() const { return static_cast<int64_t>(num_tiles) * chunks; }
  /// Packed rows of tile `index`. Tile 0 has the last rows of the sequence, the only ones that may be fewer than a
  /// tile's.
  __device__ __forceinline__ int32_t num_rows(const AttentionParams& params, int32_t index) const {
    const int32_t rows = Unit::rows(params);
    return index > 0 ? rows : tile.len_q * params.group - (num_tiles - 1) * rows;
  }
  __device__ __forceinline__ QoTile tile_at(const AttentionParams& params, int32_t index) const {
    QoTile result = tile;
    result.first_row = (num_tiles - 1 - index) * Unit::rows(params);
    result.num_rows = num_rows(params, index);
    return result;
  }
  /// Counts the tiles and their chunks from `tile`. A sequence that is not live, or whose number of queries is another
  /// launch's, has no tiles.
  __device__ __forceinline__ void measure(const AttentionParams& params, bool live) {
    const bool ours = live && tile.len_q >= params.min_queries && tile.len_q <= params.max_queries;
    num_tiles = ours ? Unit::count_tiles(params, tile.len_q) : 0;
    const Visibility visibility(params, tile);
    const int32_t begin = visibility.begin(0), end = visibility.end(tile.len_q - 1);
    first_chunk = begin < end ? begin / Unit::kKvChunkKeys : 0;
    chunks = begin < end ? (end + Unit::kKvChunkKeys - 1) / Unit::kKvChunkKeys - first_chunk : 1;
  }
};

/// Loads adjacent sequences, from `first` on; `raise` may change their starts. Returns whether the starts of
/// the sequences below `num_seqs` then ascend.
template <int kCount, typename Unit, typename Raise>
__device__ __forceinline__ bool load_sequences(const AttentionParams& params, int32_t first, int32_t num_seqs,
                                               SequenceWork<Unit> (&sequences)[kCount], const Raise& raise) {
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
