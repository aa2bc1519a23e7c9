// Decode by a CTA of a cluster: computes its range of the keys of a KV head (cluster_partition.cuh), tile by tile, and
// merges split tiles with the other CTAs of the cluster (cluster_merge.cuh).
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cluster_8bit_loop.cuh"
#include "cluster_loop.cuh"
#include "cluster_merge.cuh"
#include "cluster_partition.cuh"
#include "cluster_plain_loop.cuh"
#include "decode_block.cuh"
#include "fp8.cuh"
#include "hopper/cluster_ptx.cuh"
#include "hopper/ptx.cuh"
#include "new_tokens.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_result.cuh"
#include "work_tile.cuh"

namespace xa {

/// What a kernel over rows without scales of their own gives `ClusterDecode`.
template <typename Shape>
struct NoScaledRows {
  using State = SoftmaxState<1, Shape::kHeadDim / 8, Shape::kTileRows>;

  __device__ __forceinline__ NoTokenScales of(const WorkTile&, uint32_t) const { return {}; }
};

/// `T` is the operand type of the products, `Stored` the element type of K and V. `ScaledRows` has the type of a warp's
/// state over 8-bit K and V, and the scales of the rows of a warp's ring.
template <typename Shape, typename T, typename Stored, typename LogitsTransform,
          typename ScaledRows = NoScaledRows<Shape>>
class ClusterDecode {
  static constexpr int kRows = Shape::kRows, kRowItems = Shape::kRowItems;
  using Sequence = LaneSequence<kRows, Shape::kKvChunkKeys>;
  using Writer = RowWriter<T, Shape::kIsFp8>;
  using Scales = decltype(std::declval<ScaledRows>().of(std::declval<WorkTile&>(), 0));
  using Loop =
      std::conditional_t<Shape::kIsFp8, Cluster8BitLoop<Shape, T, Stored, Scales, typename ScaledRows::State>,
                         std::conditional_t<Shape::kIsPlain, ClusterPlainLoop<Shape, T>, ClusterLoop<Shape, T>>>;

 public:
  /// `params` has constants for what is known of the call; `all` is the kernel's parameter. `shared` holds
  /// Shape::kSharedBytes bytes. CTA blockIdx.y of cluster blockIdx.z of KV head blockIdx.x.
  __device__ __forceinline__ ClusterDecode(const AttentionParams& params, const AttentionParams& all, uint8_t* shared,
                                           const ScaledRows& scaled_rows = {})
      : params_(params),
        all_(all),
        scaled_rows_(scaled_rows),
        shared_(shared),
        cta_(*reinterpret_cast<typename Shape::Work*>(shared + Shape::kWorkOffset)),
        work_(cta_.work_tiles[threadIdx.x / 32]) {}

  /// Every thread of the cluster calls this.
  __device__ __forceinline__ void run() {
    const int32_t rank = blockIdx.y, size = gridDim.y;
    Sequence mine;
    PageCopier<Shape, T> copier;
    const ClusterRange range = partition_cluster<Shape>(params_, rank, size, mine, [&] {
      if (Shape::kIsPlain) copier.init(params_, query_rows() + Shape::kRingsOffset);
      if (threadIdx.x == 0) {
        for (int index = 0; index < 2; ++index) hopper::ptx::mbarrier_init(barrier(index), 1);
        hopper::ptx::fence_mbarrier_init();
      }
      // Shared memory of the other CTAs may be written once they have started and set up their mbarriers.
      ptx::cluster_arrive_relaxed();
    });
    bool is_first = true, has_split_tile = false;
    if (!Shape::kIsPlain) init(mine);
#pragma unroll 1
    for (int32_t chunk = range.begin; chunk < range.end;) {
      const auto entered = enter(range, mine, chunk);
      const TileSpan& chunks = entered.chunks;
      const WarpBlocks blocks = warp_blocks<Shape::kKeys, Shape::kKvChunkKeys>(range, entered.key_begin, rank, size);
      const int32_t end = min(range.end, chunks.end);
      typename Loop::State state;
      attend(state, entered, blocks, copier, [&] {
        if constexpr (Shape::kIsPlain) {
          if (is_first) init(mine);
          entered.store(params_, mine, work_);
          __syncwarp();
        }
        // No CTA waits for these stores, so they follow the first loads.
        if (__builtin_expect(is_first && stores_new_tokens(), false))
          store_new_tokens<Shape, Stored>(all_, blockIdx.x, cta_of_head(rank, size));
        is_first = false;
      });
      __syncthreads();
      store_live_rows<Shape>(shared_, state, work_.tile.num_rows);
      __syncthreads();
      const ClusterPart part = chunks.part(range, chunk, end, rank, size);
      store_part(part, rank, has_split_tile);
      has_split_tile |= part.count > 1;
      chunk = end;
      if (chunk >= range.end) break;
      __syncthreads();
      if (!Shape::kIsPlain) mine = cta_.sequences[threadIdx.x % 32];
    }
    if (has_split_tile) {
      // Of the split tiles, which thread 0 has stored.
      __syncthreads();
#pragma unroll 1
      for (int index = 0; index < 2; ++index) merge_slice(index);
    }
    const WorkRangeIndex cta = cta_of_head(rank, size);
    if (is_first && stores_new_tokens()) store_new_tokens<Shape, Stored>(all_, blockIdx.x, cta);
    const bool has_padding = params_.seqused_q != nullptr || range.live.end - range.live.begin < params_.num_tokens;
    if (params_.clears_padding_rows == 0 || !has_padding) return;
    clear_padding_rows<T, Shape::kThreads>(params_, range.starts_ascend, range.live, cta.index * gridDim.x + blockIdx.x,
                                           gridDim.x * cta.count);
  }

 private:
  /// The number of CTA `rank` of the cluster among all that have the KV head.
  static __device__ __forceinline__ WorkRangeIndex cta_of_head(int32_t rank, int32_t size) {
    return WorkRangeIndex{first_sequence<Shape>() * size + rank,
                          (Shape::kHasClusterPerSequence ? static_cast<int32_t>(gridDim.z) : 1) * size};
  }

  __device__ __forceinline__ bool stores_new_tokens() const { return Shape::kAppendsKv && has_new_tokens(all_); }

  /// Computes the warp's keys of a part. `first_copies_issued` is called when their first copies are under way.
  template <typename Part, typename FirstCopiesIssued>
  __device__ __forceinline__ void attend(typename Loop::State& state, const Part& part, const WarpBlocks& blocks,
                                         const PageCopier<Shape, T>& copier,
                                         const FirstCopiesIssued& first_copies_issued) const {
    float* const row_factors = Shape::kIsFp8 ? reinterpret_cast<float*>(shared_ + Shape::kFactorsOffset) : nullptr;
    const LogitsTransform transform(params_, row_factors);
    const uint32_t rings = query_rows() + Shape::kRingsOffset;
    if constexpr (Shape::kIsPlain) {
      Loop loop(params_, all_, copier, work_, blocks, part.sequence, part.key_end, rings);
      loop.attend(state, transform, first_copies_issued);
    } else {
      const auto map = [&] { return RowMap(params_, in_sequence(work_.tile), work_.kv_head); };
      if constexpr (Shape::kIsFp8) {
        Loop loop(params_, work_, blocks, rings, scaled_rows_.of(work_, rings + threadIdx.x / 32 * Shape::kRingBytes));
        // A row per warp.
        static_assert(Shape::kRows == Shape::kWarps);
        const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        ConvertedRow<Shape, Stored> query;
        query.load(params_, map(), work_.tile.first_row + warp, lane);
        loop.attend(state, query_rows(), transform, [&] {
          query.store(params_, warp, lane, shared_, row_factors);
          first_copies_issued();
        });
      } else {
        Loop loop(params_, work_, blocks, rings);
        QueryRows<Shape, T> query;
        query.load(params_, map(), work_.tile.first_row);
        loop.attend(state, query_rows(), transform, [&] {
          query.store(shared_);
          first_copies_issued();
        });
      }
    }
  }

  /// Enters the part of a tile that begins at chunk `chunk`. `mine` is the lane's sequence.
  __device__ __forceinline__ auto enter(const ClusterRange& range, const Sequence& mine, int32_t chunk) const {
    if constexpr (Shape::kIsPlain) {
      return enter_plain_part(mine, range.is_dealt, first_sequence<Shape>(), chunk, range.end);
    } else {
      const EnteredPart part = enter_part(params_, mine, chunk, range.end);
      part.store(work_);
      __syncwarp();
      return part;
    }
  }

  /// What later tiles need; the barriers of the first one follow.
  __device__ __forceinline__ void init(const Sequence& mine) const {
    // Plain calls have registers for it.
    if (!Shape::kIsPlain && threadIdx.x < 32) cta_.sequences[threadIdx.x] = mine;
    if (threadIdx.x < 2) cta_.split_tiles[threadIdx.x].num_parts = 0;
    if (threadIdx.x % 32 != 0) return;
    work_.kv_head = blockIdx.x;
    work_.score_factor = LogitsTransform::factor(params_, blockIdx.x);
  }

  /// The mbarrier that counts what arrives in a buffer.
  __device__ __forceinline__ uint32_t barrier(int index) const { return ptx::shared_address(cta_.received + index); }
  /// What the CTA receives of the split tile that begins before its range (0), or goes on after it (1).
  __device__ __forceinline__ typename Shape::Buffer buffer(int index) const {
    return typename Shape::Buffer(shared_ + Shape::kBuffersOffset + index * Shape::Buffer::kBytes);
  }

  __device__ __forceinline__ uint32_t query_rows() const { return ptx::shared_address(shared_); }

  /// Merges the warps' states of a part of a tile. A whole tile goes to out and lse, other parts to the CTAs that merge
  /// them.
  __device__ __forceinline__ void store_part(const ClusterPart& part, int32_t rank, bool has_split_tile) const {
    if (part.count > 1 && !has_split_tile) ptx::cluster_wait();
    const WarpStates<Shape> warps(shared_);
    const float log2_unit = LogitsTransform(params_).log2_unit();
    const int32_t items = work_.tile.num_rows * kRowItems;
    const MergeSlices slices(items, part.count);
    for (int32_t item = threadIdx.x; item < items; item += Shape::kThreads) {
      const int32_t row = item / kRowItems, column = item % kRowItems * 4;
      const PartialState partial = warps.merged(row, column, log2_unit);
      if (part.count == 1) {
        if (column >= params_.value_dim) continue;
        Writer(params_, in_sequence(work_.tile), work_.kv_head)
            .write(work_.tile.first_row + row, column, partial, log2_unit);
      } else {
        // The CTA of part 0 goes on with other tiles before this one, all others begin with it.
        const int32_t slice = slices.slice(item), index = slice == 0 ? 1 : 0;
        buffer(index).send(rank - part.index + slice, slices, part.index, item - slice * slices.size, partial,
                           barrier(index));
      }
    }
    if (part.count > 1 && threadIdx.x == 0) {
      const int index = part.index == 0 ? 1 : 0;
      cta_.split_tiles[index] = SplitTile{work_.tile, part.index, part.count};
      Shape::Buffer::expect(slices.count(items, part.index), part.count, barrier(index));
    }
  }

  /// Merges the CTA's slice of a split tile and writes it.
  __device__ __forceinline__ void merge_slice(int index) const {
    const SplitTile& split = cta_.split_tiles[index];
    if (split.num_parts == 0) return;
    const float log2_unit = LogitsTransform(params_).log2_unit();
    const Writer writer(params_, in_sequence(split.tile), blockIdx.x);
    const int32_t items = split.tile.num_rows * kRowItems;
    const MergeSlices slices(items, split.num_parts);
    const int32_t first = split.part * slices.size, count = slices.count(items, split.part);
    ptx::wait_for_cluster_stores(barrier(index));
    for (int32_t i = threadIdx.x; i < count; i += Shape::kThreads) {
      const int32_t row = (first + i) / kRowItems, column = (first + i) % kRowItems * 4;
      if (column >= params_.value_dim) continue;
      writer.write(split.tile.first_row + row, column, buffer(index).merged(slices, split.num_parts, i, log2_unit),
                   log2_unit);
    }
  }

  const AttentionParams& params_;
  const AttentionParams& all_;
  const ScaledRows scaled_rows_;
  uint8_t* const shared_;
  typename Shape::Work& cta_;
  WorkTile& work_;
};

}  // namespace xa
