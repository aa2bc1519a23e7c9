// A CTA's share of a decode launch, from its first piece to its last (work_partition.cuh).
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_result.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace xa {

/// The planned piece, from its query rows to where its result goes.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, typename MakeLoop>
__device__ __forceinline__ void attend_work_tile(const AttentionParams& params, const WorkTile& work, uint8_t* shared,
                                                 const MakeLoop& make_loop) {
  const uint32_t query_rows = ptx::shared_address(shared);
  float* const row_factors = Shape::kIsFp8 ? reinterpret_cast<float*>(shared + Shape::kFactorsOffset) : nullptr;
  SoftmaxState<Shape::kRowTiles, Shape::kHeadDim / 8> state;
  const LogitsTransform transform(params, row_factors);
  auto loop = make_loop(work);
  fetch_query<Shape, T, Stored>(params, work, shared, row_factors);
  loop.attend(state, query_rows, transform);
  __syncthreads();
  const RowWriter<T, Shape::kIsFp8> writer(params, work.tile, work.kv_head);
  store_result<Shape>(params, work, writer, state, shared, transform.log2_unit());
}

/// Finds the share and computes it. Every thread of the CTA calls this, which is one of KV head blockIdx.x % Hkv;
/// `shared` is Shape::kSharedBytes long, where WorkTile and WorkRange stay; `make_loop` makes the loop over a piece's
/// keys.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, bool kFixedSplits, typename MakeLoop>
__device__ __forceinline__ void decode_work_range(const AttentionParams& params, const WorkRangeIndex& index,
                                                  uint8_t* shared, const MakeLoop& make_loop) {
  constexpr int kKvChunkKeys = Shape::kKeyWarps * Shape::kKeys;
  auto& work = *reinterpret_cast<WorkTile*>(shared + Shape::kWorkTileOffset);
  auto& range = *reinterpret_cast<WorkRange*>(shared + Shape::kWorkRangeOffset);
  init_work_tile<LogitsTransform>(params, work);
  partition_work<Shape::kThreads, Shape::kRows, kKvChunkKeys, kFixedSplits>(params, work, range, index);
  while (work.tile.num_rows != 0) {
    attend_work_tile<Shape, T, Stored, LogitsTransform>(params, work, shared, make_loop);
    next_work_tile<Shape::kRows, kKvChunkKeys>(params, work, range, index.index);
  }
  store_split_record<Shape::kRows>(params, work, range, index.index);
}

}  // namespace xa
