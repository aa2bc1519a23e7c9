// TMA boxes that are clipped at the end of a sequence.
#pragma once

#include <cstdint>

namespace xa::hopper {

/// Coordinates of a sequence's rows in a tensor map [2^31, rows, 2^30 rows, head, column]. The rows axis ends at 2^30,
/// so a box that starts at 2^30 - count + row is clipped at the end of the sequence. The fourth axis advances by rows
/// to `end`; the fifth axis subtracts the 2^30 rows again, modulo 2^64 bytes.
struct RaggedRows {
  static constexpr int32_t kEnd = 1 << 30;
  int32_t base;  // on the third axis, of row 0
  int32_t end;   // on the fourth

  __device__ __forceinline__ RaggedRows(int32_t first, int32_t count) : base(kEnd - count), end(first + count) {}
};

}  // namespace xa::hopper
