// The work partition of cluster_decode.cu: which CTA of a cluster computes which keys.
//
// A cluster has the tiles of one KV head. They stand in a fixed order, and so do their KV chunks (kKvChunkKeys keys
// from an absolute multiple on). CTA r computes the chunks from r * range_chunks to (r + 1) * range_chunks:
//
//     tiles of a KV head  |      sequence 0      |  sequence 1  | seq. 2 |          sequence 3            |
//     chunks              |. . . . . . . . . . . |. . . . . . . |. . . . |. . . . . . . . . . . . . . . . |
//     CTAs                |--- 0 -----|---- 1 ----|----- 2 ----|---- 3 ----|---- 4 ----|---- 5 ----|- 6 --|
//
// A single tile of the first sequence is dealt out instead: CTA r of n has the chunks r, r + n, ..., whose pages can be
// loaded together with the metadata.
//
// A KV head may have a cluster per sequence slot (cluster_call.cuh): cluster z then has the tiles of sequence z alone.
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
};

/// What a warp knows of the work of its CTA, in registers; the same in all lanes except for `page`.
struct ClusterRange {
  int32_t begin;  // the CTA's chunks
  int32_t end;
  int32_t range_chunks;  // of each CTA
  float reciprocal;      // of range_chunks
  LiveRows live;
  bool starts_ascend;
  /// Whether the cluster has a single tile, of its first sequence and from key 0 on. CTA r then has the chunks
  /// r, r + n, ... instead of adjacent ones, and lane i has the page of the i-th of its warp's loads in `page`: these
  /// are loaded together with the metadata, as if this were so.
  bool is_dealt;
  int32_t page;
};

/// The first sequence of the cluster: its only one if a KV head has a cluster per sequence.
template <typename Shape>
__device__ __forceinline__ int32_t first_sequence() {
  return Shape::kHasClusterPerSequence ? blockIdx.z : 0;
}

/// The page of the lane's load, should the chunks be dealt out. Loads no entry outside of the first sequence's row of
/// the table.
template <typename Shape>
__device__ __forceinline__ int32_t guess_page(const AttentionParams& params, int32_t rank, int32_t size) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kLoads = Shape::kKeys / kTokensPerLoad;
  const int32_t token =
      (rank + lane / kLoads * size) * Shape::kKvChunkKeys + warp * Shape::kKeys + lane % kLoads * kTokensPerLoad;
  const bool is_in_table = !has_contiguous_keys(params) && token < params.capacity;
  const int32_t* const table = params.block_table + first_sequence<Shape>() * params.block_table_stride;
  return is_in_table ? __ldg(table + PageDivider<Shape::kIsPlain>(params.page_size).page(token)) : 0;
}

/// Plans the work of CTA `rank` of a cluster of `size`. Every warp calls this. The cluster has fewer than 2^20 chunks.
/// `meanwhile` is called while the metadata is on its way.
template <typename Shape, typename Meanwhile>
__device__ __forceinline__ ClusterRange partition_cluster(const AttentionParams& params, int32_t rank, int32_t size,
                                                          LaneSequence<Shape::kRows, Shape::kKvChunkKeys>& mine,
                                                          const Meanwhile& meanwhile) {
  ClusterRange range;
  range.page = guess_page<Shape>(params, rank, size);
  const int32_t lane = threadIdx.x % 32;
  const int32_t given = given_sequences(params);
  Metadata<1> metadata;
  metadata.load(params, lane);
  meanwhile();
  const int32_t num_seqs = metadata.live_sequences(params, given);
  const int32_t first = first_sequence<Shape>();
  constexpr bool has_one = Shape::kHasClusterPerSequence;
  const auto measure = [&] {
    mine.measure(params, metadata.sequence(params, 0, lane), lane < num_seqs && (!has_one || lane == first));
  };
  if constexpr (Shape::kIsPlain) {
    // A single tile, of the first sequence, needs no sums. If no other sequence has rows, all starts after its end are
    // that end or lower, and their running maximum changes nothing. If others have clusters of their own, starts must
    // ascend.
    measure();
    const bool descends = has_one && lane < num_seqs && !metadata.ascends(params, 0);
    const bool is_another = (lane != first ? mine.num_tiles > 0 : mine.num_tiles != 1) || descends;
    if (__builtin_expect(!__any_sync(~0u, is_another), true)) {
      const int32_t chunks = __shfl_sync(~0u, mine.chunks, first);
      range.is_dealt = range.starts_ascend = true;
      range.begin = 0;
      range.end = rank < chunks ? chunks : 0;
      range.live.begin = __shfl_sync(~0u, mine.tile.first_token, 0);
      range.live.end = __shfl_sync(~0u, mine.tile.first_token + mine.tile.len_q, has_one ? num_seqs - 1 : 0);
      return range;
    }
    range.starts_ascend = __all_sync(~0u, lane >= num_seqs || metadata.ascends(params, 0));
    if (__builtin_expect(!range.starts_ascend, false)) {
      StartMaxima maxima = {0, 0};
      metadata.ascend(params, maxima);
      measure();
    }
  }
  if constexpr (!Shape::kIsPlain) {
    range.starts_ascend = __all_sync(~0u, lane >= num_seqs || metadata.ascends(params, 0));
    if (__builtin_expect(!range.starts_ascend, false)) {
      StartMaxima maxima = {0, 0};
      metadata.ascend(params, maxima);
    }
    measure();
  }
  mine.end = sum_up_to_this_lane(mine.work());
  const int32_t total = __shfl_sync(~0u, mine.end, 31);
  range.range_chunks = max(divide_small(total + size - 1, ptx::reciprocal_approx(static_cast<float>(size))), 1);
  range.reciprocal = ptx::reciprocal_approx(static_cast<float>(range.range_chunks));
  const bool is_alone = lane == first && mine.end == total && mine.num_tiles == 1 && mine.first_chunk == 0;
  const bool has_page = !Shape::kIsPlain && !has_contiguous_keys(params) && params.page_size % kTokensPerLoad == 0;
  range.is_dealt = __any_sync(~0u, is_alone && has_page);
  range.begin = range.is_dealt ? 0 : min(rank * range.range_chunks, total);
  range.end = range.is_dealt ? (rank < total ? total : 0) : min(range.begin + range.range_chunks, total);
  range.live.begin = __shfl_sync(~0u, mine.tile.first_token, 0);
  const int32_t last_end = __shfl_sync(~0u, metadata.starts[1], max(num_seqs - 1, 0));
  range.live.end = num_seqs > 0 ? last_end : range.live.begin;
  return range;
}

/// A tile whose rows are counted in the sequence: its rows begin at row `first_row` of this one. Sequences have fewer
/// than 2^20 rows, so maps of it need no division.
__device__ __forceinline__ QoTile in_sequence(QoTile tile) {
  tile.num_rows += tile.first_row;
  tile.first_row = 0;
  return tile;
}

/// Where in the order of chunks a tile lies.
struct TileSpan {
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

/// `visible_keys` of a tile, without a division.
__device__ __forceinline__ KeyRange keys_of(const AttentionParams& params, const QoTile& tile) {
  const Visibility visibility(params, tile);
  const PackedRows rows(params, 0);
  const int32_t first = rows.query(tile.first_row), last = rows.query(tile.first_row + tile.num_rows - 1);
  return KeyRange{visibility.begin(first), visibility.end(last), visibility.begin(last), visibility.end(first)};
}

/// A part of a tile that a warp enters.
struct EnteredPart {
  // The same in all lanes.
  TileSpan chunks;
  int32_t sequence;  // and the lane that has it
  int32_t key_begin;
  int32_t key_end;
  // Right in this lane alone, so that nothing waits for shared memory.
  QoTile tile;
  KeyRange keys;

  /// Sets the warp's `work`. A barrier of the warp must follow.
  __device__ __forceinline__ void store(WorkTile& work) const {
    if (threadIdx.x % 32 != sequence) return;
    work.tile = tile;
    work.keys = keys;
  }
};

/// Likewise in a plain call.
struct PlainPart {
  // The same in all lanes.
  TileSpan chunks;
  int32_t sequence;  // and the lane that has it
  int32_t key_begin;
  int32_t key_end;
  int32_t tile;  // of the sequence; right in that lane alone

  /// Sets the warp's `work`. A barrier of the warp must follow.
  template <int kRows, int kKvChunkKeys>
  __device__ __forceinline__ void store(const AttentionParams& params, const LaneSequence<kRows, kKvChunkKeys>& mine,
                                        WorkTile& work) const {
    if (threadIdx.x % 32 != sequence) return;
    // Opaque: the compiler would otherwise compute this before the first copies.
    work.tile = mine.tile_at(ptx::opaque(tile), params.group);
    // A query attends to one key more than the one before.
    const int32_t common_end = max(ptx::opaque(mine.key_end) - max(mine.tile.len_q - 1, 0), 0);
    work.keys = KeyRange{key_begin, key_end, key_begin, min(common_end, key_end)};
  }
};

/// The part of a tile that begins at chunk `begin` of the range. Every lane has its sequence.
template <int kRows, int kKvChunkKeys>
__device__ __forceinline__ EnteredPart enter_part(const AttentionParams& params,
                                                  const LaneSequence<kRows, kKvChunkKeys>& mine, int32_t begin,
                                                  int32_t range_end) {
  EnteredPart part;
  part.sequence = __popc(__ballot_sync(~0u, mine.end <= begin));
  const bool is_owner = threadIdx.x % 32 == part.sequence;
  const int32_t sequence_begin = mine.end - mine.work();
  int32_t tile = 0;
  if (mine.num_tiles > 1) {
    const float reciprocal = ptx::reciprocal_approx(static_cast<float>(mine.chunks));
    tile = divide_small(max(begin - sequence_begin, 0), reciprocal);
  }
  const int32_t tile_begin = sequence_begin + tile * mine.chunks, tile_end = tile_begin + mine.chunks;
  part.tile = mine.tile_at(tile, params.group);
  KeyRange keys = {mine.key_begin, mine.key_end, mine.key_begin, mine.key_end};
  if (__builtin_expect(is_owner && mine.tile.len_q > 1, false)) keys = keys_of(params, part.tile);
  const int32_t first_chunk = mine.first_chunk - tile_begin;
  if (begin > tile_begin) keys.begin = max(keys.begin, (first_chunk + begin) * kKvChunkKeys);
  if (range_end < tile_end) keys.end = min(keys.end, (first_chunk + range_end) * kKvChunkKeys);
  part.keys = keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
  part.chunks = TileSpan{__shfl_sync(~0u, tile_begin, part.sequence), __shfl_sync(~0u, tile_end, part.sequence)};
  part.key_begin = __shfl_sync(~0u, part.keys.begin, part.sequence);
  part.key_end = __shfl_sync(~0u, part.keys.end, part.sequence);
  return part;
}

/// The same in a plain call; chunks that are dealt out are of `first_sequence`. Only what the first copies need is
/// computed here. All tiles of a sequence have the keys of its last query; masks take care of the others.
template <int kRows, int kKvChunkKeys>
__device__ __forceinline__ PlainPart enter_plain_part(const LaneSequence<kRows, kKvChunkKeys>& mine, bool is_dealt,
                                                      int32_t first_sequence, int32_t begin, int32_t range_end) {
  PlainPart part = {};
  part.sequence = first_sequence;
  int32_t tile_begin = 0;
  if (!is_dealt) {
    part.sequence = __popc(__ballot_sync(~0u, mine.end <= begin));
    tile_begin = mine.end - mine.work();
    if (mine.num_tiles > 1) {
      const float reciprocal = ptx::reciprocal_approx(static_cast<float>(mine.chunks));
      part.tile = divide_small(max(begin - tile_begin, 0), reciprocal);
      tile_begin += part.tile * mine.chunks;
    }
    tile_begin = __shfl_sync(~0u, tile_begin, part.sequence);
  }
  part.chunks = TileSpan{tile_begin, tile_begin + __shfl_sync(~0u, mine.chunks, part.sequence)};
  part.key_begin = (begin - tile_begin) * kKvChunkKeys;
  part.key_end = min(__shfl_sync(~0u, mine.key_end, part.sequence), (range_end - tile_begin) * kKvChunkKeys);
  return part;
}

/// The warp's blocks of the part that `work` was set to.
template <int kKeys, int kKvChunkKeys>
__device__ __forceinline__ WarpBlocks warp_blocks(const ClusterRange& range, int32_t key_begin, int32_t rank,
                                                  int32_t size) {
  const int32_t warp = threadIdx.x / 32;
  if (range.is_dealt) {
    return WarpBlocks{rank * kKvChunkKeys + warp * kKeys, size * kKvChunkKeys, true, range.page};
  }
  const int32_t first = key_begin / kKvChunkKeys * kKvChunkKeys + warp * kKeys;
  return WarpBlocks{first + (first + kKeys <= key_begin ? kKvChunkKeys : 0), kKvChunkKeys, false, 0};
}

}  // namespace xa
