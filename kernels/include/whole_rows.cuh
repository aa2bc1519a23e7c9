// Loads of decode from 8-bit K and V: PairLoader with few instructions for the usual load.
//
// A load of 16 tokens is usual if the tokens lie in one page, all of them are visible, and rows fill the warp's columns
// and are aligned to 16 bytes. A step is then one addition to the address in the cache, and in shared memory a constant
// that is XORed and one that is added: about 4 instructions per 16 bytes. Other loads are those of PairLoader, which
// takes 27, more than the conversion of the rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fp8.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "row_pairs.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// `Stored` is an 8-bit type.
template <typename Stored, int kColumns, int kValuesOffset>
class WholeRowLoader {
  static constexpr int kChunks = kColumns / 16, kRowsPerStep = power_of_two_up_to(16 / kChunks);
  using Rows = SwizzledRows<kColumns>;
  using Others = PairLoader<Stored, kColumns, kValuesOffset>;
  static_assert(kChunks <= 16, "a step is kRowsPerStep whole rows of K and V");

 public:
  __device__ __forceinline__ WholeRowLoader(const AttentionParams& params, const WorkTile& work, int32_t first_column)
      : params_(params), work_(work), first_column_(first_column), others_(params, work, first_column) {}

  /// As PairLoader::load.
  __device__ __forceinline__ void load(uint32_t destination, int32_t first, const TokenSlot& slot,
                                       bool fits_pages) const {
    const int32_t end_column = first_column_ + kColumns;
    const bool is_whole =
        end_column <= params_.head_dim && end_column <= params_.value_dim && params_.has_narrow_rows == 0;
    const bool is_visible = first >= work_.keys.begin && first + kTokensPerLoad <= work_.keys.end;
    if (!(is_whole && fits_pages && is_visible)) return others_.load(destination, first, slot, fits_pages);
    const uint32_t lane = ptx::opaque(threadIdx.x) % 32, row = lane / (2 * kChunks), chunk = lane % kChunks;
    // With 6 or 12 chunks per row the last lanes have none.
    if (row >= kRowsPerStep) return;
    const bool is_value = lane / kChunks % 2 != 0;
    const KvSource& source = is_value ? params_.v : params_.k;
    // Rows with scales are in one buffer, where K and V have the same strides.
    const KvSource& strides = kHasTokenScales<Stored> ? params_.k : source;
    const int32_t page = clamp(slot.page, 0, params_.num_pages - 1);
    const uint8_t* from = static_cast<const uint8_t*>(source.base) + page * strides.page_stride +
                          (slot.offset + static_cast<int32_t>(row)) * strides.token_stride +
                          work_.kv_head * strides.head_stride + first_column_ + 16 * chunk;
    // Opaque: in registers throughout the loop over keys the stride spills.
    const int64_t stride = kRowsPerStep * (strides.token_stride + ptx::opaque(0));
    const uint32_t to = destination + Rows::offset(row, chunk) + (is_value ? kValuesOffset : 0);
#pragma unroll
    for (int step = 0; step < kTokensPerLoad; step += kRowsPerStep) {
      // The row of a lane's first step has other bits than `step`, so the swizzles of both are XORed.
      const uint32_t rows = step * Rows::kPitch, swizzle = Rows::offset(step, 0) - rows;
      ptx::cp_async_16((to ^ swizzle) + rows, from, true);
      from += stride;
    }
  }

 private:
  const AttentionParams& params_;
  const WorkTile& work_;
  int32_t first_column_;  // of K and V
  Others others_;
};

/// The loader of K and V of type `Stored`.
template <typename Stored, int kColumns, int kValuesOffset>
using DecodeLoader = std::conditional_t<sizeof(Stored) == 1, WholeRowLoader<Stored, kColumns, kValuesOffset>,
                                        PairLoader<Stored, kColumns, kValuesOffset>>;

}  // namespace xa
