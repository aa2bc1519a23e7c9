// From the page table to rows in shared memory.
//
// A warp fetches kKeys neighbouring tokens of one KV head at a time, 16 bytes a lane: lane i holds chunk i % kChunks of
// row i / kChunks, so the lanes of an instruction read whole rows. Pages and layouts exist nowhere else.
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

constexpr int power_of_two_up_to(int x) { return x < 2 ? 1 : 2 * power_of_two_up_to(x / 2); }

/// How 32 lanes share rows of kRowBytes: `row` and `chunk` of this lane in step 0; a step is kRowsPerStep rows.
template <int kRowBytes>
struct LaneGrid {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsPerStep = power_of_two_up_to(kChunks >= 32 ? 1 : 32 / kChunks);
  static constexpr int kStepsPerRow = (kChunks + 31) / 32;

  int row;
  int chunk;

  /// Derived again at each use: a few instructions, where registers for the whole loop over keys are dear.
  __device__ __forceinline__ LaneGrid() {
    const int lane = ptx::opaque(threadIdx.x % 32);
    row = kStepsPerRow > 1 ? 0 : lane / kChunks;
    chunk = lane - row * kChunks;
  }
  /// Whether the lane has a chunk in step `step` of a row: rows of 6, 12 or 24 chunks leave the last lanes without.
  __device__ __forceinline__ bool has_chunk(int step) const {
    return row < kRowsPerStep && (kChunks % 32 == 0 || chunk + 32 * step < kChunks);
  }
};

/// The page and the offset in it of one token; which token, is the lane's.
struct TokenSlot {
  int32_t page;
  int32_t offset;
};

/// `length` keys from `begin` on.
struct Interval {
  int32_t begin;
  int32_t length;
  __device__ __forceinline__ bool holds(int32_t key) const {
    return static_cast<uint32_t>(key - begin) < static_cast<uint32_t>(length);
  }
};

/// Where key `token` of the plan's sequence is.
__device__ __forceinline__ TokenSlot slot_of(const AttentionParams& params, const WorkTile& plan, int32_t token) {
  if (params.block_table == nullptr) return TokenSlot{0, plan.tile.start_k + token};
  const uint32_t index = static_cast<uint32_t>(token) / static_cast<uint32_t>(params.page_size);
  const int32_t* const table = params.block_table + plan.tile.sequence * params.block_table_stride;
  return TokenSlot{__ldg(table + index), token - static_cast<int32_t>(index) * params.page_size};
}

/// Fetches K and V rows of one KV head of one sequence, restricted to keys [begin, end): all else becomes zeros, so
/// that whatever lies there, NaN and Inf included, never reaches a product.
template <typename T, int kHeadDim, int kKeys>
class RowLoader {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kPitch = PaddedRows<kRowBytes>::kPitch;
  using Grid = LaneGrid<kRowBytes>;
  static_assert(kKeys % Grid::kRowsPerStep == 0 && kKeys <= 32);

 public:
  __device__ __forceinline__ RowLoader(const AttentionParams& params, const WorkTile& plan)
      : params_(params), plan_(plan), fits_one_page_(params.page_size % kKeys == 0) {}

  /// Looks up the pages of tokens [first, first + kKeys). Where these lie in one page, every lane gets the slot of
  /// `first`, else lane i that of token first + i.
  __device__ __forceinline__ TokenSlot find(int32_t first) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t token = fits_one_page_ ? first : first + lane % kKeys;
    // The table is read below ceil(len_k / page_size) only, and not for pages that have slid out of the window.
    const KeyRange& keys = plan_.keys;
    const bool wanted = token < keys.end && (fits_one_page_ ? first + kKeys > keys.begin : token >= keys.begin);
    return wanted ? slot_of(params_, plan_, token) : TokenSlot{0, 0};
  }

  __device__ __forceinline__ void load_keys(uint32_t destination, int32_t first, const TokenSlot& slot) const {
    load(params_.k, params_.head_dim, destination, first, slot);
  }
  __device__ __forceinline__ void load_values(uint32_t destination, int32_t first, const TokenSlot& slot) const {
    load(params_.v, params_.value_dim, destination, first, slot);
  }

 private:
  __device__ __forceinline__ void load(const KvSource& source, int32_t dim, uint32_t destination, int32_t first,
                                       const TokenSlot& slot) const {
    const Grid grid;
    const Interval visible = {plan_.keys.begin, plan_.keys.end - plan_.keys.begin};
    const int64_t page = clamp(slot.page, 0, params_.num_pages - 1);
    const int64_t offset = page * source.page_stride + slot.offset * source.token_stride;
    const T* const head = static_cast<const T*>(source.base) + plan_.kv_head * source.head_stride;
    destination += grid.row * kPitch + grid.chunk * 16;
    if (fits_one_page_) {
      const T* from = head + offset + grid.row * source.token_stride;
#pragma unroll 8
      for (int r = 0; r < kKeys; r += Grid::kRowsPerStep) {
        copy_row(grid, dim, destination + r * kPitch, from, visible.holds(first + grid.row + r));
        from += Grid::kRowsPerStep * source.token_stride;
      }
    } else {
#pragma unroll 4
      for (int r = 0; r < kKeys; r += Grid::kRowsPerStep) {
        const int64_t of_row = __shfl_sync(~0u, offset, r + grid.row);
        copy_row(grid, dim, destination + r * kPitch, head + of_row, visible.holds(first + grid.row + r));
      }
    }
  }

  /// The lane's chunks of the row at `from`.
  __device__ __forceinline__ void copy_row(const Grid& grid, int32_t dim, uint32_t destination, const T* from,
                                           bool visible) const {
    constexpr int kElements = 16 / sizeof(T);
#pragma unroll
    for (int step = 0; step < Grid::kStepsPerRow; ++step) {
      const int32_t element = (grid.chunk + 32 * step) * kElements;
      const bool inside = element < dim;
      const T* const source = from + (inside ? element : 0);
      if (!grid.has_chunk(step)) continue;
      if (sizeof(T) == 1 && params_.has_narrow_rows != 0) {
        ptx::cp_async_8(destination + 512 * step, source, visible && inside);
        const bool second_inside = element + 8 < dim;
        ptx::cp_async_8(destination + 512 * step + 8, source + (second_inside ? 8 : 0), visible && second_inside);
      } else {
        ptx::cp_async_16(destination + 512 * step, source, visible && inside);
      }
    }
  }

  const AttentionParams& params_;
  const WorkTile& plan_;
  bool fits_one_page_;
};

}  // namespace xa
