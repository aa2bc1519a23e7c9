// The gradient of a bias in rows of any length, stored from dS in rows of whole chunks. A row begins at any element, so
// a chunk of 16 bytes of it has elements of two adjacent chunks of dS:
//
//     dS           |  0  ...  7  |  8 ... 15  | 16 ... 23  |
//     gradient     0 1 2 | 3 ... 10 | 11 ... 18 | 19 ...             here the row begins 5 elements after a chunk does
//
// What is stored for a block of columns begins with a sector of 32 bytes of global memory, so that sectors are stored
// whole: parts of them take L2 twice as long.
#pragma once

#include <cstdint>

#include "chunk_window.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

/// A row of the gradient, of 16-bit elements.
struct CopiedDbiasRow {
  uint16_t* elements;
  int32_t keys;

  __device__ __forceinline__ CopiedDbiasRow(const BiasBackwardParams& params, BiasRowIndex row)
      : elements(static_cast<uint16_t*>(params.dbias) + static_cast<uint64_t>(row) * params.dbias_keys),
        keys(params.dbias_keys) {}

  /// Stores chunk `chunk` of those for the block of columns from `column` on, a multiple of 8, or what of it belongs to
  /// the row. `staged(i)` is the shared address of chunk i of the block in dS; -2 and -1 are the ones before it.
  template <typename Staged>
  __device__ __forceinline__ void store(int32_t column, int32_t chunk, const Staged& staged) const {
    const int32_t before = misalignment(), last = chunk - before / 8, first = before % 8 == 0 ? last : last - 1;
    const ChunkWindow window = {ptx::load_shared_16(staged(first)), ptx::load_shared_16(staged(last))};
    const uint4 elements_of_chunk = window.from(-before & 7);
    const int32_t begin = column + 8 * chunk - before;
    if (begin >= 0 && begin + 8 <= keys) {
      *reinterpret_cast<uint4*>(elements + begin) = elements_of_chunk;
    } else {
      store_elements(begin, elements_of_chunk, 0);
    }
  }
  /// Stores those of the elements before column `end` that the chunks have left. The last 16 are two chunks in shared
  /// memory, at `first` and `second`.
  __device__ __forceinline__ void store_last(int32_t end, uint32_t first, uint32_t second) const {
    const int32_t left = misalignment();
    store_elements(end - 16, ptx::load_shared_16(first), 16 - left);
    store_elements(end - 8, ptx::load_shared_16(second), 8 - left);
  }

 private:
  /// The elements between the beginning of a sector and the row.
  __device__ __forceinline__ int32_t misalignment() const {
    return static_cast<int32_t>(reinterpret_cast<uint64_t>(elements) / sizeof(uint16_t) % 16);
  }
  /// Stores elements `first` to 7 of those that begin at column `begin`, if they belong to the row. They are few: as a
  /// loop, the compiler leaves them behind a branch.
  __device__ __forceinline__ void store_elements(int32_t begin, uint4 chunk, int32_t first) const {
#pragma unroll 1
    for (int32_t i = 0; i < 8; ++i) {
      const bool belongs = i >= first && static_cast<uint32_t>(begin + i) < static_cast<uint32_t>(keys);
      if (belongs) elements[begin + i] = static_cast<uint16_t>(chunk.x);
      chunk = make_uint4(chunk.x >> 16 | chunk.y << 16, chunk.y >> 16 | chunk.z << 16, chunk.z >> 16 | chunk.w << 16,
                         chunk.w >> 16);
    }
  }
};

}  // namespace xa
