// Writes the K and V rows of new tokens into their slots of a paged cache, in place.
//
// Slot page * page_size + offset names a token of the cache; a slot outside [0, num_pages * page_size) is skipped. Rows
// with the same slot overwrite each other in no particular order.
//
// Compiled once for each XA_DTYPE of the rows: f16, bf16, f32. The cache has the same type, or fp8.
// Launch: kThreads threads; CTA (t, 0) writes the keys of row t, CTA (t, 1) its values.

#include <cstdint>

#include "cache_rows.cuh"

namespace xa {

/// The one argument of the kernel. src/cuda/kv_cache_update.rs holds the same struct.
struct CacheUpdateParams {
  NewRows key;
  NewRows value;
  SlotMapping slot_mapping;
};

// src/cuda/kv_cache_update.rs asserts the same number.
static_assert(sizeof(CacheUpdateParams) == 208);

constexpr int kThreads = 128;

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kThreads)
    XA_ENTRY(const __grid_constant__ xa::CacheUpdateParams params) {
  using T = xa::XA_PASTE(dtype_, XA_DTYPE);
  const xa::CachePlace place = xa::find_place(params.slot_mapping, blockIdx.x);
  if (!place.inside) return;
  xa::write_heads<T, xa::kThreads>(blockIdx.y == 0 ? params.key : params.value, blockIdx.x, place);
}
