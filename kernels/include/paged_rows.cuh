// Loads K and V rows from the paged (or contiguous) cache to shared memory with cp.async.
//
// A warp copies kKeys consecutive tokens of one KV head at a time, 16 bytes per lane: lane i copies chunk i % kChunks
// of row i / kChunks, so the lanes of one instruction read whole rows. The page table and cache layouts appear only
// here, in row_pairs.cuh and whole_rows.cuh, which build on this file, and in Hopper's loads (hopper/load.cuh).
#pragma once

#include <cstdint>

#include "params/attention.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

constexpr int power_of_two_up_to(int x) { return x < 2 ? 1 : 2 * power_of_two_up_to(x / 2); }

/// Assigns the 16-byte chunks of rows of kRowBytes to 32 lanes: `row` and `chunk` of this lane in the first step. A
/// step is one instruction of the warp; it covers kRowsPerStep rows, or a row takes kStepsPerRow steps.
template <int kRowBytes>
struct LaneGrid {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsPerStep = power_of_two_up_to(kChunks >= 32 ? 1 : 32 / kChunks);
  static constexpr int kStepsPerRow = (kChunks + 31) / 32;

  int row;
  int chunk;

  /// Computed again at each use: a few instructions, instead of registers throughout the loop over keys.
  __device__ __forceinline__ LaneGrid() {
    const int lane = ptx::opaque(threadIdx.x % 32);
    row = kChunks >= 32 ? 0 : lane / kChunks;
    chunk = lane - row * kChunks;
  }
  /// Whether the lane has a chunk in step `step` of a row. With 6, 12 or 24 chunks per row the last lanes have none.
  __device__ __forceinline__ bool has_chunk(int step) const {
    return row < kRowsPerStep && (kChunks % 32 == 0 || chunk + 32 * step < kChunks);
  }
};

/// Page of a token and its offset within the page.
struct TokenSlot {
  int32_t page;
  int32_t offset;
};

/// `length` keys from `begin` on; a membership test is one comparison.
struct Interval {
  int32_t begin;
  int32_t length;
  __device__ __forceinline__ bool holds(int32_t key) const {
    return static_cast<uint32_t>(key - begin) < static_cast<uint32_t>(length);
  }
};

/// The slot of key `token` of the tile's sequence. Contiguous keys are a single page of unlimited size.
__device__ __forceinline__ TokenSlot slot_of(const AttentionParams& params, const QoTile& tile, int32_t token) {
  if (has_contiguous_keys(params)) return TokenSlot{0, tile.start_k + token};
  const uint32_t index = static_cast<uint32_t>(token) / static_cast<uint32_t>(params.page_size);
  const int32_t* const table = params.block_table + tile.sequence * params.block_table_stride;
  return TokenSlot{__ldg(table + index), token - static_cast<int32_t>(index) * params.page_size};
}

/// Copies K and V rows of the work tile's KV head and sequence. Keys outside of the tile's [begin, end) become zeros
/// without being read, so that a NaN or Inf in an unused slot never reaches a product.
template <typename T, int kHeadDim, int kKeys>
class RowLoader {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kPitch = PaddedRows<kRowBytes>::kPitch;
  using Grid = LaneGrid<kRowBytes>;
  static_assert(kKeys % Grid::kRowsPerStep == 0 && kKeys <= 32);

 public:
  using Slot = TokenSlot;

  __device__ __forceinline__ RowLoader(const AttentionParams& params, const WorkTile& work)
      : params_(params), work_(work), fits_one_page_(params.page_size % kKeys == 0) {}

  /// Looks up tokens [first, first + kKeys) in the page table. If kKeys divides the page size they lie in one page, and
  /// every lane gets the slot of `first`; otherwise lane i gets that of token first + i.
  __device__ __forceinline__ TokenSlot find(int32_t first) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t token = fits_one_page_ ? first : first + lane % kKeys;
    // Entries of the table from ceil(len_k / page_size) on, and those of pages before the window, may be invalid.
    const KeyRange& keys = work_.keys;
    const bool readable = token < keys.end && (fits_one_page_ ? first + kKeys > keys.begin : token >= keys.begin);
    return readable ? slot_of(params_, work_.tile, token) : TokenSlot{0, 0};
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
    const Interval visible = {work_.keys.begin, work_.keys.end - work_.keys.begin};
    const int64_t page = clamp(slot.page, 0, params_.num_pages - 1);
    const int64_t offset = page * source.page_stride + slot.offset * source.token_stride;
    const T* const head = static_cast<const T*>(source.base) + work_.kv_head * source.head_stride;
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
        const int64_t row_offset = __shfl_sync(~0u, offset, r + grid.row);
        copy_row(grid, dim, destination + r * kPitch, head + row_offset, visible.holds(first + grid.row + r));
      }
    }
  }

  /// Copies the lane's chunks of the row at `from`.
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
  const WorkTile& work_;
  bool fits_one_page_;
};

}  // namespace xa
