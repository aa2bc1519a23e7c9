// Attention of few queries per sequence over many keys on Hopper: prefill (hopper_prefill.cu) whose keys are divided
// between CTAs as in decode (include/work_partition.cuh). docs/dev/kernels/hopper_split_kv.md explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket of D and Dv, with "_split_kv" (include/hopper/shape.cuh)
//   XA_STORAGE   contiguous, paged
//   XA_LOGITS    none
// Launch: a grid of Hkv by the number of work ranges, kThreads threads, kSharedBytes of dynamic shared memory; one CTA
// per SM.

#include "element.cuh"
#include "hopper/shape.cuh"
#include "hopper/split_kv_prefill.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using LogitsTransform = xa::XA_PASTE(logits_, XA_LOGITS);
using Config = xa::tiles::HopperPrefill<sizeof(T), xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM),
                                        xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::XA_STORAGE>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperPrefillParams params) {
  extern __shared__ uint8_t shared[];
  xa::hopper::split_kv<Shape, T, LogitsTransform>(params, shared);
}
