// A CTA's share of a decode launch, from its first piece to its last (work_list.cuh).
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "query_rows.cuh"
#include "share.cuh"
#include "softmax.cuh"
#include "tile_plan.cuh"
#include "tile_result.cuh"
#include "work_list.cuh"

namespace xa {

/// The planned piece, from its query rows to where its result goes.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, typename MakeLoop>
__device__ __forceinline__ void attend_piece(const AttentionParams& params, const Plan& plan, uint8_t* shared,
                                             const MakeLoop& make_loop) {
  const uint32_t query_rows = ptx::shared_address(shared);
  float* const row_factors = Shape::kIsFp8 ? reinterpret_cast<float*>(shared + Shape::kFactorsOffset) : nullptr;
  SoftmaxState<Shape::kRowTiles, Shape::kHeadDim / 8> state;
  const LogitsTransform transform(params, row_factors);
  auto loop = make_loop(plan);
  fetch_query<Shape, T, Stored>(params, plan, shared, row_factors);
  loop.attend(state, query_rows, transform);
  __syncthreads();
  const RowWriter<T, Shape::kIsFp8> writer(params, plan.tile, plan.kv_head);
  deliver<Shape>(params, plan, writer, state, shared, transform.log2_unit());
}

/// Finds the share and computes it. Every thread of the CTA calls this, which is one of KV head blockIdx.x % Hkv;
/// `shared` is Shape::kSharedBytes long, where Plan and Share stay; `make_loop` makes the loop over a piece's keys.
template <typename Shape, typename T, typename Stored, typename LogitsTransform, bool kSpans, typename MakeLoop>
__device__ __forceinline__ void decode_share(const AttentionParams& params, const ShareNumber& mine, uint8_t* shared,
                                             const MakeLoop& make_loop) {
  constexpr int kUnitKeys = Shape::kKeyWarps * Shape::kKeys;
  auto& plan = *reinterpret_cast<Plan*>(shared + Shape::kPlanOffset);
  auto& share = *reinterpret_cast<Share*>(shared + Shape::kShareOffset);
  start_plan<LogitsTransform>(params, plan);
  share_out_work<Shape::kThreads, Shape::kRows, kUnitKeys, kSpans>(params, plan, share, mine);
  while (plan.tile.num_rows != 0) {
    attend_piece<Shape, T, Stored, LogitsTransform>(params, plan, shared, make_loop);
    next_piece<Shape::kRows, kUnitKeys>(params, plan, share, mine.number);
  }
  leave_cut<Shape::kRows>(params, plan, share, mine.number);
}

}  // namespace xa
