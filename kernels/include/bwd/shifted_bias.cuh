// The bias in dK and dV where its rows do not begin with chunks of 16 bytes. It is staged as that of other rows, but of
// each row the chunks are copied in which its part lies, one more than that has, and shifted when they are there.
#pragma once

#include <cstdint>

#include "bwd/aligned_bias.cuh"
#include "bwd/ptx_extra.cuh"
#include "chunk_window.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

template <typename Shape, typename T>
class ShiftedBiasStage : public AlignedBiasStage<Shape, T> {
  using Base = AlignedBiasStage<Shape, T>;
  using Base::kChunks, Base::kElements, Base::kPitch, Base::memory_;

 public:
  using Base::Base;

  /// Starts to copy the bias of the keys from `first_key` on, any number, of the rows whose first elements are
  /// `row_of(row)`; zeros for kNoBias. All threads of the CTA call it.
  template <typename RowOf>
  __device__ __forceinline__ void fetch(const BiasBackwardParams& params, int32_t first_key,
                                        const RowOf& row_of) const {
    const BiasSource& source = params.bias;
    const T* const data = static_cast<const T*>(source.data);
    const uint32_t rows = params.seqs * params.heads * source.rows;
    const auto end = static_cast<int64_t>(static_cast<uint64_t>(rows) * static_cast<uint32_t>(source.keys));
    const auto copy = [&](int32_t row, int32_t chunk) {
      const int64_t first = row_of(row);
      // The chunk's first key, and whether some key of it has a bias.
      const int32_t key = first_key - shift_of(first, first_key) + chunk * kElements;
      const bool exists = first != kNoBias && key < source.keys && key + kElements > 0;
      const uint32_t to = memory_ + row * kPitch + chunk * 16;
      if (exists && key + kElements > source.keys && first + key + kElements > end) {
        copy_elements(to, data + first + key, static_cast<int32_t>(end - first - key));
      } else {
        ptx::cp_async_16(to, data + (exists ? first + key : 0), exists);
      }
    };
    const int32_t thread = ptx::thread();
#pragma unroll 2
    for (int32_t i = 0; i < Shape::kStagedRows; i += kStep) copy(i + thread / kChunks, thread % kChunks);
    // The last chunks of the warp's rows.
    constexpr int kWarpRows = 32 / kChunks;
    const int32_t lane = thread % 32;
    if (lane < Shape::kStagedRows / kStep * kWarpRows) {
      copy(lane / kWarpRows * kStep + thread / 32 * kWarpRows + lane % kWarpRows, kChunks);
    }
  }
  /// Shifts what `fetch` has copied, when this thread's copies are complete, and sets the bias of keys past the last
  /// one to 0 if the sequence, of `len_k` keys, has such. All threads of the CTA call it; a warp has whole rows.
  template <typename RowOf>
  __device__ __forceinline__ void settle(const BiasSource& source, int32_t first_key, int32_t len_k,
                                         const RowOf& row_of) const {
    const int32_t thread = ptx::thread(), first = thread / kChunks, chunk = thread % kChunks;
    const uint32_t from = memory_ + first * kPitch + chunk * 16;
    // Elements of this thread's chunks past the last key are those of other rows.
    const int32_t keys = len_k > source.keys ? source.keys - first_key - chunk * kElements : kElements;
    __syncwarp();
#pragma unroll 2
    for (int32_t i = 0; i < Shape::kStagedRows; i += kStep) {
      const int32_t shift = shift_of(row_of(first + i), first_key);
      const uint4 one = ptx::load_shared_16(from + i * kPitch), next = ptx::load_shared_16(from + i * kPitch + 16);
      __syncwarp();
      ptx::store_shared_16(from + i * kPitch, ChunkWindow{one, next}.from(shift));
      if (keys < kElements) clear_elements_from(from + i * kPitch, max(keys, 0));
    }
  }

 private:
  /// The rows that all threads copy a chunk of at a time; a warp has whole ones.
  static constexpr int kStep = Shape::kThreads / kChunks;
  static_assert(Shape::kThreads % kChunks == 0 && Shape::kStagedRows % kStep == 0 && 32 % kChunks == 0);

  /// Which of its chunk's elements that of key `first_key` is, in the row whose first element is `row`.
  static __device__ __forceinline__ int32_t shift_of(int64_t row, int32_t first_key) {
    return (static_cast<int32_t>(row) + first_key) & (kElements - 1);
  }
  /// Copies `count` elements to a chunk in shared memory.
  static __device__ __forceinline__ void copy_elements(uint32_t to, const T* from, int32_t count) {
    const auto* const elements = reinterpret_cast<const uint16_t*>(from);
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) ptx::store_shared_2(to + i * 2, __ldg(elements + i));
  }
  /// Sets elements `first` and after of a chunk in shared memory to 0.
  static __device__ __forceinline__ void clear_elements_from(uint32_t chunk, int32_t first) {
#pragma unroll 1
    for (int32_t i = first; i < kElements; ++i) ptx::store_shared_2(chunk + i * 2, 0);
  }
};

}  // namespace xa
