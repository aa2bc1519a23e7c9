// Which keys the columns of scores or of dS in dQ are, or the rows of scores in dK and dV. Any order will do in which K
// and V are in shared memory too.
#pragma once

#include <cstdint>

namespace xa {

/// Columns are keys in order: lane t of each four has columns 2t and 2t + 1 of each block of 8.
struct KeysInOrder {
  /// The key of a row of K and V in shared memory.
  static __device__ __forceinline__ int32_t of_row(int32_t row) { return row; }
  /// The key of the first column of lane t, and from there to its column `i`, 0 or 1, of a block.
  static __device__ __forceinline__ int32_t of_lane(int32_t t) { return 2 * t; }
  static __device__ __forceinline__ int32_t offset(int block, int i) { return 8 * block + i; }
};

/// The columns that a lane has in four blocks are adjacent keys, 16 bytes of a row of the bias:
///
///     lane           0      1      2      3
///     block 0     0, 1   8, 9 16, 17 24, 25
///     block 1     2, 3 10, 11 18, 19 26, 27
///     block 2     4, 5 12, 13 20, 21 28, 29
///     block 3     6, 7 14, 15 22, 23 30, 31
struct KeysOfLanes {
  static __device__ __forceinline__ int32_t of_row(int32_t row) {
    return (row & ~30) | (row & 6) << 2 | (row & 24) >> 2;
  }
  static __device__ __forceinline__ int32_t of_lane(int32_t t) { return 8 * t; }
  static __device__ __forceinline__ int32_t offset(int block, int i) { return block / 4 * 32 + block % 4 * 2 + i; }
};

/// The rows g, g + 8, g + 16 and g + 24 that lanes of group g have of scores in dK and dV are keys 4g to 4g + 3.
struct KeysOfRows {
  static __device__ __forceinline__ int32_t of_row(int32_t row) {
    return (row & ~31) | (row & 7) << 2 | (row & 24) >> 3;
  }
};

}  // namespace xa
