// From the page table to blocks of K and V in shared memory, as decode fetches them: K and V of a token together, in
// pieces as long as they come, and page numbers long before they are wanted.
#pragma once

#include <cstdint>

#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// Where the keys of one warp lie, blocks of kKeys that start every kStep keys, a granule after the other. A lane looks
/// up one token; a batch of them serves 32 granules, or two where granules may straddle pages. Where there are
/// registers for it (`kLooksAhead`), the next batch is under way meanwhile: under load a look-up takes as long as a
/// block.
template <int kKeys, int kStep, bool kLooksAhead>
class GranuleSlots {
  static constexpr int kGranules = kKeys / kTokensPerLoad;
  static_assert(kKeys % kTokensPerLoad == 0);

 public:
  __device__ __forceinline__ GranuleSlots(const AttentionParams& params, const WorkTile& plan, int32_t first)
      : params_(params), plan_(plan), fits_pages_(params.page_size % kTokensPerLoad == 0), first_(first) {
    batch_ = look_up();
    if constexpr (kLooksAhead) next_ = look_up();
  }

  /// The slot of the next granule: where pages hold granules as they are, every lane gets that of the first token, else
  /// lane i that of token i.
  __device__ __forceinline__ TokenSlot next() {
    const int32_t lane = fits_pages_ ? used_ : used_ + threadIdx.x % kTokensPerLoad;
    const TokenSlot slot = {__shfl_sync(~0u, batch_.page, lane), __shfl_sync(~0u, batch_.offset, lane)};
    used_ += fits_pages_ ? 1 : kTokensPerLoad;
    if (used_ == 32) {
      used_ = 0;
      if constexpr (kLooksAhead) batch_ = next_;
      (kLooksAhead ? next_ : batch_) = look_up();
    }
    return slot;
  }
  __device__ __forceinline__ bool fits_pages() const { return fits_pages_; }

 private:
  /// The batch whose first block begins at `first_`.
  __device__ __forceinline__ TokenSlot look_up() {
    const int32_t lane = threadIdx.x % 32;
    const int32_t granule = fits_pages_ ? lane : lane / kTokensPerLoad,
                  in_granule = fits_pages_ ? 0 : lane % kTokensPerLoad;
    const int32_t token = first_ + granule / kGranules * kStep + granule % kGranules * kTokensPerLoad + in_granule;
    // Past the end it stays there: positions do not overflow.
    if (first_ < plan_.keys.end) first_ += (fits_pages_ ? 32 : 32 / kTokensPerLoad) / kGranules * kStep;
    // The table is read below ceil(len_k / page_size) only, and not for pages that have slid out of the window.
    const KeyRange& keys = plan_.keys;
    const bool wanted = token < keys.end && token + (fits_pages_ ? kTokensPerLoad - 1 : 0) >= keys.begin;
    return wanted ? slot_of(params_, plan_, token) : TokenSlot{0, 0};
  }

  const AttentionParams& params_;
  const WorkTile& plan_;
  bool fits_pages_;
  int32_t first_;
  int32_t used_ = 0;  // lanes of the batch
  TokenSlot batch_;
  TokenSlot next_;
};

/// Fetches a granule of K and V of one KV head of one sequence, V's rows kValuesOffset bytes after K's. The lanes of an
/// instruction take K and V of the same token, which are neighbours where both are in one buffer. Keys outside of
/// [begin, end) become zeros, as in `RowLoader`.
template <typename T, int kHeadDim, int kValuesOffset>
class PairLoader {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kRowBytes / 16, kElements = 16 / sizeof(T);
  using Rows = SwizzledRows<kRowBytes>;
  using Grid = LaneGrid<2 * kRowBytes>;
  static constexpr int kSteps = Grid::kStepsPerRow;
  static_assert(kTokensPerLoad % Grid::kRowsPerStep == 0);
  /// The policy is worth up to 1 %, and costs as much where decoding the bytes takes as long as fetching them.
  static constexpr bool kHasPolicy = sizeof(T) > 1;

 public:
  __device__ __forceinline__ PairLoader(const AttentionParams& params, const WorkTile& plan)
      : params_(params), plan_(plan) {
    if constexpr (kHasPolicy) policy_ = ptx::evict_first_policy();
  }

  /// The keys from `first` on, which lie at `slot`.
  __device__ __forceinline__ void load(uint32_t destination, int32_t first, const TokenSlot& slot,
                                       bool fits_pages) const {
    const Grid grid;
    const Interval visible = {plan_.keys.begin, plan_.keys.end - plan_.keys.begin};
    const int32_t page = clamp(slot.page, 0, params_.num_pages - 1);
    // Rows of several instructions a side are taken part by part: what each part needs takes registers.
    constexpr int kAtOnce = kSteps < 2 ? kSteps : 2;
#pragma unroll
    for (int first_step = 0; first_step < kSteps; first_step += kAtOnce) {
      Side sides[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sides[i] = side(grid, first_step + i);
      if (fits_pages) {
        const T* from[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) from[i] = sides[i].token(page, slot.offset + grid.row);
#pragma unroll
        for (int r = 0; r < kTokensPerLoad; r += Grid::kRowsPerStep) {
          const int32_t row = r + grid.row;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (grid.has_chunk(first_step + i)) copy(sides[i], destination, row, from[i], visible.holds(first + row));
            from[i] += Grid::kRowsPerStep * sides[i].token_stride;
          }
        }
      } else {
#pragma unroll 4
        for (int32_t row = grid.row; row < kTokensPerLoad + grid.row; row += Grid::kRowsPerStep) {
          const int32_t page_of_row = __shfl_sync(~0u, page, row), offset = __shfl_sync(~0u, slot.offset, row);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (!grid.has_chunk(first_step + i)) continue;
            copy(sides[i], destination, row, sides[i].token(page_of_row, offset), visible.holds(first + row));
          }
        }
      }
    }
  }

 private:
  /// The lane's chunk of a step: of K or of V.
  struct Side {
    const T* column;  // in token 0 of page 0
    int64_t page_stride;
    int64_t token_stride;
    int32_t chunk;  // of its row
    int32_t left;   // elements from the chunk on
    uint32_t rows;  // of K's or V's rows

    __device__ __forceinline__ const T* token(int32_t page, int32_t offset) const {
      return column + page * page_stride + offset * token_stride;
    }
  };
  __device__ __forceinline__ Side side(const Grid& grid, int step) const {
    const int32_t chunk = grid.chunk + 32 * step;
    // Whole instructions belong to one side where a row is one or several of them.
    const bool is_value = kChunks % 32 == 0 ? 32 * step >= kChunks : chunk >= kChunks;
    const KvSource& source = is_value ? params_.v : params_.k;
    const int32_t of_row = chunk - (is_value ? kChunks : 0);
    const int32_t left = (is_value ? params_.value_dim : params_.head_dim) - of_row * kElements;
    const T* const head = static_cast<const T*>(source.base) + plan_.kv_head * source.head_stride;
    return Side{
        head + (left > 0 ? of_row * kElements : 0),          source.page_stride, source.token_stride, of_row, left,
        is_value ? static_cast<uint32_t>(kValuesOffset) : 0u};
  }

  __device__ __forceinline__ void copy(const Side& side, uint32_t destination, int32_t row, const T* from,
                                       bool visible) const {
    const uint32_t to = destination + side.rows + Rows::offset(row, side.chunk);
    if (sizeof(T) == 1 && params_.has_narrow_rows != 0) {
      ptx::cp_async_8(to, from, visible && side.left > 0);
      ptx::cp_async_8(to + 8, from + (side.left > 8 ? 8 : 0), visible && side.left > 8);
    } else if constexpr (kHasPolicy) {
      ptx::cp_async_16(to, from, visible && side.left > 0, policy_);
    } else {
      ptx::cp_async_16(to, from, visible && side.left > 0);
    }
  }

  const AttentionParams& params_;
  const WorkTile& plan_;
  uint64_t policy_ = 0;
};

}  // namespace xa
