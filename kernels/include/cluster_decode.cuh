// Decode by a CTA of a cluster: computes its range of the keys of a KV head (cluster_partition.cuh), tile by tile, and
// merges split tiles with the other CTAs of the cluster (cluster_merge.cuh).
#pragma once

#include <cstdint>

#include "cluster_merge.cuh"
#include "cluster_partition.cuh"
#include "decode_loop.cuh"
#include "hopper/cluster_ptx.cuh"
#include "new_tokens.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_result.cuh"
#include "work_tile.cuh"

namespace xa {

template <typename Shape, typename T, typename LogitsTransform>
class ClusterDecode {
  static constexpr int kRows = Shape::kRows, kRowItems = Shape::kRowItems;
  using Sequence = LaneSequence<kRows, Shape::kKvChunkKeys>;

 public:
  /// `shared` holds Shape::kSharedBytes bytes. CTA blockIdx.y of the cluster of KV head blockIdx.x.
  __device__ __forceinline__ ClusterDecode(const AttentionParams& params, uint8_t* shared)
      : params_(params),
        shared_(shared),
        cta_(*reinterpret_cast<typename Shape::Work*>(shared + Shape::kWorkOffset)),
        work_(cta_.work_tiles[threadIdx.x / 32]) {}

  /// Every thread of the cluster calls this.
  __device__ __forceinline__ void run() {
    const int32_t rank = blockIdx.y, size = gridDim.y;
    // Shared memory of the other CTAs may be written once they have started.
    ptx::cluster_arrive_relaxed();
    Sequence mine;
    const ClusterRange range = partition_cluster(params_, rank, size, mine);
    init(mine);
    if (has_new_tokens(params_)) store_new_tokens<Shape, T>(params_, blockIdx.x, WorkRangeIndex{rank, size});
    bool has_split_tile = false;
#pragma unroll 1
    for (int32_t chunk = range.begin; chunk < range.end;) {
      const ClusterPart part = enter_part(params_, work_, mine, chunk, range.range_chunks, range.end);
      compute(part, rank, has_split_tile);
      has_split_tile |= part.count > 1;
      chunk = part.end;
      __syncthreads();
      mine = cta_.sequences[threadIdx.x % 32];
    }
    if (has_split_tile) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
      merge_slice(0);
      merge_slice(1);
    }
    if (params_.clears_padding_rows == 0) return;
    clear_padding_rows<T, Shape::kThreads>(params_, range.starts_ascend, range.live, rank * gridDim.x + blockIdx.x,
                                           gridDim.x * size);
  }

 private:
  /// What later tiles need; the barriers of the first one follow.
  __device__ __forceinline__ void init(const Sequence& mine) const {
    if (threadIdx.x < 32) cta_.sequences[threadIdx.x] = mine;
    if (threadIdx.x < 2) cta_.split_tiles[threadIdx.x].num_parts = 0;
    if (threadIdx.x % 32 != 0) return;
    work_.kv_head = blockIdx.x;
    work_.score_factor = LogitsTransform::factor(params_, blockIdx.x);
  }

  /// What the CTA receives of the split tile that begins before its range (0), or goes on after it (1).
  __device__ __forceinline__ typename Shape::Buffer buffer(int index) const {
    return typename Shape::Buffer(shared_ + Shape::kBuffersOffset + index * Shape::Buffer::kBytes);
  }

  /// Computes a part of a tile. A whole tile goes to out and lse, other parts to the CTAs that merge them.
  __device__ __forceinline__ void compute(const ClusterPart& part, int32_t rank, bool has_split_tile) const {
    const uint32_t query_rows = ptx::shared_address(shared_);
    SoftmaxState<Shape::kRowTiles, Shape::kHeadDim / 8> state;
    const LogitsTransform transform(params_);
    DecodeLoop<Shape, T, T> loop(params_, work_, query_rows + Shape::kRingsOffset);
    fetch_query<Shape, T, T>(params_, work_, shared_, nullptr);
    loop.attend(state, query_rows, transform);
    __syncthreads();
    const WarpStates<Shape> warps(shared_);
    warps.store(state);
    __syncthreads();
    if (part.count > 1 && !has_split_tile) ptx::cluster_wait();
    const float log2_unit = transform.log2_unit();
    const RowWriter<T, false> writer(params_, work_.tile, work_.kv_head);
    const int32_t items = work_.tile.num_rows * kRowItems;
    const MergeSlices slices(items, part.count);
    for (int32_t item = threadIdx.x; item < items; item += Shape::kThreads) {
      const int32_t row = item / kRowItems, column = item % kRowItems * 4;
      if (column >= params_.value_dim) continue;
      const PartialState partial = warps.merged(row, column, log2_unit);
      if (part.count == 1) {
        writer.write(row, column, partial, log2_unit);
      } else {
        const int32_t slice = slices.slice(item);
        // The CTA of part 0 goes on with other tiles before this one, all others begin with it.
        buffer(slice == 0 ? 1 : 0)
            .send(rank - part.index + slice, slices, part.index, item - slice * slices.size, partial);
      }
    }
    if (part.count > 1 && threadIdx.x == 0) {
      cta_.split_tiles[part.index == 0 ? 1 : 0] = SplitTile{work_.tile, part.index, part.count};
    }
  }

  /// Merges the CTA's slice of a split tile and writes it.
  __device__ __forceinline__ void merge_slice(int index) const {
    const SplitTile& split = cta_.split_tiles[index];
    if (split.num_parts == 0) return;
    const float log2_unit = LogitsTransform(params_).log2_unit();
    const RowWriter<T, false> writer(params_, split.tile, blockIdx.x);
    const int32_t items = split.tile.num_rows * kRowItems;
    const MergeSlices slices(items, split.num_parts);
    const int32_t first = split.part * slices.size, count = min(slices.size, items - first);
    for (int32_t i = threadIdx.x; i < count; i += Shape::kThreads) {
      const int32_t row = (first + i) / kRowItems, column = (first + i) % kRowItems * 4;
      if (column >= params_.value_dim) continue;
      writer.write(row, column, buffer(index).merged(slices, split.num_parts, i, log2_unit), log2_unit);
    }
  }

  const AttentionParams& params_;
  uint8_t* const shared_;
  typename Shape::Work& cta_;
  WorkTile& work_;
};

}  // namespace xa
