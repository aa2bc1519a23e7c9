// Loads of decode: K and V of a token by the same instructions, and page table entries read ahead.
//
// A load is kTokensPerLoad consecutive tokens that begin at a multiple of it. If kTokensPerLoad divides the page size,
// all tokens of a load lie in one page and one page table entry serves them.
#pragma once

#include <cstdint>

#include "column_warps.cuh"
#include "paged_rows.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// Yields the slots of a warp's loads in order: blocks of kKeys keys that start every kStep keys. Each lane looks up
/// one token, and the batch of 32 serves 32 loads, or 32 / kTokensPerLoad if loads may straddle pages. `kPrefetches`
/// reads the next batch while this one is used, because a look-up takes as long as a block when memory is busy; it
/// takes registers; `kIsOpaque` saves some.
template <int kKeys, int kStep, bool kPrefetches, bool kIsOpaque = false>
class PageTableReader {
  static constexpr int kLoadsPerBlock = kKeys / kTokensPerLoad;
  static_assert(kKeys % kTokensPerLoad == 0);

 public:
  __device__ __forceinline__ PageTableReader(const AttentionParams& params, const WorkTile& work, int32_t first)
      : params_(params), work_(work), fits_pages_(params.page_size % kTokensPerLoad == 0), first_(first) {
    batch_ = look_up();
    if constexpr (kPrefetches) next_ = look_up();
  }

  /// The slot of the next load: if its tokens lie in one page, every lane gets the slot of the first token; otherwise
  /// lane i gets that of token i % kTokensPerLoad.
  __device__ __forceinline__ TokenSlot next() {
    const int32_t lane = fits_pages_ ? used_ : used_ + opaque_if<kIsOpaque>(threadIdx.x) % kTokensPerLoad;
    const TokenSlot slot = {__shfl_sync(~0u, batch_.page, lane), __shfl_sync(~0u, batch_.offset, lane)};
    used_ += fits_pages_ ? 1 : kTokensPerLoad;
    if (used_ == 32) {
      used_ = 0;
      if constexpr (kPrefetches) batch_ = next_;
      (kPrefetches ? next_ : batch_) = look_up();
    }
    return slot;
  }
  __device__ __forceinline__ bool fits_pages() const { return fits_pages_; }

 private:
  /// Reads the batch whose first block begins at `first_`, and advances `first_`.
  __device__ __forceinline__ TokenSlot look_up() {
    const int32_t lane = opaque_if<kIsOpaque>(threadIdx.x) % 32;
    const bool fits_pages = opaque_if<kIsOpaque>(fits_pages_);
    const int32_t load = fits_pages ? lane : lane / kTokensPerLoad, in_load = fits_pages ? 0 : lane % kTokensPerLoad;
    const int32_t token = first_ + load / kLoadsPerBlock * kStep + load % kLoadsPerBlock * kTokensPerLoad + in_load;
    // No advance past the end, so that positions cannot overflow.
    if (first_ < work_.keys.end) first_ += (fits_pages ? 32 : 32 / kTokensPerLoad) / kLoadsPerBlock * kStep;
    // Entries of the table from ceil(len_k / page_size) on, and those of pages before the window, may be invalid.
    const KeyRange& keys = work_.keys;
    const bool readable = token < keys.end && token + (fits_pages ? kTokensPerLoad - 1 : 0) >= keys.begin;
    return readable ? slot_of(params_, work_.tile, token) : TokenSlot{0, 0};
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  bool fits_pages_;
  int32_t first_;
  int32_t used_ = 0;  // lanes of `batch_` that have served
  TokenSlot batch_;
  TokenSlot next_;
};

/// The same of contiguous keys, where there is nothing to look up.
template <int kKeys, int kStep>
class ContiguousSlots {
  static_assert(kKeys == kTokensPerLoad);

 public:
  __device__ __forceinline__ ContiguousSlots(const AttentionParams&, const WorkTile& work, int32_t first)
      : offset_(work.tile.start_k + first) {}

  /// Past the end of the keys offsets may be any.
  __device__ __forceinline__ TokenSlot next() {
    const TokenSlot slot = {0, static_cast<int32_t>(offset_)};
    offset_ += kStep;
    return slot;
  }
  static __device__ __forceinline__ constexpr bool fits_pages() { return true; }

 private:
  uint32_t offset_;
};

/// Copies kHeadDim columns of the K and V rows of one load, V's rows kValuesOffset bytes after K's. The lanes of one
/// instruction copy K and V of the same token, which are adjacent in memory if both are in one buffer. Keys outside of
/// the work tile's [begin, end) become zeros, as in `RowLoader`.
template <typename T, int kHeadDim, int kValuesOffset>
class PairLoader {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kRowBytes / 16, kElements = 16 / sizeof(T);
  using Rows = SwizzledRows<kRowBytes>;
  using Grid = LaneGrid<2 * kRowBytes>;
  static constexpr int kSteps = Grid::kStepsPerRow;
  static_assert(kTokensPerLoad % Grid::kRowsPerStep == 0);
  /// evict_first gains up to 1 %; for fp8, where conversion takes as long as the loads, it costs as much.
  static constexpr bool kEvictsFirst = sizeof(T) > 1;

 public:
  __device__ __forceinline__ PairLoader(const AttentionParams& params, const WorkTile& work, int32_t first_column)
      : params_(params), work_(work), first_column_(first_column) {
    if constexpr (kEvictsFirst) policy_ = ptx::evict_first_policy();
  }

  /// Starts the copies of the load that begins at key `first`, whose tokens lie at `slot`.
  __device__ __forceinline__ void load(uint32_t destination, int32_t first, const TokenSlot& slot,
                                       bool fits_pages) const {
    const Grid grid;
    const Interval visible = {work_.keys.begin, work_.keys.end - work_.keys.begin};
    const int32_t page = clamp(slot.page, 0, params_.num_pages - 1);
    // Rows that take several steps are copied two steps at a time, to limit the registers for addresses.
    constexpr int kAtOnce = kSteps < 2 ? kSteps : 2;
#pragma unroll
    for (int first_step = 0; first_step < kSteps; first_step += kAtOnce) {
      Side sides[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sides[i] = side(grid, first_step + i, destination);
      const auto copy_row = [&](int i, int r, const T* from) {
        if (grid.has_chunk(first_step + i)) copy(sides[i], r, from, visible.holds(first + grid.row + r));
      };
      if (fits_pages) {
        const T* from[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          from[i] =
              sides[i].column + int64_t{page} * sides[i].page_stride + (slot.offset + grid.row) * sides[i].token_stride;
        }
        // Of 8 bits only few loads come here (whole_rows.cuh).
#pragma unroll(sizeof(T) == 1 ? 1 : kTokensPerLoad)
        for (int r = 0; r < kTokensPerLoad; r += Grid::kRowsPerStep) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            copy_row(i, r, from[i]);
            from[i] += Grid::kRowsPerStep * sides[i].token_stride;
          }
        }
      } else {
        // Products of 64 bits take many instructions, so each lane computes where one token's row begins: the first
        // kTokensPerLoad lanes in K, the others in V. The lanes that copy a row get it from there. Which of both a lane
        // has is found again for 8 bits, where a register for it would be spilled.
        const KvSource& own = opaque_if<sizeof(T) == 1>(threadIdx.x) % 32 < kTokensPerLoad ? params_.k : params_.v;
        const int64_t start = int64_t{page} * own.page_stride + slot.offset * own.token_stride;
#pragma unroll(sizeof(T) == 2 ? kTokensPerLoad : 4)
        for (int r = 0; r < kTokensPerLoad; r += Grid::kRowsPerStep) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int32_t lane = r + grid.row + (sides[i].is_value ? kTokensPerLoad : 0);
            copy_row(i, r, sides[i].column + __shfl_sync(~0u, start, lane));
          }
        }
      }
    }
  }

 private:
  /// The lane's chunk of a step, which is one of K or of V.
  struct Side {
    bool is_value;
    const T* column;  // the chunk in token 0 of page 0
    int64_t page_stride;
    int64_t token_stride;
    int32_t left;  // elements of the row from the chunk on
    uint32_t to;   // shared address of the chunk in the lane's first row
  };
  __device__ __forceinline__ Side side(const Grid& grid, int step, uint32_t destination) const {
    const int32_t chunk = grid.chunk + 32 * step;
    // With 32 chunks per row or a multiple, a whole step belongs to K or to V.
    const bool is_value = kChunks % 32 == 0 ? 32 * step >= kChunks : chunk >= kChunks;
    const KvSource& source = is_value ? params_.v : params_.k;
    const int32_t row_chunk = chunk - (is_value ? kChunks : 0);
    const int32_t left = (is_value ? params_.value_dim : params_.head_dim) - first_column_ - row_chunk * kElements;
    const T* const head = static_cast<const T*>(source.base) + work_.kv_head * source.head_stride;
    return Side{is_value,
                head + (left > 0 ? first_column_ + row_chunk * kElements : 0),
                source.page_stride,
                source.token_stride,
                left,
                destination + (is_value ? kValuesOffset : 0) + Rows::offset(grid.row, row_chunk)};
  }

  /// Copies the lane's chunk of the row `r` rows after its first one, a multiple of Grid::kRowsPerStep.
  __device__ __forceinline__ void copy(const Side& side, int r, const T* from, bool visible) const {
    const uint32_t to = Rows::stepped(side.to, r);
    if (sizeof(T) == 1 && params_.has_narrow_rows != 0) {
      ptx::cp_async_8(to, from, visible && side.left > 0);
      ptx::cp_async_8(to + 8, from + (side.left > 8 ? 8 : 0), visible && side.left > 8);
    } else if constexpr (kEvictsFirst) {
      ptx::cp_async_16(to, from, visible && side.left > 0, policy_);
    } else {
      ptx::cp_async_16(to, from, visible && side.left > 0);
    }
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  int32_t first_column_;  // of K and V
  uint64_t policy_ = 0;
};

}  // namespace xa
