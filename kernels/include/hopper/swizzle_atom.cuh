// Tiles in shared memory, as the copy engine writes them and the tensor cores read them.
//
// They are of 16-bit elements in panels of 64 or 32 columns, [rows][columns], whose 16-byte chunks are swizzled. Eight
// rows are a *group*; groups of a panel and panels of a tile are at constant distances.
#pragma once

#include <cstdint>

namespace xa::hopper {

/// How panels are swizzled, which the address of a tile decides: panels begin at multiples of kBytes.
template <int kColumns_>
struct SwizzleAtom {
  static constexpr int kColumns = kColumns_;
  static_assert(kColumns == 64 || kColumns == 32);
  static constexpr int kRowBytes = 2 * kColumns;
  static constexpr int kBytes = 8 * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;

  /// Where chunk `chunk` of row `row` is.
  static __device__ __forceinline__ int32_t offset(int32_t row, int32_t chunk) {
    return row * kRowBytes + (chunk ^ row / (8 / kChunks) % kChunks) * 16;
  }
  /// The same as the instruction wants it.
  static constexpr uint64_t kSwizzle = kColumns == 64 ? 1 : 2;
};

/// Where a tile of such panels lies, as the instruction wants it: address, distance of panels, distance of groups, all
/// in 16 bytes, and the kind of swizzle.
template <typename Panel>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t panel_distance,
                                                      uint32_t group_distance) {
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(panel_distance >> 4) << 16 |
         static_cast<uint64_t>(group_distance >> 4) << 32 | Panel::kSwizzle << 62;
}

}  // namespace xa::hopper
