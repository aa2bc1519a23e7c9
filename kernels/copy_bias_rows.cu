// Copies the rows of a bias of 16-bit elements, or of its gradient, to rows of another pitch: to rows of whole chunks
// of 16 bytes, as TMA needs them, and back. Rows may begin at any element on either side.
//
// A warp has a row. A lane stores a chunk of the destination from two chunks of the source, which it shifts; elements
// at either end of a row are stored one by one:
//
//     source        |  row: 0 1 2 3 | 4 5 6 7 8 9 10 11 |  ...         aligned chunks, of which none is read outside
//                          \_____________/                             of the operand
//     destination         | 0 1 2 3 4 5 6 7 |  ...
//
// Launch: kCopyRowsThreads threads, a CTA per kCopyRowsPerCta rows.

#include <cstdint>

#include "chunk_window.cuh"
#include "params/bias.cuh"

namespace xa {

constexpr int32_t kChunk = 8;  // elements

/// The elements between the multiple of 16 bytes before an element, or at it, and that element.
__device__ __forceinline__ int32_t misalignment(const uint16_t* element) {
  return static_cast<int32_t>(reinterpret_cast<uintptr_t>(element) / sizeof(uint16_t) % kChunk);
}

/// A row: element e of `to` is that of `from`, and 0 from `columns` up to `width`.
struct RowCopy {
  const uint16_t* from;
  uint16_t* to;
  int32_t columns, width;
  int32_t first_readable, end_readable;  // elements of the operand, counted from the row's first one

  __device__ __forceinline__ void run() const {
    constexpr int kBatch = 4;  // chunks of a lane that are under way
    const int32_t before = misalignment(to), shift = misalignment(from - before), lane = threadIdx.x % 32;
    // The chunks of `to` that lie in the row and whose windows lie in the operand. Element 0 is in chunk 0.
    const int32_t first_element = max(0, first_readable + shift);
    const int32_t last_element = min(columns - kChunk, end_readable + shift - 2 * kChunk);
    const int32_t first = (before + first_element + kChunk - 1) / kChunk;
    const int32_t end = last_element < first_element ? first : max((before + last_element) / kChunk + 1, first);
    const auto* const source = reinterpret_cast<const uint4*>(from - before - shift);
    auto* const destination = reinterpret_cast<uint4*>(to - before);
#pragma unroll 1
    for (int32_t chunk = first + lane; chunk < end; chunk += 32 * kBatch) {
      ChunkWindow windows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t at = min(chunk + 32 * i, end - 1);
        windows[i].first = windows[i].second = __ldg(source + at);
        if (shift != 0) windows[i].second = __ldg(source + at + 1);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (chunk + 32 * i < end) destination[chunk + 32 * i] = windows[i].from(shift);
      }
    }
    const int32_t head = min(first * kChunk - before, width), tail = max(end * kChunk - before, head);
    copy_elements(lane, head);
    copy_elements(tail + lane, width);
  }

 private:
  /// Elements `begin`, `begin` + 32 and so on.
  __device__ __forceinline__ void copy_elements(int32_t begin, int32_t end) const {
#pragma unroll 1
    for (int32_t e = begin; e < end; e += 32) to[e] = e < columns ? __ldg(from + e) : uint16_t{0};
  }
};

}  // namespace xa

extern "C" __global__ void __launch_bounds__(xa::kCopyRowsThreads)
    XA_ENTRY(const __grid_constant__ xa::CopyRowsParams params) {
  using namespace xa;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kCopyRowsPerCta + threadIdx.x / 32;
  if (row >= params.rows) return;
  // Windows reach this far past either end of the row.
  constexpr int64_t kFar = 2 * kChunk;
  const auto before = static_cast<int32_t>(min(row * params.from_pitch, kFar));
  const auto after = static_cast<int32_t>(min((params.rows - 1 - row) * params.from_pitch, kFar));
  const RowCopy copy = {params.from + row * params.from_pitch,
                        params.to + row * params.to_pitch,
                        params.columns,
                        params.width,
                        -before,
                        params.columns + after};
  copy.run();
}
