// Attention over a paged cache of int8 or e4m3fn with a scale per token and KV head, on every GPU: attention.cu with
// the scales of token_scales.cuh.
//
// Compiled once for each combination of
//   XA_DTYPE     i8, fp8, fp8_shifted: of K and V, converted to f16 (include/fp8.cuh)
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
//   XA_SHAPE     prefill, prefill_scales, decode, decode_8rows (include/tile_shape.cuh)
// Launch: as attention.cu, with the memory of the scales besides: Shape::kScaleBytes per stage and ring.

#include "column_warps.cuh"
#include "decode.cuh"
#include "decode_loop.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "logits_transform.cuh"
#include "output_rows.cuh"
#include "padding_rows.cuh"
#include "params/token_scales.cuh"
#include "prefill_loop.cuh"
#include "prefill_tiles.cuh"
#include "query_rows.cuh"
#include "tile_shape.cuh"
#include "token_scales.cuh"
#include "work_tile.cuh"

namespace xa {

/// Prefill: computes the work tile.
template <typename Shape, typename T, typename Stored>
__device__ __forceinline__ void attend_tile(const TokenScaleParams& params, const WorkTile& work, uint8_t* shared) {
  const AttentionParams& attention = params.attention;
  const uint32_t query_rows = ptx::shared_address(shared);
  float* const row_factors = reinterpret_cast<float*>(shared + Shape::kFactorsOffset);
  const logits_softcap_alibi transform(attention, row_factors);
  const TokenScales<Shape> scales(params, work, query_rows + Shape::kRingsOffset);
  TokenScaleState<Shape::kRowTiles, Shape::kWarpColumns / 8> state;
  fetch_query<Shape, T, Stored>(attention, work, shared, row_factors);
  const int32_t warp_row = first_warp_row<Shape>();
  attend_with_rows<Shape, T, Stored>(state, attention, work, query_rows + Shape::kRingsOffset, warp_row, query_rows,
                                     transform, scales);
  const RowWriter<T, true> writer(attention, work.tile, work.kv_head);
  write_warp_rows<Shape, T>(attention, writer, state, warp_row, first_warp_column<Shape>(),
                            shared + warp_row * Shape::kQueryPitch, transform.log2_unit());
}

}  // namespace xa

namespace {
using Types = xa::XA_PASTE(scaled_operands_, XA_DTYPE);
using Compute = Types::Compute;
using Stored = Types::Stored;
using Shape = xa::TileShape<xa::tiles::XA_PASTE(shape_, XA_SHAPE), Compute, Stored, XA_HEAD_DIM>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::TokenScaleParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const xa::AttentionParams& attention = params.attention;
  auto& work = *reinterpret_cast<xa::WorkTile*>(shared + Shape::kWorkTileOffset);
  if constexpr (Shape::kSplitsKeys) {
    using Scales = xa::TokenScales<Shape>;
    using State = xa::TokenScaleState<1, Shape::kWarpColumns / 8, Shape::kTileRows>;
    const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
    const uint32_t rings = xa::ptx::shared_address(shared) + Shape::kRingsOffset;
    xa::decode_work_range<Shape, Compute, Stored, xa::logits_softcap_alibi, true>(
        attention, blockIdx.x, index, shared, [&](const xa::WorkTile& work_tile) {
          const Scales scales(params, work_tile, rings + threadIdx.x / 32 * Shape::kRingBytes);
          return xa::DecodeLoop<Shape, Compute, Stored, Scales, State>(attention, work_tile, rings, scales);
        });
    const auto& range = *reinterpret_cast<const xa::WorkRange*>(shared + Shape::kWorkRangeOffset);
    xa::clear_padding_rows<Compute, Shape::kThreads>(attention, work, range);
  } else {
    xa::init_work_tile<xa::logits_softcap_alibi>(attention, work, blockIdx.x % attention.num_kv_heads);
    xa::find_tile<Shape::kThreads, Shape::kRows>(attention, work);
    if (work.tile.num_rows > 0) xa::attend_tile<Shape, Compute, Stored>(params, work, shared);
    __syncthreads();
    if (attention.clears_padding_rows == 0) return;
    const bool ascends = xa::starts_ascend(work.maxima);
    xa::clear_padding_rows<Compute, Shape::kThreads>(attention, ascends, xa::live_rows(attention, ascends), blockIdx.x,
                                                     gridDim.x);
  }
}
