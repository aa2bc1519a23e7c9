// Loads contiguous K and V rows to shared memory with cp.async, where a kernel has no others: RowLoader
// (paged_rows.cuh) without a page table.
#pragma once

#include <cstdint>

#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// Copies K and V rows of the work tile's KV head and sequence. Keys outside of the tile's [begin, end) become zeros
/// without being read, so that a NaN or Inf of another sequence never reaches a product.
template <typename T, int kHeadDim, int kKeys>
class ContiguousRowLoader {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kPitch = PaddedRows<kRowBytes>::kPitch;
  using Grid = LaneGrid<kRowBytes>;
  static_assert(sizeof(T) > 1 && kKeys % Grid::kRowsPerStep == 0);

 public:
  /// There is nothing to look up.
  struct Slot {};

  __device__ __forceinline__ ContiguousRowLoader(const AttentionParams& params, const WorkTile& work)
      : params_(params), work_(work) {}

  __device__ __forceinline__ Slot find(int32_t) const { return {}; }
  __device__ __forceinline__ void load_keys(uint32_t destination, int32_t first, const Slot&) const {
    load(params_.k, params_.head_dim, destination, first);
  }
  __device__ __forceinline__ void load_values(uint32_t destination, int32_t first, const Slot&) const {
    load(params_.v, params_.value_dim, destination, first);
  }

 private:
  __device__ __forceinline__ void load(const KvSource& source, int32_t dim, uint32_t destination, int32_t first) const {
    const Grid grid;
    const Interval visible = {work_.keys.begin, work_.keys.end - work_.keys.begin};
    const int64_t row = work_.tile.start_k + first + grid.row;
    const T* const from =
        static_cast<const T*>(source.base) + work_.kv_head * source.head_stride + row * source.token_stride;
    destination += grid.row * kPitch + grid.chunk * 16;
    if (visible.holds(first) && visible.holds(first + kKeys - 1)) {
      copy_rows(grid, source, dim, destination, from, [](int) { return true; });
    } else {
      copy_rows(grid, source, dim, destination, from, [&](int r) { return visible.holds(first + grid.row + r); });
    }
  }

  /// Copies the lane's chunks of the rows from `from` on, of which number r `is_visible(r)`.
  template <typename IsVisible>
  __device__ __forceinline__ void copy_rows(const Grid& grid, const KvSource& source, int32_t dim, uint32_t destination,
                                            const T* from, const IsVisible& is_visible) const {
    constexpr int kElements = 16 / sizeof(T);
#pragma unroll 8
    for (int r = 0; r < kKeys; r += Grid::kRowsPerStep) {
#pragma unroll
      for (int step = 0; step < Grid::kStepsPerRow; ++step) {
        const int32_t element = (grid.chunk + 32 * step) * kElements;
        const bool inside = element < dim;
        if (!grid.has_chunk(step)) continue;
        ptx::cp_async_16(destination + r * kPitch + 512 * step, from + (inside ? element : 0), inside && is_visible(r));
      }
      from += Grid::kRowsPerStep * source.token_stride;
    }
  }

  const AttentionParams& params_;
  const WorkTile& work_;
};

}  // namespace xa
