// Loads of decode from a cache with token scales: PairLoader with few instructions for the usual load.
//
// A load of 16 tokens is usual if the tokens lie in one page, all of them are visible, and rows are as long as the
// variant's and aligned to 16 bytes. K and V are then in one buffer with the same strides, so a step is one addition to
// the address in the cache, and in shared memory a constant that is XORed and one that is added. Other loads are those
// of PairLoader, which takes four times as many instructions, more than the conversion of the rows.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "row_pairs.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// `Stored` is an 8-bit type.
template <typename Stored, int kHeadDim, int kValuesOffset>
class ScaledPairLoader {
  static constexpr int kChunks = kHeadDim / 16, kRowsPerStep = 16 / kChunks;
  using Rows = SwizzledRows<kHeadDim>;
  using Others = PairLoader<Fp8<false>, kHeadDim, kValuesOffset>;
  static_assert(kChunks == 4 || kChunks == 8 || kChunks == 16, "a step is kRowsPerStep whole rows of K and V");

 public:
  __device__ __forceinline__ ScaledPairLoader(const AttentionParams& params, const WorkTile& work, int32_t first_column)
      : params_(params), work_(work), others_(params, work, first_column) {}

  /// As PairLoader::load.
  __device__ __forceinline__ void load(uint32_t destination, int32_t first, const TokenSlot& slot,
                                       bool fits_pages) const {
    const bool is_whole = params_.head_dim == kHeadDim && params_.has_narrow_rows == 0;
    const bool is_visible = first >= work_.keys.begin && first + kTokensPerLoad <= work_.keys.end;
    if (!(is_whole && fits_pages && is_visible)) return others_.load(destination, first, slot, fits_pages);
    const uint32_t lane = ptx::opaque(threadIdx.x) % 32, row = lane / (2 * kChunks), chunk = lane % kChunks;
    const bool is_value = lane / kChunks % 2 != 0;
    const KvSource& k = params_.k;
    const int32_t page = clamp(slot.page, 0, params_.num_pages - 1);
    const uint8_t* from = static_cast<const uint8_t*>(is_value ? params_.v.base : k.base) + page * k.page_stride +
                          (slot.offset + static_cast<int32_t>(row)) * k.token_stride + work_.kv_head * k.head_stride +
                          16 * chunk;
    // Opaque: in registers throughout the loop over keys the stride spills.
    const int64_t stride = kRowsPerStep * (k.token_stride + ptx::opaque(0));
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
  Others others_;
};

template <int kHeadDim, int kValuesOffset>
class PairLoader<ScaledI8, kHeadDim, kValuesOffset> : public ScaledPairLoader<ScaledI8, kHeadDim, kValuesOffset> {
  using ScaledPairLoader<ScaledI8, kHeadDim, kValuesOffset>::ScaledPairLoader;
};
template <bool kShifts, int kHeadDim, int kValuesOffset>
class PairLoader<ScaledE4m3<kShifts>, kHeadDim, kValuesOffset>
    : public ScaledPairLoader<ScaledE4m3<kShifts>, kHeadDim, kValuesOffset> {
  using ScaledPairLoader<ScaledE4m3<kShifts>, kHeadDim, kValuesOffset>::ScaledPairLoader;
};

}  // namespace xa
