// Loads of decode from 8-bit K and V: PairLoader with few instructions for the usual block.
//
// A block is usual if each of its loads lies in one page, all of its keys are visible, rows fill the warp's columns and
// are aligned to 16 bytes, and K and V have the same strides. A step is then one addition to the address in the cache,
// and in shared memory a constant that is XORed and one that is added: about 3 instructions per 16 bytes. Other blocks
// are loaded by PairLoader, which takes several times as many.
#pragma once

#include <cstdint>
#include <type_traits>

#include "column_warps.cuh"
#include "fp8.cuh"
#include "params/attention.cuh"
#include "ptx.cuh"
#include "row_pairs.cuh"
#include "shared_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// The low half of a stride, by which 32-bit numbers are multiplied.
__device__ __forceinline__ uint32_t low_half(int64_t stride) { return static_cast<uint32_t>(stride); }
__device__ __forceinline__ bool fits_low_half(int64_t stride) { return static_cast<uint64_t>(stride) >> 32 == 0; }

/// `Stored` is an 8-bit type. With `kHoldsAddresses` a lane keeps its addresses in registers; otherwise it computes
/// them for each load.
template <typename Stored, int kColumns, int kValuesOffset, bool kHoldsAddresses>
class WholeRowLoader {
  static constexpr int kChunks = kColumns / 16, kRowsPerStep = power_of_two_up_to(16 / kChunks);
  using Rows = SwizzledRows<kColumns>;
  using Others = PairLoader<Stored, kColumns, kValuesOffset>;
  static_assert(kChunks <= 16, "a step is kRowsPerStep whole rows of K and V");

 public:
  __device__ __forceinline__ WholeRowLoader(const AttentionParams& params, const WorkTile& work, int32_t first_column)
      : params_(params), work_(work), first_column_(first_column), others_(params, work, first_column) {
    if constexpr (kHoldsAddresses) {
      has_usual_rows_ = has_usual_rows();
      held_ = lane_addresses(threadIdx.x % 32);
    }
  }

  /// Whether the `kKeys` keys from `first` on are a usual block; `fits_pages` says whether loads lie in one page each.
  template <int kKeys>
  __device__ __forceinline__ bool is_usual(int32_t first, bool fits_pages) const {
    const bool usual_rows = kHoldsAddresses ? has_usual_rows_ : has_usual_rows();
    return usual_rows && fits_pages && first >= work_.keys.begin && first + kKeys <= work_.keys.end;
  }

  /// Starts the copies of a load of a usual block, whose tokens lie at `slot`.
  __device__ __forceinline__ void load_usual(uint32_t destination, const TokenSlot& slot) const {
    const Addresses lane = kHoldsAddresses ? held_ : lane_addresses(ptx::opaque(threadIdx.x) % 32);
    // With 6 or 12 chunks per row the last lanes have none.
    if (!has_chunk(lane)) return;
    const uint32_t page = clamp(slot.page, 0, params_.num_pages - 1), offset = slot.offset;
    const uint8_t* from = lane.from + static_cast<uint64_t>(page) * low_half(params_.k.page_stride) +
                          static_cast<uint64_t>(offset) * low_half(params_.k.token_stride);
    // Opaque: in registers throughout the loop over keys the step spills.
    const uint64_t step_bytes =
        static_cast<uint64_t>(kRowsPerStep) * opaque_if<!kHoldsAddresses>(low_half(params_.k.token_stride));
#pragma unroll
    for (int step = 0; step < kTokensPerLoad; step += kRowsPerStep) {
      ptx::cp_async_16(Rows::stepped(lane.to + destination, step), from, true);
      from += step_bytes;
    }
  }
  /// As PairLoader::load.
  __device__ __forceinline__ void load_other(uint32_t destination, int32_t first, const TokenSlot& slot,
                                             bool fits_pages) const {
    others_.load(destination, first, slot, fits_pages);
  }

 private:
  /// What is_usual says of rows, whichever their keys are.
  __device__ __forceinline__ bool has_usual_rows() const {
    const int32_t end_column = first_column_ + kColumns;
    const KvSource &k = params_.k, &v = params_.v;
    const bool is_whole =
        end_column <= params_.head_dim && end_column <= params_.value_dim && params_.has_narrow_rows == 0;
    // Rows with scales are in one buffer, where K and V have the same strides.
    const bool has_equal_strides =
        kHasTokenScales<Stored> || (k.page_stride == v.page_stride && k.token_stride == v.token_stride);
    return is_whole && has_equal_strides && fits_low_half(k.page_stride) && fits_low_half(k.token_stride);
  }

  /// Of the lane's chunk in the first step of a load.
  struct Addresses {
    const uint8_t* from;  // of page 0, token 0
    uint32_t to;          // bytes from the beginning of the load in shared memory
  };
  __device__ __forceinline__ Addresses lane_addresses(uint32_t lane) const {
    const uint32_t row = lane / (2 * kChunks), chunk = lane % kChunks;
    const bool is_value = lane / kChunks % 2 != 0;
    const KvSource& source = is_value ? params_.v : params_.k;
    const int64_t head_stride = kHasTokenScales<Stored> ? params_.k.head_stride : source.head_stride;
    return {static_cast<const uint8_t*>(source.base) + static_cast<uint64_t>(row) * low_half(params_.k.token_stride) +
                work_.kv_head * head_stride + first_column_ + 16 * chunk,
            Rows::offset(row, chunk) + (is_value ? kValuesOffset : 0)};
  }
  static __device__ __forceinline__ bool has_chunk(const Addresses& lane) {
    return 32 % (2 * kChunks) == 0 || lane.to % kValuesOffset < kRowsPerStep * kColumns;
  }

  const AttentionParams& params_;
  const WorkTile& work_;
  int32_t first_column_;  // of K and V
  bool has_usual_rows_;   // kHoldsAddresses: has_usual_rows()
  Others others_;
  Addresses held_;
};

/// The loader of K and V of type `Stored`.
template <typename Stored, int kColumns, int kValuesOffset, bool kHoldsAddresses>
using DecodeLoader =
    std::conditional_t<sizeof(Stored) == 1, WholeRowLoader<Stored, kColumns, kValuesOffset, kHoldsAddresses>,
                       PairLoader<Stored, kColumns, kValuesOffset>>;

}  // namespace xa
