// Boxes of the rows of one sequence.
#pragma once

#include <cstdint>

namespace xa::hopper {

/// Where a box of a sequence's rows lies: a tensor map whose third axis ends at 2^30 clips a box that begins at
/// 2^30 - rows + row at the sequence's end. The fourth axis goes on from there, and the fifth goes back by what the
/// third has gone too far, modulo 2^64.
struct RaggedRows {
  static constexpr int32_t kEnd = 1 << 30;
  int32_t base;  // on the third axis, of row 0
  int32_t end;   // on the fourth

  __device__ __forceinline__ RaggedRows(int32_t first, int32_t count) : base(kEnd - count), end(first + count) {}
};

}  // namespace xa::hopper
