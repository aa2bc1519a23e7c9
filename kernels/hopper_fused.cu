// Prefill and decode of one batch in one launch on Hopper: some CTAs decode first (include/decode.cuh), with all of
// their warps, and then join the others in prefill (include/hopper/prefill.cuh). Each CTA computes from the batch how
// many CTAs decode (include/hopper/fused.cuh). docs/dev/kernels/hopper_fused.md explains the design.
//
// Compiled once for each combination of
//   XA_DTYPE     f16, bf16
//   XA_HEAD_DIM  D and Dv, exactly (include/hopper/shape.cuh)
// Launch: one CTA per SM of kThreads threads, at least Hkv CTAs, with the larger kSharedBytes of both shapes of dynamic
// shared memory. The page size is a multiple of kTokensPerLoad. HopperPrefillParams::next_tile is followed by the
// arrival counters of split tiles (include/hopper/merge_last.cuh); clear_tile_counter clears both.

#include "decode.cuh"
#include "element.cuh"
#include "hopper/fused.cuh"
#include "hopper/merge_last.cuh"
#include "hopper/prefill.cuh"
#include "hopper/schedule.cuh"
#include "hopper/shape.cuh"
#include "hopper/tma_decode_loop.cuh"
#include "logits_transform.cuh"
#include "tile_shape.cuh"

namespace {
using T = xa::XA_PASTE(dtype_, XA_DTYPE);
using LogitsTransform = xa::logits_none;
using Config = xa::tiles::HopperPrefill<sizeof(T), xa::tiles::XA_PASTE(head_dim_, XA_HEAD_DIM), xa::tiles::logits_none>;
using Shape = xa::hopper::PrefillShape<Config, xa::hopper::Storage::paged>;
using DecodeShape = xa::TileShape<xa::tiles::shape_fused, T, T, XA_HEAD_DIM>;
static_assert(Shape::kThreads == DecodeShape::kThreads);
}  // namespace

extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
    XA_ENTRY(const __grid_constant__ xa::HopperFusedParams params) {
  extern __shared__ uint8_t shared[];
  const xa::AttentionParams& decode = params.decode;
  // Prefill computes the same address again. Otherwise a register would hold it during decode, which has none left.
  const uint32_t address = xa::ptx::opaque(xa::ptx::shared_address(shared));
  uint8_t* const aligned = shared + -address % 1024;
  const xa::hopper::FusedWork work = xa::hopper::estimate_work<Shape::kThreads, DecodeShape::kRows, Shape::kRows>(
      params, reinterpret_cast<xa::hopper::FusedWork*>(aligned));
  // clear_tile_counter may still run. The counters are not accessed before this.
  xa::hopper::ptx::wait_for_previous_kernel();
  const int32_t ranges = xa::hopper::decode_ranges(work, decode.num_kv_heads);
  const int32_t place = xa::hopper::decode_place(), range = place / decode.num_kv_heads;
  if (range < ranges) {
    const xa::hopper::KvTensorMaps maps = {params.k, params.v, params.prefill.k_head_atom_columns,
                                           params.prefill.v_head_atom_columns};
    xa::hopper::TmaRing<DecodeShape>(aligned).init();
    int32_t count = 0;
    xa::decode_work_tiles<DecodeShape, T, T, LogitsTransform, false>(
        decode, place - range * decode.num_kv_heads, xa::WorkRangeIndex{range, ranges}, aligned,
        [&](const xa::WorkTile& work_tile) {
          return xa::hopper::TmaDecodeLoop<DecodeShape, T>(decode, work_tile, maps, aligned, count);
        },
        [&](const xa::WorkTile& work_tile, const xa::WorkRange& work_range) {
          xa::hopper::merge_if_last<DecodeShape, T>(decode, work_tile, work_range, params.prefill.next_tile + 1,
                                                    aligned);
        });
    xa::hopper::TmaRing<DecodeShape>(aligned).invalidate();
    // Prefill's mbarriers and TMA loads reuse the shared memory that decode has read and written.
    xa::hopper::ptx::fence_proxy_async_shared();
    __syncthreads();
  }
  xa::hopper::prefill<Shape, T, LogitsTransform, true>(params.prefill, xa::hopper::InitialTiles::none(), shared);
}
