// The work in a sequence: how many tiles it has, and how many KV chunks each of them (work_partition.cuh).
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "split_kv.cuh"
#include "work_tile.cuh"

namespace xa {

/// Whether a tile ends with any packed row, or has whole queries, as many as AttentionParams::tile_queries says.
enum class TileEnd { kRow, kQuery };

/// The order of a sequence's tiles, and the chunks that are counted for them.
enum class TileOrder {
  /// From the last rows to the first. Each tile counts all chunks of the sequence, which is right for a few queries.
  kDescending,
  /// The last rows, the first, the second last, the second, and so on. Each tile counts its own chunks, and under a
  /// causal mask adjacent tiles have equal sums, so that the tile of any chunk is found without a search.
  kFolded,
};

/// What work is counted in: tiles of up to kRows packed rows, and KV chunks, which are kKvChunkKeys keys from an
/// absolute multiple on: one step of a CTA.
template <int kRows_, int kKvChunkKeys_, TileEnd kTileEnd_ = TileEnd::kRow,
          TileOrder kTileOrder_ = TileOrder::kDescending>
struct WorkUnit {
  static constexpr int kRows = kRows_, kKvChunkKeys = kKvChunkKeys_;
  static constexpr bool kHasWholeQueries = kTileEnd_ == TileEnd::kQuery;
  static constexpr bool kIsFolded = kTileOrder_ == TileOrder::kFolded;

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

/// The place of a tile in its sequence.
template <typename Index>
struct TilePlace {
  int32_t index;
  Index first;     // the sequence's chunks before it
  int32_t chunks;  // counted for it
};

/// Chunks of tiles 2 i and 2 i + 1 of a sequence together, if tiles are folded.
template <bool kIsFolded>
struct PairChunks {
  int32_t pair_chunks;
};
template <>
struct PairChunks<false> {};

/// A sequence and the work in it.
template <typename Unit>
struct SequenceWork : PairChunks<Unit::kIsFolded> {
  QoTile tile;      // first_row and num_rows are not set
  StartMaxima end;  // where the next sequence starts
  int32_t num_tiles;
  // Of each tile: those with keys that any row of the sequence attends to, at least 1. Folded: of tile 0.
  int32_t chunks;
  int32_t first_chunk;

  __device__ __forceinline__ int64_t work() const {
    if constexpr (Unit::kIsFolded) {
      return static_cast<int64_t>(num_tiles / 2) * this->pair_chunks + num_tiles % 2 * middle_chunks();
    } else {
      return static_cast<int64_t>(num_tiles) * chunks;
    }
  }
  /// The tile that has chunk `chunk` of the sequence's work.
  template <typename Index>
  __device__ __forceinline__ TilePlace<Index> find(const AttentionParams& params, Index chunk) const {
    static_assert(Unit::kIsFolded);
    if (num_tiles == 1) return TilePlace<Index>{0, 0, middle_chunks()};
    const int32_t pair = static_cast<int32_t>(divide(chunk, Index{this->pair_chunks}));
    const Index first = Index{pair} * this->pair_chunks;
    const int32_t even = chunks_of(params, 2 * pair);
    if (chunk - first < even || 2 * pair + 1 >= num_tiles) return TilePlace<Index>{2 * pair, first, even};
    return TilePlace<Index>{2 * pair + 1, first + even, this->pair_chunks - even};
  }
  /// Chunks that are counted for tile `index`.
  __device__ __forceinline__ int32_t chunks_of(const AttentionParams& params, int32_t index) const {
    if constexpr (Unit::kIsFolded) {
      if (index == num_tiles - 1 && index % 2 == 0) return middle_chunks();
      const int32_t even = clamp(chunks_in(params, tile_at(params, index / 2 * 2)).count, 1, this->pair_chunks - 1);
      return index % 2 == 0 ? even : this->pair_chunks - even;
    } else {
      return chunks;
    }
  }
  /// The chunk of the sequence's keys with which tile `index` begins.
  __device__ __forceinline__ int32_t first_chunk_of(const AttentionParams& params, int32_t index) const {
    if (Unit::kIsFolded && num_tiles > 1) return chunks_in(params, tile_at(params, index)).first;
    return first_chunk;
  }
  /// Packed rows of tile `index`. Tile 0 has the last rows of the sequence, the only ones that may be fewer than a
  /// tile's.
  __device__ __forceinline__ int32_t num_rows(const AttentionParams& params, int32_t index) const {
    const int32_t rows = Unit::rows(params);
    return index > 0 ? rows : tile.len_q * params.group - (num_tiles - 1) * rows;
  }
  __device__ __forceinline__ QoTile tile_at(const AttentionParams& params, int32_t index) const {
    QoTile result = tile;
    if constexpr (Unit::kIsFolded) {
      result.first_row = (index % 2 == 0 ? num_tiles - 1 - index / 2 : index / 2) * Unit::rows(params);
    } else {
      result.first_row = (num_tiles - 1 - index) * Unit::rows(params);
    }
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
    if constexpr (Unit::kIsFolded) {
      this->pair_chunks = 2 * chunks;
      if (num_tiles <= 1) return;  // most sequences, whose tile has all rows: no division by the group
      chunks = chunks_in(params, tile_at(params, 0)).count;
      this->pair_chunks = chunks + chunks_in(params, tile_at(params, 1)).count;
    }
  }

 private:
  struct Chunks {
    int32_t first;
    int32_t count;
  };
  /// The chunks with keys that a row of `tile` attends to; at least one is counted.
  static __device__ __forceinline__ Chunks chunks_in(const AttentionParams& params, const QoTile& tile) {
    const KeyRange keys = visible_keys(params, tile);
    const int32_t first = keys.begin / Unit::kKvChunkKeys;
    return Chunks{first, max((keys.end + Unit::kKvChunkKeys - 1) / Unit::kKvChunkKeys - first, 1)};
  }
  /// Chunks of the tile that has no other one in its pair.
  __device__ __forceinline__ int32_t middle_chunks() const { return (this->pair_chunks + 1) / 2; }
};

/// Loads adjacent sequences, from `first` on; `raise` may change their starts. `num_seqs`, as the caller of the
/// operator gives it, becomes the number of live sequences. Returns whether the starts of those then ascend.
template <int kCount, typename Unit, typename Raise>
__device__ __forceinline__ bool load_sequences(const AttentionParams& params, int32_t first, int32_t& num_seqs,
                                               SequenceWork<Unit> (&sequences)[kCount], const Raise& raise) {
  Metadata<kCount> metadata;
  metadata.load(params, first);
  raise(metadata);
  num_seqs = metadata.live_sequences(params, num_seqs);
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
