// Multi-head latent attention on Hopper over caches of e4m3fn or e5m2, for q and out of f16 or bf16, by wgmma in f16.
// docs/dev/kernels/mla.md explains the design.
//
// Compiled once for each value of
//   XA_SHAPE     hopper_16, hopper_32, hopper_64: packed rows of a tile (include/hopper_mla_fp8/shape.cuh)
//   XA_OPERANDS  fp8
//   XA_LOGITS    scaled (include/mla/logits.cuh)
// Launch: Shape::kThreads threads, a grid of 1 by any number of work ranges, Shape::kSharedBytes of dynamic shared
// memory.

#include "element.cuh"
#include "hopper/ptx.cuh"
#include "hopper_mla_fp8/compute.cuh"
#include "hopper_mla_fp8/load.cuh"
#include "hopper_mla_fp8/shape.cuh"
#include "mla/logits.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "sequence_work.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace {
using LogitsTransform = xa::mla::XA_PASTE(logits_, XA_LOGITS);
using Config = xa::tiles::Mla<xa::tiles::XA_PASTE(shape_, XA_SHAPE), xa::tiles::XA_PASTE(operands_, XA_OPERANDS)>;
using Shape = xa::hopper_mla_fp8::Shape<Config>;
using Unit = xa::WorkUnit<Shape::kRows, Shape::kKeys, xa::TileEnd::kRow, xa::TileOrder::kFolded>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  extern __shared__ uint8_t shared[];
  const xa::hopper_mla_fp8::Buffers<Shape> buffers(shared);
  xa::WorkTile& work = buffers.work_tile();
  xa::WorkRange& range = buffers.work_range();
  if (threadIdx.x / 32 == 2) buffers.init(threadIdx.x % 32);
  const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
  xa::init_work_tile<LogitsTransform>(params, work, blockIdx.x);
  xa::partition_work<Shape::kThreads, Unit, false>(params, work, range, index);
  const int32_t warpgroup = xa::hopper::uniform(threadIdx.x / 128);
  int32_t number = 0;
  if (warpgroup == 2) {
    xa::hopper::ptx::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
#pragma unroll 1
    while (work.tile.num_rows != 0) {
      if (range.has_split()) xa::hopper_mla_fp8::BlockLoader<Shape>(params, buffers).load(number);
      xa::hopper_mla_fp8::sync_cta<Shape>();
      if (threadIdx.x / 32 == Shape::kThreads / 32 - 1) {
        const xa::WorkRangeIterator<Unit> iterator(params, work, range, xa::ptx::opaque(index.index));
        iterator.next(threadIdx.x % 32);
      }
      xa::hopper_mla_fp8::sync_cta<Shape>();
    }
  } else {
    xa::hopper::ptx::warpgroup_reg_alloc<Shape::kRegisters>();
    // While the first block is loaded.
    xa::store_split_record<Shape::kRows, Shape::kComputeThreads - 32>(params, work, range, index.index);
#pragma unroll 1
    while (work.tile.num_rows != 0) {
      if (range.has_split())
        xa::hopper_mla_fp8::compute_tile<Shape, LogitsTransform>(params, buffers, number, warpgroup);
      xa::hopper_mla_fp8::sync_cta<Shape>();
      xa::hopper_mla_fp8::sync_cta<Shape>();
    }
    if (params.clears_padding_rows == 0) return;
    const bool ascends = xa::starts_ascend(work.maxima);
    xa::clear_padding_rows<xa::F16, Shape::kComputeThreads>(params, ascends, range.live, blockIdx.y, gridDim.y);
  }
}
