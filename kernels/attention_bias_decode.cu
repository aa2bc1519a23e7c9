// Attention of few query rows per sequence with a bias of pairs of rows and keys over contiguous K and V, on every GPU:
// the decode of attention.cu, whose keys are divided between CTAs.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16, f32: of q, K, V and out; the bias has this type or f32
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
// Launch: as decode of attention.cu, without batch_invariant.

#include "decode.cuh"
#include "decode_loop.cuh"
#include "element.cuh"
#include "loaded_bias.cuh"
#include "logits_transform.cuh"
#include "padding_rows.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "softmax.cuh"
#include "tile_shape.cuh"
#include "work_tile.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
/// Nothing is appended to contiguous keys.
struct Shape : xa::TileShape<xa::tiles::shape_decode, T, T, XA_HEAD_DIM> {
  static constexpr bool kAppendsKv = false;
};
using Bias = xa::DecodeBias<T, Shape::kKeys, Shape::kKeys * Shape::kKeyWarps, (Shape::kRowBytes < 1024)>;
using State = xa::SoftmaxState<1, Shape::kWarpColumns / 8, Shape::kTileRows>;
using Loop = xa::DecodeLoop<Shape, T, T, xa::NoTokenScales, State, Bias>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::BiasParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const xa::AttentionParams& attention = params.attention;
  const xa::WorkRangeIndex index = {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)};
  const uint32_t rings = xa::ptx::shared_address(shared) + Shape::kRingsOffset;
  xa::decode_work_range<Shape, T, T, xa::logits_softcap_alibi, false>(
      attention, blockIdx.x, index, shared,
      [&](const xa::WorkTile& work) { return Loop(attention, work, rings, xa::NoTokenScales{}, Bias(params, work)); });
  const auto& work = *reinterpret_cast<const xa::WorkTile*>(shared + Shape::kWorkTileOffset);
  const auto& range = *reinterpret_cast<const xa::WorkRange*>(shared + Shape::kWorkRangeOffset);
  xa::clear_padding_rows<T, Shape::kThreads>(attention, work, range);
}
