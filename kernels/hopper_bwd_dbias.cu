// The gradient of a bias that sequences or heads share, on Hopper up to 128 columns (include/hopper_bwd/dbias.cuh).
// hopper_bwd_prepare has stored delta and the lse in base 2 before. hopper_bwd, of which this kernel needs nothing, may
// still run on other SMs. The last CTA waits for its end, so that what follows in the stream finds all gradients.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket: D and Dv up to it are padded with zeros in shared memory
//   XA_BIAS      the type of the bias: 16_bits (that of the operands), f32
// Launch: along x the tiles, those of a matrix after each other; along y the CTAs of a tile, a cluster if there are
// several. A CTA has kThreads threads and kSharedBytes of dynamic shared memory.

#include "element.cuh"
#include "hopper_bwd/dbias.cuh"
#include "hopper_bwd/dbias_store.cuh"
#include "params/hopper_bwd.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape = xa::hopper::DbiasShape<XA_HEAD_DIM, xa::tiles::XA_PASTE(bias_, XA_BIAS)>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperDbiasParams params) {
  using namespace xa::hopper;
  extern __shared__ uint8_t shared[];
  const DbiasPipeline<Shape> pipeline(shared);
  if (threadIdx.x == 0) pipeline.init();
  if (threadIdx.x == 32) {
    for (const auto* map : {&params.q, &params.k, &params.v, &params.dout, &params.bias}) ptx::prefetch_tensormap(*map);
  }
  const int32_t key_tiles = (params.keys + Shape::kKeys - 1) / Shape::kKeys;
  const int32_t row_tiles = (params.rows + Shape::kRows - 1) / Shape::kRows;
  const int32_t index = blockIdx.x, block = index / key_tiles;
  const DbiasTile tile = {block / row_tiles, block % row_tiles * Shape::kRows, index % key_tiles * Shape::kKeys};
  __syncthreads();
  const int32_t warp = uniform(threadIdx.x / 32);
  if (warp < 4) {
    ptx::warpgroup_reg_dealloc<24>();
    if (warp == 0) load_dbias_items<Shape>(params, pipeline, tile);
    if (warp == 1 && blockIdx.x == gridDim.x - 1) ptx::wait_for_previous_kernel();
  } else {
    ptx::warpgroup_reg_alloc<240>();
    DbiasSum<Shape, T> sum(params, pipeline, tile);
    sum.add_items();
    const DbiasStore<Shape> result(params, pipeline, tile, sum.sums());
    if (Shape::kHasF32Bias || params.dbias_is_f32 != 0) {
      result.template store<float>();
    } else {
      result.template store<T>();
    }
  }
}
