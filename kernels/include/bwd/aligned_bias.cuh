// The bias in the gradients where its rows begin with chunks of 16 bytes. It has the type of the operands, or is f32
// (aligned_f32_bias.cuh), and no soft cap or ALiBi comes before it, so the main loop has no branches between its
// products.
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

  /// Starts to copy the bias of the keys from `first_key` on, any number, of the rows whose first elements are
  /// `row_of(row)`; zeros for kNoBias. All threads of the CTA call it. The keys of a sequence may begin at any row of
  /// K, so `first_key` need not be a multiple of a chunk: then the chunks are copied in which the part of a row lies,
  /// one more than it has, for `settle`.
  template <typename RowOf>
  __device__ __forceinline__ void fetch(const BiasSource& source, int32_t first_key, const RowOf& row_of) const {
    constexpr int kStep = Shape::kThreads / kChunks;
    static_assert(Shape::kThreads % kChunks == 0 && Shape::kStagedRows % kStep == 0);
    const int32_t thread = ptx::thread(), first = thread / kChunks, shift = first_key & (kElements - 1);
    const int32_t key = first_key - shift + thread % kChunks * kElements;
    const uint32_t to = memory_ + first * kPitch + thread % kChunks * 16;
    const auto has = [&](int32_t at) { return static_cast<uint32_t>(at) < static_cast<uint32_t>(source.keys); };
    const T* const data = static_cast<const T*>(source.data);
    if (shift == 0) {
      const bool inside = has(key);
      // All rows first: the copies wait for them once then.
      constexpr int kCopies = Shape::kStagedRows / kStep;
      int64_t rows[kCopies];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) rows[i] = row_of(first + i * kStep);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool exists = inside && rows[i] != kNoBias;
        ptx::cp_async_16(to + i * kStep * kPitch, data + (exists ? rows[i] + key : 0), exists);
      }
      return;
    }
    const bool is_last = thread % kChunks == kChunks - 1;
#pragma unroll 2
    for (int32_t i = 0; i < Shape::kStagedRows; i += kStep) {
      const int64_t row = row_of(first + i);
      const auto copy = [&](uint32_t to_chunk, int32_t at) {
        const bool exists = has(at) && row != kNoBias;
        ptx::cp_async_16(to_chunk, data + (exists ? row + at : 0), exists);
      };
      copy(to + i * kPitch, key);
      if (is_last) copy(to + i * kPitch + 16, key + kElements);
    }
  }
  /// Shifts what `fetch` has copied, if `first_key` is not a multiple of a chunk, when this thread's copies are
  /// complete. All threads of the CTA call it; a warp has whole rows.
  __device__ __forceinline__ void settle(int32_t first_key) const {
    const int32_t shift = first_key & (kElements - 1);
    if (shift == 0) return;
    static_assert(32 % kChunks == 0);
    constexpr int kStep = Shape::kThreads / kChunks;
    const int32_t thread = ptx::thread();
    const uint32_t from = memory_ + thread / kChunks * kPitch + thread % kChunks * 16;
    __syncwarp();
#pragma unroll 2
    for (int32_t i = 0; i < Shape::kStagedRows; i += kStep) {
      const uint4 first = ptx::load_shared_16(from + i * kPitch), second = ptx::load_shared_16(from + i * kPitch + 16);
      __syncwarp();
      ptx::store_shared_16(from + i * kPitch, ChunkWindow{first, second}.from(shift * (sizeof(T) / 2)));
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
  const uint32_t memory_;
};

}  // namespace xa
