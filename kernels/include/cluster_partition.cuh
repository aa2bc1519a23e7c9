// The work partition of cluster_decode.cu: which CTA of a cluster computes which keys.
//
// A cluster has the tiles of one KV head. They stand in a fixed order, and so do their KV chunks (kKvChunkKeys keys
// from an absolute multiple on). CTA r computes the chunks from r * range_chunks to (r + 1) * range_chunks:
//
//     tiles of a KV head  |      sequence 0      |  sequence 1  | seq. 2 |          sequence 3            |
//     chunks              |. . . . . . . . . . . |. . . . . . . |. . . . |. . . . . . . . . . . . . . . . |
//     CTAs                |--- 0 -----|---- 1 ----|----- 2 ----|---- 3 ----|---- 4 ----|---- 5 ----|- 6 --|
//
// A single tile of sequence 0 is dealt out instead: CTA r of n has the chunks r, r + n, ..., whose pages can be loaded
// together with the metadata.
//
// There are no more sequence slots than lanes, so each warp plans by itself: it loads all metadata at once, and a
// prefix sum tells where sequences begin. No warp waits for another one before it loads keys.
#pragma once

#include <cstdint>

#include "cluster_loop.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "params/cluster_decode.cuh"
#include "ptx.cuh"
#include "work_tile.cuh"

namespace xa {

static_assert(kClusterDecodeSlots == 32, "a lane plans a slot");

/// A part of a tile: the chunks that one CTA has of it. Parts are numbered in the order of keys, and the CTAs that have
/// them are adjacent.
struct ClusterPart {
  int32_t index;
  int32_t count;  // parts of the tile
  int32_t end;    // past the part's last chunk
};

/// The lane's sequence and the work in it.
template <int kRows, int kKvChunkKeys>
struct LaneSequence {
  QoTile tile;  // first_row and num_rows are not set
  int32_t num_tiles;
  int32_t chunks;  // of each tile: those with keys that any row of the sequence attends to, at least 1
  int32_t first_chunk;
  int32_t key_begin;  // of these keys
  int32_t key_end;
  int32_t end;  // chunks up to the sequence's end, in the order of the KV head

  __device__ __forceinline__ int32_t work() const { return num_tiles * chunks; }
  /// Sets all but `end`. A sequence that is not live has no tiles, nor has one whose number of queries is another
  /// launch's.
  __device__ __forceinline__ void measure(const AttentionParams& params, const QoTile& sequence, bool live) {
    tile = sequence;
    const bool is_ours = live && tile.len_q >= params.min_queries && tile.len_q <= params.max_queries;
    num_tiles = is_ours ? static_cast<uint32_t>(tile.len_q * params.group + kRows - 1) / kRows : 0;
    const Visibility visibility(params, tile);
    key_begin = visibility.begin(0);
    key_end = visibility.end(tile.len_q - 1);
    if (key_begin >= key_end) key_begin = key_end = 0;
    first_chunk = static_cast<uint32_t>(key_begin) / kKvChunkKeys;
    chunks = max(static_cast<uint32_t>(key_end + kKvChunkKeys - 1) / kKvChunkKeys - first_chunk, 1u);
  }
  /// Tile `index`. Tile 0 has the last rows of the sequence, the only ones that may be fewer than kRows.
  __device__ __forceinline__ QoTile tile_at(int32_t index, int32_t group) const {
    QoTile result = tile;
    result.first_row = (num_tiles - 1 - index) * kRows;
    result.num_rows = index > 0 ? kRows : tile.len_q * group - result.first_row;
    return result;
  }
  /// The keys of a tile of the sequence.
  __device__ __forceinline__ KeyRange keys_of(const AttentionParams& params, const QoTile& of) const {
    if (__builtin_expect(tile.len_q > 1, false)) return visible_keys(params, of);
    return KeyRange{key_begin, key_end, key_begin, key_end};
  }
};

/// What a warp knows of the work of its CTA, in registers; the same in all lanes except for `page`.
struct ClusterRange {
  int32_t begin;  // the CTA's chunks
  int32_t end;
  int32_t range_chunks;  // of each CTA
  float reciprocal;      // of range_chunks
  LiveRows live;
  bool starts_ascend;
  /// Whether the cluster has a single tile, of sequence 0 and from its key 0 on. CTA r then has the chunks r, r + n,
  /// ... instead of adjacent ones, and lane i has the page of the i-th of its warp's blocks in `page`: these are loaded
  /// together with the metadata, as if this were so.
  bool is_dealt;
  int32_t page;
};

/// The page of the lane's block, should the chunks be dealt out. Loads no entry outside of sequence 0's row of the
/// table.
template <int kKeys, int kKvChunkKeys>
__device__ __forceinline__ int32_t guess_page(const AttentionParams& params, int32_t rank, int32_t size) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t token = (rank + lane * size) * kKvChunkKeys + warp * kKeys;
  const bool is_in_table = !has_contiguous_keys(params) && token < params.capacity && params.max_seqs > 0;
  return is_in_table ? __ldg(params.block_table + PageDivider(params.page_size).page(token)) : 0;
}

/// Plans the work of CTA `rank` of a cluster of `size`. Every warp calls this. The cluster has fewer than 2^20 chunks.
template <int kKeys, int kRows, int kKvChunkKeys>
__device__ __forceinline__ ClusterRange partition_cluster(const AttentionParams& params, int32_t rank, int32_t size,
                                                          LaneSequence<kRows, kKvChunkKeys>& mine) {
  ClusterRange range;
  range.page = guess_page<kKeys, kKvChunkKeys>(params, rank, size);
  const int32_t lane = threadIdx.x % 32;
  const int32_t given = params.num_seqs == nullptr ? params.max_seqs : __ldg(params.num_seqs);
  Metadata<1> metadata;
  metadata.load(params, lane);
  // Starts are not negative. That num_seqs seems to depend on one keeps the compiler from waiting for it before it
  // issues the loads of the metadata.
  const int32_t zero = ptx::opaque(metadata.starts[1]) >> 31;
  const int32_t num_seqs = clamp(given + zero, 0, params.max_seqs);
  range.starts_ascend = __all_sync(~0u, lane >= num_seqs || metadata.ascends(params, 0));
  if (__builtin_expect(!range.starts_ascend, false)) {
    StartMaxima maxima = {0, 0};
    metadata.ascend(params, maxima);
  }
  mine.measure(params, metadata.sequence(params, 0, lane), lane < num_seqs);
  mine.end = sum_up_to_this_lane(mine.work());
  const int32_t total = __shfl_sync(~0u, mine.end, 31);
  range.range_chunks = max(divide_small(total + size - 1, ptx::reciprocal_approx(static_cast<float>(size))), 1);
  range.reciprocal = ptx::reciprocal_approx(static_cast<float>(range.range_chunks));
  const bool is_alone = lane == 0 && mine.end == total && mine.num_tiles == 1 && mine.first_chunk == 0;
  const bool has_page = !has_contiguous_keys(params) && params.page_size % kKeys == 0;
  range.is_dealt = __any_sync(~0u, is_alone && has_page);
  range.begin = range.is_dealt ? 0 : min(rank * range.range_chunks, total);
  range.end = range.is_dealt ? (rank < total ? total : 0) : min(range.begin + range.range_chunks, total);
  range.live.begin = __shfl_sync(~0u, mine.tile.first_token, 0);
  const int32_t last_end = __shfl_sync(~0u, metadata.starts[1], max(num_seqs - 1, 0));
  range.live.end = num_seqs > 0 ? last_end : range.live.begin;
  return range;
}

/// `PackedRows`, without a division for the first tile of a sequence.
__device__ __forceinline__ PackedRows packed_rows(const AttentionParams& params, int32_t first_row) {
  PackedRows rows(params, 0);
  if (__builtin_expect(first_row != 0, false)) rows = PackedRows(params, first_row);
  return rows;
}

/// The row map of a tile.
__device__ __forceinline__ RowMap row_map(const AttentionParams& params, QoTile tile, int32_t kv_head) {
  const int32_t first_row = tile.first_row;
  tile.first_row = 0;
  RowMap map(params, tile, kv_head);
  map.rows = packed_rows(params, first_row);
  return map;
}

/// Where in the order of chunks a tile lies.
struct TileChunks {
  int32_t begin;
  int32_t end;

  /// The part of the tile from chunk `split_begin` up to `split_end` that CTA `rank` of `size` has.
  __device__ __forceinline__ ClusterPart part(const ClusterRange& range, int32_t split_begin, int32_t split_end,
                                              int32_t rank, int32_t size) const {
    if (range.is_dealt) return ClusterPart{rank, min(size, split_end), split_end};
    const int32_t first_rank = divide_small(begin, range.reciprocal);
    const int32_t last_rank = divide_small(end - 1, range.reciprocal);
    return ClusterPart{divide_small(split_begin, range.reciprocal) - first_rank, last_rank - first_rank + 1, split_end};
  }
};

/// Sets the warp's `work` to the part of a tile that begins at chunk `begin` of the range. Every lane has its sequence.
template <int kRows, int kKvChunkKeys>
__device__ __forceinline__ TileChunks enter_part(const AttentionParams& params, WorkTile& work,
                                                 const LaneSequence<kRows, kKvChunkKeys>& mine, int32_t begin,
                                                 int32_t range_end) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t owner = __popc(__ballot_sync(~0u, mine.end <= begin));
  const int32_t sequence_begin = mine.end - mine.work();
  int32_t tile = 0;
  if (__builtin_expect(lane == owner && mine.num_tiles > 1, false)) tile = (begin - sequence_begin) / mine.chunks;
  const int32_t own_tile_begin = sequence_begin + tile * mine.chunks;
  const TileChunks chunks = {__shfl_sync(~0u, own_tile_begin, owner),
                             __shfl_sync(~0u, own_tile_begin + mine.chunks, owner)};
  if (lane == owner) {
    work.tile = mine.tile_at(tile, params.group);
    KeyRange keys = mine.keys_of(params, work.tile);
    const int32_t first_chunk = mine.first_chunk - chunks.begin;
    if (begin > chunks.begin) keys.begin = max(keys.begin, (first_chunk + begin) * kKvChunkKeys);
    if (range_end < chunks.end) keys.end = min(keys.end, (first_chunk + range_end) * kKvChunkKeys);
    work.keys = keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
  }
  __syncwarp();
  return chunks;
}

/// The warp's blocks of the part that `work` was set to.
template <int kKeys, int kKvChunkKeys>
__device__ __forceinline__ WarpBlocks warp_blocks(const ClusterRange& range, const KeyRange& keys, int32_t rank,
                                                  int32_t size) {
  const int32_t warp = threadIdx.x / 32;
  if (range.is_dealt) {
    return WarpBlocks{rank * kKvChunkKeys + warp * kKeys, size * kKvChunkKeys, true, range.page};
  }
  const int32_t first = keys.begin / kKvChunkKeys * kKvChunkKeys + warp * kKeys;
  return WarpBlocks{first + (first + kKeys <= keys.begin ? kKvChunkKeys : 0), kKvChunkKeys, false, 0};
}

}  // namespace xa
