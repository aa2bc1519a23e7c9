// Attention of ragged query rows over paged or contiguous K and V, on mma.sync and cp.async: every GPU from sm_80 on.
//
// In prefill, a CTA computes one tile of query rows of one KV head (include/prefill_tiles.cuh) and streams the keys
// that the tile attends to through shared memory. In decode, it computes a range of the keys of all tiles of a KV head
// (include/work_partition.cuh), or each warp computes short tiles alone (include/warp_tiles.cuh). docs/dev/kernels
// explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32: of q, K, V and out; fp8, fp8_shifted: fp8 K and V, converted to f16 (include/fp8.cuh)
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
//   XA_SHAPE     prefill, decode, decode_8rows, decode_8warps (include/tile_shape.cuh)
//   XA_LOGITS    none, softcap_alibi (include/logits_transform.cuh)
// Launch: Shape::kThreads threads. Prefill: a grid of Hkv * n, n at least the number of tiles per KV head; decode: Hkv
// by any number of work ranges. Shape::kSharedBytes of dynamic shared memory, plus Shape::kFixedSplitsBytes in decode
// with batch_invariant.

#include "column_warps.cuh"
#include "decode.cuh"
#include "decode_loop.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "logits_transform.cuh"
#include "new_tokens.cuh"
#include "output_rows.cuh"
#include "padding_rows.cuh"
#include "params/attention.cuh"
#include "prefill_loop.cuh"
#include "prefill_tiles.cuh"
#include "query_rows.cuh"
#include "softmax.cuh"
#include "tile_shape.cuh"
#include "warp_tiles.cuh"
#include "work_tile.cuh"

namespace xa {

/// Prefill: computes the work tile.
template <typename Shape, typename T, typename Stored, typename LogitsTransform>
__device__ __forceinline__ void attend_tile(const AttentionParams& params, const WorkTile& work, uint8_t* shared) {
  const uint32_t query_rows = ptx::shared_address(shared), rings = query_rows + Shape::kRingsOffset;
  float* const row_factors = Shape::kIsFp8 ? reinterpret_cast<float*>(shared + Shape::kFactorsOffset) : nullptr;
  SoftmaxState<Shape::kRowTiles, Shape::kWarpColumns / 8> state;
  const LogitsTransform transform(params, row_factors);
  fetch_query<Shape, T, Stored>(params, work, shared, row_factors);
  const int32_t warp_row = first_warp_row<Shape>();
  attend_with_rows<Shape, T, Stored>(state, params, work, rings, warp_row, query_rows, transform);
  const RowWriter<T, Shape::kIsFp8> writer(params, work.tile, work.kv_head);
  write_warp_rows<Shape, T>(params, writer, state, warp_row, first_warp_column<Shape>(),
                            shared + warp_row * Shape::kQueryPitch, transform.log2_unit());
}

}  // namespace xa

namespace {
using Types = xa::XA_PASTE(operands_, XA_DTYPE);
using Compute = Types::Compute;
using Stored = Types::Stored;
using LogitsTransform = xa::XA_PASTE(logits_, XA_LOGITS);
using Shape = xa::TileShape<xa::tiles::XA_PASTE(shape_, XA_SHAPE), Compute, Stored, XA_HEAD_DIM>;
// Of 16 bits only where there is no logits transform. 8-bit K and V have one variant.
constexpr bool kHasWarpTiles =
    Shape::kHasWarpTiles && (Shape::kIsFp8 || std::is_same_v<LogitsTransform, xa::logits_none>);
using WarpTiles =
    std::conditional_t<kHasWarpTiles, xa::WarpTiles<Shape, Compute, Stored, LogitsTransform>, xa::NoWarpTiles>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& work = *reinterpret_cast<xa::WorkTile*>(shared + Shape::kWorkTileOffset);
  if constexpr (Shape::kSplitsKeys) {
    const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
    if constexpr (Shape::kAppendsKv) {
      // New tokens are stored first: while the first keys are being loaded, or after the attention, stores take longer.
      if (xa::has_new_tokens(params)) xa::store_new_tokens<Shape, Stored>(params, blockIdx.x, index);
    }
    const uint32_t rings = xa::ptx::shared_address(shared) + Shape::kRingsOffset;
    xa::decode_work_range<Shape, Compute, Stored, LogitsTransform, true, WarpTiles>(
        params, blockIdx.x, index, shared, [&](const xa::WorkTile& work_tile) {
          return xa::DecodeLoop<Shape, Compute, Stored>(params, work_tile, rings);
        });
    const auto& range = *reinterpret_cast<const xa::WorkRange*>(shared + Shape::kWorkRangeOffset);
    xa::clear_padding_rows<Compute, Shape::kThreads>(params, work, range);
  } else {
    xa::init_work_tile<LogitsTransform>(params, work, blockIdx.x % params.num_kv_heads);
    xa::find_tile<Shape::kThreads, Shape::kRows>(params, work);
    if (work.tile.num_rows > 0) xa::attend_tile<Shape, Compute, Stored, LogitsTransform>(params, work, shared);
    __syncthreads();
    if (params.clears_padding_rows == 0) return;
    const bool ascends = xa::starts_ascend(work.maxima);
    xa::clear_padding_rows<Compute, Shape::kThreads>(params, ascends, xa::live_rows(params, ascends), blockIdx.x,
                                                     gridDim.x);
  }
}
