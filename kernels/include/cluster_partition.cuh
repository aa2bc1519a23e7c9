// The work partition of cluster_decode.cu: which CTA of a cluster computes which keys.
//
// A cluster has the tiles of one KV head. They stand in a fixed order, and so do their KV chunks (kKvChunkKeys keys
// from an absolute multiple on). CTA r computes the chunks from r * range_chunks to (r + 1) * range_chunks:
//
//     tiles of a KV head  |      sequence 0      |  sequence 1  | seq. 2 |          sequence 3            |
//     chunks              |. . . . . . . . . . . |. . . . . . . |. . . . |. . . . . . . . . . . . . . . . |
//     CTAs                |--- 0 -----|---- 1 ----|----- 2 ----|---- 3 ----|---- 4 ----|---- 5 ----|- 6 --|
//
// There are no more sequence slots than lanes, so each warp plans by itself: it loads all metadata at once, and a
// prefix sum tells where sequences begin. No warp waits for another one before it loads keys.
#pragma once

#include <cstdint>

#include "output_rows.cuh"
#include "params/attention.cuh"
#include "params/cluster_decode.cuh"
#include "sequence_work.cuh"
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

/// The lane's sequence, and the number of chunks up to its end.
template <int kRows, int kKvChunkKeys>
struct LaneSequence {
  SequenceWork<kRows, kKvChunkKeys> work;
  int32_t end;
};

/// What a warp knows of the work of its CTA, in registers; the same in all lanes.
struct ClusterRange {
  int32_t begin;  // the CTA's chunks
  int32_t end;
  int32_t range_chunks;  // of each CTA
  LiveRows live;
  bool starts_ascend;
};

/// Plans the work of CTA `rank` of a cluster of `size`. Every warp calls this.
template <int kRows, int kKvChunkKeys>
__device__ __forceinline__ ClusterRange partition_cluster(const AttentionParams& params, int32_t rank, int32_t size,
                                                          LaneSequence<kRows, kKvChunkKeys>& mine) {
  const int32_t lane = threadIdx.x % 32, num_seqs = live_sequences(params);
  SequenceWork<kRows, kKvChunkKeys> sequence[1];
  const bool ascends = load_sequences(params, lane, num_seqs, sequence, [](auto&) {});
  ClusterRange range;
  range.starts_ascend = __all_sync(~0u, ascends);
  if (__builtin_expect(!range.starts_ascend, false)) {
    StartMaxima maxima = {0, 0};
    load_sequences(params, lane, num_seqs, sequence, [&](auto& metadata) { metadata.ascend(params, maxima); });
  }
  mine.work = sequence[0];
  mine.end = sum_up_to_this_lane(static_cast<int32_t>(mine.work.work()));
  const int32_t total = __shfl_sync(~0u, mine.end, 31);
  range.range_chunks = max((total + size - 1) / size, 1);
  range.begin = min(rank * range.range_chunks, total);
  range.end = min(range.begin + range.range_chunks, total);
  range.live.begin = __shfl_sync(~0u, mine.work.tile.first_token, 0);
  const int32_t last_end = __shfl_sync(~0u, mine.work.end.q, max(num_seqs - 1, 0));
  range.live.end = num_seqs > 0 ? last_end : range.live.begin;
  return range;
}

/// Sets the warp's `work` to the part that begins at chunk `begin` of the range, and returns the part. Every lane has
/// its sequence.
template <int kRows, int kKvChunkKeys>
__device__ __forceinline__ ClusterPart enter_part(const AttentionParams& params, WorkTile& work,
                                                  const LaneSequence<kRows, kKvChunkKeys>& mine, int32_t begin,
                                                  int32_t range_chunks, int32_t range_end) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t owner = __popc(__ballot_sync(~0u, mine.end <= begin));
  const int32_t sequence_begin = mine.end - static_cast<int32_t>(mine.work.work());
  const int32_t tile = lane == owner ? (begin - sequence_begin) / mine.work.chunks : 0;
  const int32_t own_tile_begin = sequence_begin + tile * mine.work.chunks;
  const int32_t tile_begin = __shfl_sync(~0u, own_tile_begin, owner);
  const int32_t tile_end = __shfl_sync(~0u, own_tile_begin + mine.work.chunks, owner);
  const int32_t end = min(range_end, tile_end);
  if (lane == owner) {
    work.tile = mine.work.tile_at(tile, params.group);
    KeyRange keys = visible_keys(params, work.tile);
    const int32_t first_chunk = mine.work.first_chunk - tile_begin;
    if (begin > tile_begin) keys.begin = max(keys.begin, (first_chunk + begin) * kKvChunkKeys);
    if (end < tile_end) keys.end = min(keys.end, (first_chunk + end) * kKvChunkKeys);
    work.keys = keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
  }
  const int32_t first_rank = tile_begin / range_chunks, last_rank = (tile_end - 1) / range_chunks;
  __syncwarp();
  return ClusterPart{begin / range_chunks - first_rank, last_rank - first_rank + 1, end};
}

}  // namespace xa
