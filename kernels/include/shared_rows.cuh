// How rows of K and V lie in shared memory, so that eight neighbouring rows at one column lie in different banks.
#pragma once

#include <cstdint>

namespace xa {

/// Rows with 16 spare bytes each: an offset is a constant beside the first row's.
template <int kBytes>
struct PaddedRows {
  static constexpr int kPitch = kBytes + 16;

  /// Of a chunk of 16 bytes.
  static __device__ __forceinline__ uint32_t offset(int32_t row, int32_t chunk) { return row * kPitch + chunk * 16; }
  /// `address`, which is in `row` and `chunk`, moved by `rows`, a multiple of 8, and by `chunks`, which has no bit in
  /// common with `chunk`.
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return address + rows * kPitch + chunks * 16;
  }
};

/// Rows without spare bytes, their chunks in an order that turns with the row. What comes out of one line of 128 bytes
/// of global memory then goes to one line of shared memory; copies whose lines do not coincide, as padded rows have
/// them, take 8 % of the bandwidth of DRAM (docs/performance.md). The first row begins at a multiple of 128 bytes.
template <int kBytes>
struct SwizzledRows {
  static constexpr int kPitch = kBytes;

  static __device__ __forceinline__ uint32_t offset(int32_t row, int32_t chunk) {
    return row * kPitch + (chunk ^ row / kRowsPerLine % kChunksPerTurn) * 16;
  }
  static __device__ __forceinline__ uint32_t moved(uint32_t address, int rows, int chunks) {
    return (address ^ chunks % kChunksPerTurn * 16) + chunks / kChunksPerTurn * kTurnBytes + rows * kPitch;
  }

 private:
  /// Chunks change places within as many bytes: the largest power of two that rows are multiples of, up to a line.
  static constexpr int kTurnBytes = kBytes % 128 == 0 ? 128 : kBytes % 64 == 0 ? 64 : 32;
  static constexpr int kChunksPerTurn = kTurnBytes / 16, kRowsPerLine = 128 / kTurnBytes;
  static_assert(kBytes % kTurnBytes == 0);
};

/// Rows as TMA writes boxes of 8-row groups (hopper/swizzle_atom.cuh): [group][swizzle atom][row], with the 16-byte
/// chunks of a 128-byte row swizzled. The first group begins at a multiple of 1024 bytes.
template <int kBytes>
struct PanelRows {
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
