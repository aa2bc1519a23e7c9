// Decode of few sequences in one launch: the CTAs of a cluster divide the keys of a KV head and merge split tiles
// through distributed shared memory. It needs no workspace. docs/dev/kernels/cluster_decode.md explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16: of q, K and V; fp8: fp8 K and V, converted to f16 (include/fp8.cuh)
//   XA_HEAD_DIM  the bucket: serves head dimensions up to it, which are padded with zeros in shared memory
//   XA_LOGITS    none, softcap_alibi (include/logits_transform.cuh)
//   XA_CALL      any, any_per_sequence, plain, per_sequence (include/cluster_call.cuh)
// Launch: a grid of Hkv by n by m CTAs in clusters of 1 by n by 1, Shape::kThreads threads, Shape::kSharedBytes of
// dynamic shared memory. m is 1, or with a cluster per sequence the number of sequence slots. At most
// kClusterDecodeSlots sequence slots, and fewer than 2^20 KV chunks.

#include "cluster_call.cuh"
#include "cluster_decode.cuh"
#include "cluster_shape.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "logits_transform.cuh"
#include "params/attention.cuh"

namespace {
using Types = xa::XA_PASTE(operands_, XA_DTYPE);
using LogitsTransform = xa::XA_PASTE(logits_, XA_LOGITS);
using Call = xa::XA_PASTE(call_, XA_CALL);
using Shape = xa::ClusterShape<Types::Compute, Types::Stored, XA_HEAD_DIM, Call>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::AttentionParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const auto& known = Call::template known<XA_HEAD_DIM>(params);
  xa::ClusterDecode<Shape, Types::Compute, Types::Stored, LogitsTransform>(known, params, shared).run();
}
