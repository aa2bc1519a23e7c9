// Layouts of rows of K and V in shared memory. In each of them the 16-byte chunks of eight adjacent rows at one column
// are in different banks, so ldmatrix has no bank conflicts.
#pragma once

#include <cstdint>

namespace xa {

/// Padded rows: 16 unused bytes follow each row. Addresses of other rows and chunks are at constant offsets.
template <int kBytes>
struct PaddedRows {
  static constexpr int kPitch = kBytes + 16;

  /// The offset of a 16-byte chunk of a row.
  static __device__ __forceinline__ uint32_t offset(int32_t row, int32_t chunk) { return row * kPitch + chunk * 16; }
  /// The address of a chunk `rows` rows and `chunks` chunks after the one at `address`. `rows` is a multiple of 8, and
  /// `chunks` has no bit in common with the chunk index at `address`.
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return address + rows * kPitch + chunks * 16;
  }
};

/// Swizzled rows: no padding; the index of a chunk is XORed with the row. A 128-byte line of global memory then goes to
/// one 128-byte line of shared memory. With padded rows the lines do not coincide, which costs 8 % of DRAM bandwidth in
/// decode (docs/dev/lab_notebook.md). The first row begins at a multiple of 128 bytes.
template <int kBytes>
struct SwizzledRows {
  static constexpr int kPitch = kBytes;

  static __device__ __forceinline__ uint32_t offset(int32_t row, int32_t chunk) {
    return row * kPitch + (chunk ^ row / kRowsPerLine % kSwizzleChunks) * 16;
  }
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return (address ^ chunks % kSwizzleChunks * 16) + chunks / kSwizzleChunks * kSwizzleBytes + rows * kPitch;
  }
  /// The address of the chunk `rows` rows after the one at `address`, whose row has no bit in common with `rows`, so
  /// that the swizzles of both are XORed.
  static __device__ __forceinline__ uint32_t stepped(uint32_t address, int32_t rows) {
    const uint32_t bytes = rows * kPitch, swizzle = offset(rows, 0) - bytes;
    return (address ^ swizzle) + bytes;
  }

 private:
  /// Chunks are permuted within groups of this many bytes: the largest power of two up to 128 that divides the row.
  static constexpr int kSwizzleBytes = kBytes % 128 == 0 ? 128 : kBytes % 64 == 0 ? 64 : 32;
  static constexpr int kSwizzleChunks = kSwizzleBytes / 16, kRowsPerLine = 128 / kSwizzleBytes;
  static_assert(kBytes % kSwizzleBytes == 0);
};

/// Rows as TMA writes boxes of 8-row groups (hopper/swizzle_atom.cuh): [group][swizzle atom][row], with the 16-byte
/// chunks of a 128-byte row swizzled. The first group begins at a multiple of 1024 bytes.
template <int kBytes>
struct SwizzleAtomRows {
  static constexpr int kPitch = kBytes;
  static_assert(kBytes % 128 == 0);

  static __device__ __forceinline__ uint32_t offset(int32_t row, int32_t chunk) {
    return row / 8 * 8 * kPitch + chunk / 8 * 1024 + row % 8 * 128 + (chunk % 8 ^ row % 8) * 16;
  }
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return (address ^ chunks % 8 * 16) + chunks / 8 * 1024 + rows * kPitch;
  }
};

}  // namespace xa
