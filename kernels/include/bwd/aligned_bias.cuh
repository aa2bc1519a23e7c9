// The bias in the gradients where its rows begin with chunks of 16 bytes; in dK and dV, where dS is stored, in any
// rows. It has the type of the operands, and no soft cap or ALiBi comes before it, so the main loop has no branches
// between its products.
//
// In dQ the columns of a lane are the keys of a chunk (KeysOfLanes), so it loads whole chunks, which need no shared
// memory. In dK and dV the bias is staged with the block's other operands.
#pragma once

#include <cstdint>

#include "bwd/bias_rows.cuh"
#include "bwd/dbias_rows.cuh"
#include "bwd/key_order.cuh"
#include "bwd/ptx_extra.cuh"
#include "chunk_window.cuh"
#include "element.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

/// dQ: the bias, of type T, of a warp's 16 kTiles rows and 32 keys.
template <typename T, int kTiles>
class AlignedBias {
  using Scores = float[kTiles][4][4];

 public:
  /// Starts to load the bias of the keys from `first_key` on, a multiple of 8, of the rows whose indices are at `rows`.
  __device__ __forceinline__ void load(const BiasSource& source, const BiasRowIndex* rows, int32_t first_key) {
    for_chunks(source, rows, first_key, [&](int tile, int half, bool exists, int64_t element) {
      const T* const from = static_cast<const T*>(source.data) + element;
      chunks_[tile][half] = exists ? ptx::load_global_16_of_256(from) : make_uint4(0, 0, 0, 0);
    });
  }
  /// Sets scores to what their product is added to: the bias divided by the factor of the scores.
  __device__ __forceinline__ void start(Scores& scores, const AttentionParams& params) const {
    const float factor = bias_factor(params);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& chunk = chunks_[tile][half];
        const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          const float2 pair = scaled(unpack<T>(pairs[block]), factor);
          scores[tile][block][2 * half] = pair.x;
          scores[tile][block][2 * half + 1] = pair.y;
        }
      }
    }
  }

 private:
  /// Calls `visit(tile, half, whether it exists, its first element)` for the lane's chunks.
  template <typename Visit>
  static __device__ __forceinline__ void for_chunks(const BiasSource& source, const BiasRowIndex* rows,
                                                    int32_t first_key, const Visit& visit) {
    const int32_t lane = ptx::thread() % 32, key = first_key + KeysOfLanes::of_lane(lane % 4);
    const bool inside = key < source.keys;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const BiasRowIndex row = rows[16 * tile + 8 * half + lane / 4];
        visit(tile, half, inside && row != kNoBiasRow,
              static_cast<int64_t>(static_cast<uint64_t>(row) * static_cast<uint32_t>(source.keys)) + key);
      }
    }
  }

  uint4 chunks_[kTiles][2];
};

/// dK and dV: the bias of a block's query rows and of the keys that the CTA holds, in shared memory at `memory`.
template <typename Shape, typename T>
class AlignedBiasStage {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kChunks = Shape::kStagedKeys / kElements;
  static constexpr int kPitch = Shape::template kStagedPitch<T>;

 public:
  static constexpr int kBytes = Shape::kStagedRows * kPitch;

  __device__ __forceinline__ AlignedBiasStage(uint8_t* memory) : memory_(ptx::shared_address(memory)) {}

  /// Starts to copy the bias of the keys from `first_key` on, any number, of the rows in which that key is element
  /// `element_of(row)`; zeros for kNoBias. All threads of the CTA call it. Unless these keys begin with a chunk in each
  /// row, the chunks are copied in which the part of a row lies, one more than it has, for `settle`. `end` is the end
  /// of all rows.
  template <typename ElementOf>
  __device__ __forceinline__ void fetch(const BiasSource& source, int64_t end, int32_t first_key,
                                        const ElementOf& element_of) const {
    const int32_t thread = ptx::thread(), first = thread / kChunks, chunk = thread % kChunks;
    const T* const data = static_cast<const T*>(source.data);
    if (begin_with_chunk(source, first_key)) {
      const bool inside = static_cast<uint32_t>(first_key + chunk * kElements) < static_cast<uint32_t>(source.keys);
      const uint32_t to = memory_ + first * kPitch + chunk * 16;
#pragma unroll
      for (int32_t i = 0; i < Shape::kStagedRows; i += kStep) {
        const int64_t element = element_of(first + i);
        const bool exists = inside && element != kNoBias;
        ptx::cp_async_16(to + i * kPitch, data + (exists ? element + chunk * kElements : 0), exists);
      }
      return;
    }
    const auto copy = [&](int32_t row, int32_t index) {
      const int64_t element = element_of(row), from = element - (element & (kElements - 1)) + index * kElements;
      // The chunk's first key, and whether some key of it has a bias.
      const int32_t key = first_key - shift_of(element) + index * kElements;
      const bool exists = element != kNoBias && key < source.keys && key + kElements > 0;
      const uint32_t to = memory_ + row * kPitch + index * 16;
      if (exists && key + kElements > source.keys && from + kElements > end) {
        copy_elements(to, data + from, static_cast<int32_t>(end - from));
      } else {
        ptx::cp_async_16(to, data + (exists ? from : 0), exists);
      }
    };
#pragma unroll 2
    for (int32_t i = 0; i < Shape::kStagedRows; i += kStep) copy(first + i, chunk);
    // The last chunks of the warp's rows.
    constexpr int kWarpRows = 32 / kChunks;
    const int32_t lane = thread % 32;
    if (lane < Shape::kStagedRows / kStep * kWarpRows) {
      copy(lane / kWarpRows * kStep + thread / 32 * kWarpRows + lane % kWarpRows, kChunks);
    }
  }
  /// Shifts what `fetch` has copied, if the keys do not begin with a chunk, when this thread's copies are complete, and
  /// sets the bias of keys past the last one to 0 if the sequence, of `len_k` keys, has such. All threads of the CTA
  /// call it; a warp has whole rows.
  template <typename ElementOf>
  __device__ __forceinline__ void settle(const BiasSource& source, int32_t first_key, int32_t len_k,
                                         const ElementOf& element_of) const {
    if (begin_with_chunk(source, first_key)) return;
    const int32_t thread = ptx::thread(), first = thread / kChunks, chunk = thread % kChunks;
    const uint32_t from = memory_ + first * kPitch + chunk * 16;
    // Elements of this thread's chunks past the last key are those of other rows.
    const int32_t keys = len_k > source.keys ? source.keys - first_key - chunk * kElements : kElements;
    __syncwarp();
#pragma unroll 2
    for (int32_t i = 0; i < Shape::kStagedRows; i += kStep) {
      const int32_t shift = shift_of(element_of(first + i));
      const uint4 one = ptx::load_shared_16(from + i * kPitch), next = ptx::load_shared_16(from + i * kPitch + 16);
      __syncwarp();
      ptx::store_shared_16(from + i * kPitch, ChunkWindow{one, next}.from(shift));
      if (keys < kElements) clear_elements_from(from + i * kPitch, max(keys, 0));
    }
  }
  /// As AlignedBias::start, of the query rows from `row` on and the keys from `column` on: one instruction loads 8 x 8
  /// biases four times.
  template <int kBlocks>
  __device__ __forceinline__ void start(float (&scores)[2][kBlocks][4], const AttentionParams& params, int32_t row,
                                        int32_t column) const {
    const float factor = bias_factor(params);
    const int32_t lane = ptx::thread() % 32;
    const uint32_t from = memory_ + (row + lane % 8) * kPitch + column * sizeof(T) + lane / 8 * 16;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4_trans(pairs, from + 8 * block * kPitch);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = scaled(unpack<T>(pairs[i]), factor);
        scores[i / 2][block][i % 2 * 2] = pair.x;
        scores[i / 2][block][i % 2 * 2 + 1] = pair.y;
      }
    }
  }

 private:
  /// The rows that all threads copy a chunk of at a time; a warp has whole ones.
  static constexpr int kStep = Shape::kThreads / kChunks;
  static_assert(Shape::kThreads % kChunks == 0 && Shape::kStagedRows % kStep == 0 && 32 % kChunks == 0);

  /// Whether the keys from `first_key` on begin with a chunk in each row.
  static __device__ __forceinline__ bool begin_with_chunk(const BiasSource& source, int32_t first_key) {
    return ((first_key | source.keys) & (kElements - 1)) == 0;
  }
  /// Which of its chunk's elements one is.
  static __device__ __forceinline__ int32_t shift_of(int64_t element) {
    return static_cast<int32_t>(element) & (kElements - 1);
  }
  /// Copies `count` elements to a chunk in shared memory.
  static __device__ __forceinline__ void copy_elements(uint32_t to, const T* from, int32_t count) {
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i)
      ptx::store_shared_2(to + i * 2, __ldg(reinterpret_cast<const uint16_t*>(from) + i));
  }
  /// Sets elements `first` and after of a chunk in shared memory to 0.
  static __device__ __forceinline__ void clear_elements_from(uint32_t chunk, int32_t first) {
#pragma unroll 1
    for (int32_t i = first; i < kElements; ++i) ptx::store_shared_2(chunk + i * 2, 0);
  }

  const uint32_t memory_;
};

}  // namespace xa
