// Multi-head latent attention in its absorbed form: all query heads attend to one paged cache of latent rows, whose
// first columns are also the values. On mma.sync and cp.async: every GPU from sm_80 on.
//
// The packed rows of a tile are query heads of adjacent queries, so that a block of latent rows is read from global
// memory once per tile and from then on serves as K and as V. As in decode, a CTA computes a range of the keys of all
// tiles (include/work_partition.cuh). docs/dev/kernels/mla.md explains the design.
//
// Compiled once for each combination of
//   XA_OPERANDS  f16, bf16, f32: of q, cache and out; f16_fp8, bf16_fp8, fp8, fp8_shifted: over e4m3fn or e5m2
//                (include/mla/shape.cuh)
//   XA_SHAPE     large, small, rows_16
//   XA_LOGITS    none, scaled (include/mla/logits.cuh)
// Launch: Shape::kThreads threads, a grid of 1 by any number of work ranges, Shape::kSharedBytes of dynamic shared
// memory.

#include "element.cuh"
#include "mla/attend.cuh"
#include "mla/logits.cuh"
#include "mla/shape.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "sequence_work.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace {
using Types = xa::mla::XA_PASTE(types_, XA_OPERANDS);
using T = Types::Compute;
using Stored = Types::Stored;
using LogitsTransform = xa::mla::XA_PASTE(logits_, XA_LOGITS);
using Config = xa::tiles::Mla<xa::tiles::XA_PASTE(shape_, XA_SHAPE), xa::tiles::XA_PASTE(operands_, XA_OPERANDS)>;
using Shape = xa::mla::Shape<Config, T, Stored>;
using Unit = xa::WorkUnit<Shape::kRows, Shape::kKeys, xa::TileEnd::kRow, xa::TileOrder::kFolded>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& work = *reinterpret_cast<xa::WorkTile*>(shared + Shape::kWorkTileOffset);
  auto& range = *reinterpret_cast<xa::WorkRange*>(shared + Shape::kWorkRangeOffset);
  const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
  xa::init_work_tile<LogitsTransform>(params, work, blockIdx.x);
  xa::for_work_tiles<Shape::kThreads, Unit, false>(params, work, range, index, [&] {
    xa::mla::TileAttention<Shape, T, Stored, LogitsTransform> tile(params, work, shared);
    tile.attend();
    tile.store_result(range);
  });
  xa::store_split_record<Shape::kRows>(params, work, range, index.index);
  if (params.clears_padding_rows == 0) return;
  const bool ascends = xa::starts_ascend(work.maxima);
  xa::clear_padding_rows<T, Shape::kThreads>(params, ascends, range.live, blockIdx.y, gridDim.y);
}
