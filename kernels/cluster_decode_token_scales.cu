// Decode of few sequences in one launch over a paged cache of int8 or e4m3fn with a scale per token and KV head:
// cluster_decode.cu with the scales of token_scales.cuh.
//
// Compiled once for each combination of
//   XA_DTYPE     i8, fp8: of K and V, converted to f16 (include/fp8.cuh)
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
// Launch: as cluster_decode.cu.

#include "cluster_call.cuh"
#include "cluster_decode.cuh"
#include "cluster_shape.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "logits_transform.cuh"
#include "params/token_scales.cuh"
#include "token_scales.cuh"
#include "work_tile.cuh"

namespace {
using Types = xa::XA_PASTE(scaled_operands_, XA_DTYPE);
using Shape = xa::ClusterShape<Types::Compute, Types::Stored, XA_HEAD_DIM, xa::call_any>;

/// Rows with scales (cluster_decode.cuh).
struct ScaledRows {
  const xa::TokenScaleParams& params;

  using State = xa::TokenScaleState<1, Shape::kHeadDim / 8, Shape::kTileRows>;

  __device__ __forceinline__ xa::TokenScales<Shape> of(const xa::WorkTile& work, uint32_t ring) const {
    return xa::TokenScales<Shape>(params, work, ring);
  }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::TokenScaleParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  xa::ClusterDecode<Shape, Types::Compute, Types::Stored, xa::logits_softcap_alibi, ScaledRows>(
      params.attention, params.attention, shared, ScaledRows{params})
      .run();
}
