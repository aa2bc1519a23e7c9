// Decode by a CTA: computes the work range of the CTA, work tile by work tile (work_partition.cuh, work_range.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "fixed_splits.cuh"
#include "params/attention.cuh"
#include "query_rows.cuh"
#include "sequence_work.cuh"
#include "tile_result.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// The `WarpTiles` of kernels whose CTAs compute all tiles.
struct NoWarpTiles {};

/// Computes the keys of `work`, from loading its query rows to storing the result. With `kFixedSplits` these are all
/// fixed-size splits of the work tile, or the one at `range.fixed_split_begin`.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, bool kFixedSplits, typename MakeLoop>
__device__ __forceinline__ void attend_keys(const AttentionParams& params, const WorkTile& work, const WorkRange& range,
                                            uint8_t* shared, const MakeLoop& make_loop) {
  const uint32_t query_rows = ptx::shared_address(shared);
  float* const row_factors = Shape::kIsFp8 ? reinterpret_cast<float*>(shared + Shape::kFactorsOffset) : nullptr;
  using Writer = RowWriter<T, Shape::kIsFp8>;
  const LogitsTransform transform(params, row_factors);
  auto loop = make_loop(work);
  using State = typename decltype(loop)::State;
  fetch_query<Shape, T, Stored>(params, work, shared, row_factors);
  const auto store_split = [&](const State& state, uint32_t area, int32_t begin) {
    const int32_t offset = area != 0 ? static_cast<int32_t>(area - query_rows) : FixedSplits<Shape>::kNoArea;
    const Writer writer(params, work.tile, work.kv_head);
    store_fixed_split<Shape>(params, work, range, writer, state, offset, begin, shared, transform.log2_unit());
  };
  const auto query = loop.begin(query_rows);
  if constexpr (kFixedSplits && Shape::kLoadsAcrossSplits) {
    if (range.fixed_split_chunks > 0) {
      loop.attend_fixed_splits(range, query, transform, store_split);
      return;
    }
  }
  State state;
  loop.attend(state, query, transform);
  if constexpr (kFixedSplits && !Shape::kLoadsAcrossSplits) {
    if (range.fixed_split_chunks > 0) {
      store_split(state, query_rows + Shape::kRingsOffset + threadIdx.x / 32 * Shape::kRingBytes,
                  range.fixed_split_begin);
      return;
    }
  }
  __syncthreads();
  const Writer writer(params, work.tile, work.kv_head);
  store_result<Shape>(params, work, writer, state, shared, transform.log2_unit());
}

/// Determines the CTA's work range of a KV head and computes it. Every thread of the CTA calls this.
/// `shared` is Shape::kSharedBytes long; its WorkTile and WorkRange stay valid. `make_loop(work)` returns the loop over
/// the keys of a work tile (decode_loop.cuh), `finish_tile(work, range)` is called when its result is stored. With
/// `WarpTiles` (warp_tiles.cuh) warps compute short tiles alone, which are not finished.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, bool kFixedSplits,
          typename WarpTiles = NoWarpTiles, typename MakeLoop, typename FinishTile>
__device__ __forceinline__ void decode_work_tiles(const AttentionParams& params, int32_t kv_head,
                                                  const WorkRangeIndex& index, uint8_t* shared,
                                                  const MakeLoop& make_loop, const FinishTile& finish_tile) {
  using Unit = WorkUnit<Shape::kRows, Shape::kKeyWarps * Shape::kKeys>;
  constexpr bool kHasWarpTiles = !std::is_same_v<WarpTiles, NoWarpTiles>;
  auto& work = *reinterpret_cast<WorkTile*>(shared + Shape::kWorkTileOffset);
  auto& range = *reinterpret_cast<WorkRange*>(shared + Shape::kWorkRangeOffset);
  init_work_tile<LogitsTransform>(params, work, kv_head);
  for_work_tiles<Shape::kThreads, Unit, kFixedSplits, kHasWarpTiles>(params, work, range, index, [&] {
    if constexpr (kFixedSplits && !Shape::kLoadsAcrossSplits) {
      do {
        if (range.fixed_split_chunks > 0) cut_to_fixed_split<Unit::kKvChunkKeys>(params, work, range);
        attend_keys<Shape, T, Stored, LogitsTransform, kFixedSplits>(params, work, range, shared, make_loop);
      } while (next_fixed_split(range));
    } else {
      attend_keys<Shape, T, Stored, LogitsTransform, kFixedSplits>(params, work, range, shared, make_loop);
    }
    finish_tile(work, range);
  });
  if constexpr (kHasWarpTiles) {
    if (range.has_warp_tiles != 0) WarpTiles(params, kv_head, shared).attend(index);
  }
}

/// `decode_work_tiles` for a launch after which a combine kernel merges the partials.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, bool kFixedSplits,
          typename WarpTiles = NoWarpTiles, typename MakeLoop>
__device__ __forceinline__ void decode_work_range(const AttentionParams& params, int32_t kv_head,
                                                  const WorkRangeIndex& index, uint8_t* shared,
                                                  const MakeLoop& make_loop) {
  decode_work_tiles<Shape, T, Stored, LogitsTransform, kFixedSplits, WarpTiles>(
      params, kv_head, index, shared, make_loop, [](const WorkTile&, const WorkRange&) {});
  const auto& work = *reinterpret_cast<const WorkTile*>(shared + Shape::kWorkTileOffset);
  const auto& range = *reinterpret_cast<const WorkRange*>(shared + Shape::kWorkRangeOffset);
  store_split_record<Shape::kRows>(params, work, range, index.index);
}

}  // namespace xa
