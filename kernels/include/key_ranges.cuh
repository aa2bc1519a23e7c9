// Bounds of the keys that each query row attends to, besides the masks: `k_start` and `k_end`, which are device data
// and any numbers. A row still attends to one range of keys, but the ranges of neighbouring rows may be anywhere, with
// keys between that no row attends to. Kernels without bounds know nothing of this file.
#pragma once

#include <climits>
#include <cstdint>

#include "params/key_ranges.cuh"
#include "work_tile.cuh"

namespace xa {

/// The keys [begin, end) that a row attends to, counted from its sequence's key 0; 0 and 0 if there is none.
struct RowRange {
  int32_t begin;
  int32_t end;

  /// Bit i is set if the row attends to key `first` + i.
  __device__ __forceinline__ uint64_t among_64(int32_t first) const {
    const int32_t low = max(begin - first, 0), high = min(end - first, 64);
    return low < high ? ~uint64_t{0} >> (64 - (high - low)) << low : 0;
  }
};

/// The smallest range with the keys of both; {INT_MAX, 0} is none.
__device__ __forceinline__ RowRange united(const RowRange& a, const RowRange& b) {
  return {min(a.begin, b.begin), max(a.end, b.end)};
}

/// The keys of query `query` of the sequence in `tile`.
__device__ __forceinline__ RowRange row_range(const KeyRangeSource& ranges, const Visibility& visibility,
                                              const QoTile& tile, int32_t query) {
  const int64_t token = static_cast<int64_t>(tile.first_token) + query;
  RowRange range = {visibility.begin(query), visibility.end(query)};
  if (ranges.start != nullptr) range.begin = max(range.begin, __ldg(ranges.start + token));
  if (ranges.end != nullptr) range.end = min(range.end, __ldg(ranges.end + token));
  return range.begin < range.end ? range : RowRange{0, 0};
}

__device__ __forceinline__ int32_t warp_min(int32_t x) { return ~__reduce_max_sync(~0u, ~x); }
__device__ __forceinline__ int32_t warp_max(int32_t x) { return __reduce_max_sync(~0u, x); }

/// The ranges of the rows of a tile, in shared memory. Every warp computes with all of them, so that warps agree
/// without a barrier.
template <int kRows>
class RowRanges {
 public:
  explicit __device__ __forceinline__ RowRanges(const RowRange* rows) : rows_(rows) {}

  __device__ __forceinline__ RowRange operator[](int32_t row) const { return rows_[row]; }

  /// The keys from the first to the last that a row attends to, and those that all of the rows [first, last) attend to.
  __device__ __forceinline__ KeyRange key_range(int32_t first_row, int32_t end_row) const {
    KeyRange keys = {INT_MAX, 0, 0, INT_MAX};
    for_rows([&](int32_t row, const RowRange& range) {
      if (range.begin < range.end) keys.begin = min(keys.begin, range.begin);
      keys.end = max(keys.end, range.end);
      if (row < first_row || row >= end_row) return;
      keys.common_begin = max(keys.common_begin, range.begin);
      keys.common_end = min(keys.common_end, range.end);
    });
    keys = {warp_min(keys.begin), warp_max(keys.end), warp_max(keys.common_begin), warp_min(keys.common_end)};
    return keys.begin < keys.end ? keys : KeyRange{0, 0, 0, 0};
  }
  /// The first key from `from` on that a row attends to, rounded down to a multiple of kBlock; `end` if there is none.
  template <int kBlock>
  __device__ __forceinline__ int32_t next_block(int32_t from, int32_t end) const {
    int32_t next = INT_MAX;
    for_rows([&](int32_t, const RowRange& range) {
      if (range.end > from) next = min(next, max(range.begin, from));
    });
    next = warp_min(next);
    return next < end ? next / kBlock * kBlock : end;
  }
  /// Bit i is set if a row attends to key `first` + i.
  __device__ __forceinline__ uint64_t attended_64(int32_t first) const {
    uint64_t keys = 0;
    for_rows([&](int32_t, const RowRange& range) { keys |= range.among_64(first); });
    const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(keys));
    return static_cast<uint64_t>(__reduce_or_sync(~0u, static_cast<uint32_t>(keys >> 32))) << 32 | low;
  }

 private:
  /// Calls `work(row, range)` for this lane's rows.
  template <typename Work>
  __device__ __forceinline__ void for_rows(const Work& work) const {
#pragma unroll
    for (int32_t first = 0; first < kRows; first += 32) {
      const int32_t row = first + static_cast<int32_t>(threadIdx.x % 32);
      if (kRows % 32 != 0 && row >= kRows) continue;
      work(row, rows_[row]);
    }
  }

  const RowRange* rows_;
};

}  // namespace xa
