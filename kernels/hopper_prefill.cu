// Attention of long sequences on Hopper with wgmma and TMA (sm_90a).
//
// A persistent CTA (include/hopper/prefill.cuh) computes one work tile after another (include/hopper/schedule.cuh). One
// warpgroup loads (include/hopper/load.cuh), the others compute (include/hopper/compute.cuh), and mbarriers connect
// them (include/hopper/pipeline.cuh). docs/dev/kernels/hopper_prefill.md explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  the bucket: D and Dv up to it are padded with zeros in shared memory (include/hopper/shape.cuh). Those
//                named cluster are for calls without a mask in clusters of two CTAs.
//   XA_STORAGE   contiguous, paged
//   XA_LOGITS    none, softcap, softcap_alibi (include/logits_transform.cuh)
// Launch: any number of CTAs along x of kThreads threads with kSharedBytes of dynamic shared memory, kCtasPerSm per SM;
// those of a cluster along y.

#include "element.cuh"
#include "hopper/prefill.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shape.cuh"
#include "logits_transform.cuh"
#include "params/hopper_prefill.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using LogitsTransform = xa::XA_PASTE(logits_, XA_LOGITS);
using Config = xa::tiles::HopperPrefill<sizeof(T), xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM),
                                        xa::tiles::XA_PASTE(logits_, XA_LOGITS)>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::XA_STORAGE>;
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    XA_ENTRY(const __grid_constant__ xa::HopperPrefillParams params) {
  extern __shared__ uint8_t shared[];
  xa::hopper::prefill<Shape, T, LogitsTransform>(params, xa::hopper::InitialTiles::one_per_cta(), shared);
}
