// Multi-head latent attention on Hopper: the portable kernel's work (mla.cu) by wgmma, with 16-bit caches.
// docs/dev/kernels/mla.md explains the design.
//
// Compiled once for each combination of
//   XA_OPERANDS  f16, bf16: of q, cache and out
//   XA_LOGITS    none, scaled (include/mla/logits.cuh)
// Launch: Shape::kThreads threads, a grid of 1 by any number of work ranges, Shape::kSharedBytes of dynamic shared
// memory.

#include "element.cuh"
#include "hopper/ptx.cuh"
#include "hopper_mla/compute.cuh"
#include "hopper_mla/load.cuh"
#include "hopper_mla/shape.cuh"
#include "mla/logits.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "sequence_work.cuh"
#include "work_partition.cuh"
#include "work_range.cuh"
#include "work_tile.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_OPERANDS);
using LogitsTransform = xa::mla::XA_PASTE(logits_, XA_LOGITS);
using Config = xa::tiles::Mla<xa::tiles::shape_hopper, xa::tiles::XA_PASTE(operands_, XA_OPERANDS)>;
using Shape = xa::hopper_mla::Shape<Config>;
using Unit = xa::WorkUnit<Shape::kRows, Shape::kKeys>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  extern __shared__ uint8_t shared[];
  const xa::hopper_mla::Buffers<Shape> buffers(shared);
  xa::WorkTile& work = buffers.work_tile();
  xa::WorkRange& range = buffers.work_range();
  if (threadIdx.x == 64) buffers.init();
  const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
  xa::init_work_tile<LogitsTransform>(params, work);
  xa::partition_work<Shape::kThreads, Unit, false>(params, work, range, index);
  const int32_t warpgroup = xa::hopper::uniform(threadIdx.x / 128);
  if (warpgroup == 2) {
    xa::hopper::ptx::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
    const int buffer = xa::hopper::uniform(threadIdx.x / 32) / Shape::kLoadWarps % 2;
    int32_t count = 0;
#pragma unroll 1
    while (work.tile.num_rows != 0) {
      xa::hopper_mla::load_blocks<Shape, T>(params, buffers, buffer, count);
      __syncthreads();
      if (threadIdx.x / 32 == Shape::kThreads / 32 - 1) {
        const xa::WorkRangeIterator<Unit> iterator(params, work, range, index.index);
        iterator.next(threadIdx.x % 32);
      }
      __syncthreads();
    }
  } else {
    xa::hopper::ptx::warpgroup_reg_alloc<Shape::kRegisters>();
    xa::hopper_mla::BufferCounts counts;
#pragma unroll 1
    while (work.tile.num_rows != 0) {
      xa::hopper_mla::compute_tile<Shape, T, LogitsTransform>(params, buffers, counts, warpgroup);
      __syncthreads();
      __syncthreads();
    }
    xa::store_split_record<Shape::kRows>(params, work, range, index.index);
    if (params.clears_padding_rows == 0) return;
    const bool ascends = xa::starts_ascend(work.maxima);
    xa::clear_padding_rows<T, Shape::kComputeThreads>(params, ascends, range.live, blockIdx.y, gridDim.y);
  }
}
