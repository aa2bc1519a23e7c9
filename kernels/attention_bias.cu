// Attention with a bias of pairs of rows and keys over contiguous K and V, on every GPU: the prefill of attention.cu
// for sequences of any length.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32: of q, K, V and out; the bias has this type or f32
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
// Launch: Shape::kThreads threads, a grid of Hkv * n, n at least the number of tiles per KV head, Shape::kSharedBytes
// of dynamic shared memory and what BiasTile has.

#include "bias_tile.cuh"
#include "column_warps.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "logits_transform.cuh"
#include "output_rows.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "prefill_loop.cuh"
#include "prefill_tiles.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_shape.cuh"
#include "work_tile.cuh"

namespace xa {

/// Computes the work tile.
template <typename Shape, typename T>
__device__ __forceinline__ void attend_tile(const AttentionParams& params, const BiasSource& bias, const WorkTile& work,
                                            uint8_t* shared) {
  const uint32_t query_rows = ptx::shared_address(shared);
  const int32_t warp_row = first_warp_row<Shape>();
  SoftmaxState<Shape::kRowTiles, Shape::kWarpColumns / 8> state;
  fetch_query<Shape, T, T>(params, work, shared, nullptr);
  BiasTile<Shape, T> tile(params, bias, work, warp_row, shared);
  const logits_bias<Shape, T> transform(params, tile);
  attend_with_rows<Shape, T, T>(state, params, work, query_rows + Shape::kRingsOffset, warp_row, query_rows, transform);
  transform.finish(state);
  const RowWriter<T, false> writer(params, work.tile, work.kv_head);
  write_warp_rows<Shape, T>(params, writer, state, warp_row, first_warp_column<Shape>(),
                            shared + warp_row * Shape::kQueryPitch, transform.log2_unit());
}

}  // namespace xa

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using Shape = xa::TileShape<xa::tiles::shape_prefill, T, T, XA_HEAD_DIM>;
/// At D 64 in 16 bits three CTAs have registers, because P is packed early, and shared memory on Hopper.
constexpr int kCtasPerSm = Shape::kHeadDim == 64 && xa::Element<T>::kIs16Bit ? 3 : Shape::kCtasPerSm;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::BiasParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const xa::AttentionParams& attention = params.attention;
  auto& work = *reinterpret_cast<xa::WorkTile*>(shared + Shape::kWorkTileOffset);
  xa::init_work_tile<xa::logits_softcap_alibi>(attention, work, blockIdx.x % attention.num_kv_heads);
  xa::find_tile<Shape::kThreads, Shape::kRows>(attention, work);
  if (work.tile.num_rows > 0) xa::attend_tile<Shape, T>(attention, params.bias, work, shared);
  __syncthreads();
  const bool ascends = xa::starts_ascend(work.maxima);
  xa::clear_padding_rows<T, Shape::kThreads>(attention, ascends, xa::live_rows(attention, ascends), blockIdx.x,
                                             gridDim.x);
}
