// Multi-head latent attention on Hopper: the portable kernel's work (mla.cu) by wgmma.
// docs/dev/kernels/mla.md explains the design.
//
// Compiled once for each combination of
//   XA_OPERANDS  f16, bf16: of q, cache and out
//   XA_SHAPE     hopper, hopper_pair: tiles of one CTA, or of a cluster of two along y
//   XA_LOGITS    none, scaled (include/mla/logits.cuh)
// Launch: Shape::kThreads threads, a grid of 1 by Shape::kCtas times any number of work ranges, Shape::kSharedBytes of
// dynamic shared memory.

#include "element.cuh"
#include "hopper/ptx.cuh"
#include "hopper_mla/compute.cuh"
#include "hopper_mla/load.cuh"
#include "hopper_mla/shape.cuh"
#include "mla/logits.cuh"
#include "output_rows.cuh"
#include "params/hopper_mla.cuh"
#include "sequence_work.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace {
using Types = xa::mla::XA_PASTE(types_, XA_OPERANDS);
using T = Types::Compute;
using LogitsTransform = xa::mla::XA_PASTE(logits_, XA_LOGITS);
using Config = xa::tiles::Mla<xa::tiles::XA_PASTE(shape_, XA_SHAPE), xa::tiles::XA_PASTE(operands_, XA_OPERANDS)>;
using Shape = xa::hopper_mla::Shape<Config>;
using Unit = xa::WorkUnit<Shape::kTileRows, Shape::kKeys, xa::TileEnd::kRow, xa::TileOrder::kFolded>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperMlaParams params) {
  extern __shared__ uint8_t shared[];
  const xa::AttentionParams& attention = params.attention;
  const xa::hopper_mla::Buffers<Shape> buffers(shared);
  xa::WorkTile& work = buffers.work_tile();
  xa::WorkRange& range = buffers.work_range();
  if (threadIdx.x / 32 == 2) buffers.init(threadIdx.x % 32);
  if (threadIdx.x == 96 && params.box_rows != 0) xa::hopper::ptx::prefetch_tensormap(params.cache);
  const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y) / Shape::kCtas,
                                    static_cast<int32_t>(gridDim.y) / Shape::kCtas};
  xa::init_work_tile<LogitsTransform>(attention, work, blockIdx.x);
  xa::partition_work<Shape::kThreads, Unit, false>(attention, work, range, index);
  if (Shape::kCtas > 1) {
    // The other CTA's barriers must be there before this one arrives at them.
    if (threadIdx.x == 0) buffers.set_cta_tile();
    xa::hopper_mla::sync_cluster<Shape>();
  }
  const int32_t warpgroup = xa::hopper::uniform(threadIdx.x / 128);
  if (warpgroup == 2) {
    xa::hopper::ptx::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
    int32_t number = 0;
#pragma unroll 1
    while (work.tile.num_rows != 0) {
      if (range.has_split()) xa::hopper_mla::BlockLoader<Shape, T>(params, buffers).load(number);
      xa::hopper_mla::sync_cta<Shape>();
      if (threadIdx.x / 32 == Shape::kThreads / 32 - 1) {
        const xa::WorkRangeIterator<Unit> iterator(attention, work, range, xa::ptx::opaque(index.index));
        iterator.next(threadIdx.x % 32);
        __syncwarp();
        if (threadIdx.x % 32 == 0) buffers.set_cta_tile();
        __syncwarp();
      }
      xa::hopper_mla::sync_cluster<Shape>();
    }
  } else {
    xa::hopper::ptx::warpgroup_reg_alloc<Shape::kRegisters>();
    // While the first block is loaded. Under 64 rows, the last warp has none, whose loads it would delay.
    if (buffers.cta_rank() == 0) {
      xa::store_split_record<Shape::kTileRows, Shape::kComputeThreads - 32>(attention, work, range, index.index);
    }
    int32_t number = 0;
#pragma unroll 1
    while (work.tile.num_rows != 0) {
      if (range.has_split())
        xa::hopper_mla::compute_tile<Shape, T, LogitsTransform>(attention, buffers, number, warpgroup);
      xa::hopper_mla::sync_cta<Shape>();
      xa::hopper_mla::sync_cluster<Shape>();
    }
    if (attention.clears_padding_rows == 0) return;
    const bool ascends = xa::starts_ascend(work.maxima);
    xa::clear_padding_rows<T, Shape::kComputeThreads>(attention, ascends, range.live, blockIdx.y, gridDim.y);
  }
}
