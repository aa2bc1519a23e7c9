// The layout of Q, K, V and O tiles in shared memory, as TMA writes them and wgmma reads them.
//
// A tile [rows][columns] consists of swizzle atoms: 8 rows of 128 bytes (64 bytes for head dimensions that are
// multiples of 32 only), whose 16-byte chunks are swizzled. The atoms below each other, which hold the same columns,
// are an *atom column*. Atoms are at constant distances in both directions, which are wgmma's byte offsets:
//
//                 kLeadingByteOffset
//               |------------------->
//               +-------------------+-------------------+ -
//   rows 0..7   | atom              | atom              | | kStrideByteOffset
//               +-------------------+-------------------+ v
//   rows 8..15  | atom              | atom              |
//               +-------------------+-------------------+
//                 columns 0..63       columns 64..127
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace xa::hopper {

/// 8 rows of kColumns 16-bit elements: CU_TENSOR_MAP_SWIZZLE_128B for 64 columns, _64B for 32. The hardware derives the
/// swizzle from address bits, so tiles start at multiples of kBytes.
template <int kColumns_>
struct SwizzleAtom {
  static constexpr int kColumns = kColumns_;
  static_assert(kColumns == 64 || kColumns == 32);
  static constexpr int kRowBytes = 2 * kColumns;
  static constexpr int kBytes = 8 * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;

  /// Byte offset of the 16-byte chunk `chunk` of row `row` of an atom column.
  static __device__ __forceinline__ int32_t offset(int32_t row, int32_t chunk) {
    return row * kRowBytes + (chunk ^ row / (8 / kChunks) % kChunks) * 16;
  }
  /// The swizzle mode in a matrix descriptor.
  static constexpr uint64_t kSwizzle = kColumns == 64 ? 1 : 2;
};

/// Clears chunks [first_chunk, first_chunk + kChunks) of rows [first, end) of a tile of kRows rows, or of as many of
/// these rows as it has. Run by one warp.
template <typename Atom, typename Block, int kRows, int kChunks>
__device__ __forceinline__ void clear_tile_rows(uint32_t tile, int32_t first_chunk, int32_t first, int32_t end) {
  const int32_t items = min(end, kRows) * kChunks;
#pragma unroll 1
  for (int32_t item = max(first, 0) * kChunks + threadIdx.x % 32; item < items; item += 32) {
    const int32_t row = item / kChunks, chunk = first_chunk + item % kChunks;
    xa::ptx::clear_shared_16(tile + row / 8 * Block::kStrideByteOffset +
                             chunk / Atom::kChunks * Block::kLeadingByteOffset +
                             Atom::offset(row % 8, chunk % Atom::kChunks));
  }
}

/// Clears all chunks of rows [first, end) of a tile of kRows rows, or of as many of these rows as it has. Run by one
/// warp. The swizzle permutes the chunks of a row, so it does not matter here.
template <typename Atom, typename Block, int kRows>
__device__ __forceinline__ void clear_whole_tile_rows(uint32_t tile, int32_t first, int32_t end) {
  const int32_t lane = threadIdx.x % 32, end_row = min(end, kRows);
  const uint32_t to = tile + lane % Atom::kChunks * 16;
#pragma unroll 2
  for (int32_t row = max(first, 0) + lane / Atom::kChunks; row < end_row; row += 32 / Atom::kChunks) {
    const uint32_t row_to = to + row / 8 * Block::kStrideByteOffset + row % 8 * Atom::kRowBytes;
#pragma unroll
    for (int column = 0; column < Block::kAtomColumns; ++column) {
      xa::ptx::clear_shared_16(row_to + column * Block::kLeadingByteOffset);
    }
  }
}

/// wgmma's matrix descriptor of a tile at `address` in shared memory. Offsets are in bytes.
template <typename Atom>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading_byte_offset,
                                                      uint32_t stride_byte_offset) {
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(leading_byte_offset >> 4) << 16 |
         static_cast<uint64_t>(stride_byte_offset >> 4) << 32 | Atom::kSwizzle << 62;
}

}  // namespace xa::hopper
