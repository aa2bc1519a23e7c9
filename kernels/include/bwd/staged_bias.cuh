// The bias of a block of scores in the gradients, in shared memory: copied with the block's other operands, at any
// alignment (stage_bias_chunk).
//
//     rows of the stage: the block's query rows (dK/dV), or those that the CTA holds (dQ)
//     a row's bytes: from its part's first key on, after 0 to 14 bytes of the key before | up to 16 bytes
//
// It is added to the logits, not to Q K^T, because then no register holds it during the products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/dbias_rows.cuh"
#include "bwd/ptx_extra.cuh"
#include "chunk.cuh"
#include "element.cuh"
#include "log2_units.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

/// A stage: `memory` is where it begins, and `first_key` the key of its first column, any number.
template <typename Shape, typename T>
class StagedBias {
  static constexpr int kKeys = Shape::kStagedKeys, kRows = Shape::kStagedRows;
  template <typename E>
  static constexpr int kPitch = Shape::template kStagedPitch<E>;

 public:
  __device__ __forceinline__ StagedBias(const BiasSource& source, uint8_t* memory, int stage, int32_t first_key)
      : source_(source), memory_(memory), stage_(stage), first_key_(first_key) {}

  /// Starts to copy the bias of the rows `row_of(index)`; zeros for kNoBiasRow. All threads of the CTA call it.
  template <typename RowOf>
  __device__ __forceinline__ void fetch(const RowOf& row_of) const {
    with_bias_type<T>(source_, [&](auto type) {
      using E = decltype(type);
      constexpr int kElements = 16 / static_cast<int>(sizeof(E)), kChunks = kKeys / kElements;
      constexpr int kRowsPerStep = Shape::kThreads / kChunks;
      static_assert(Shape::kThreads % kChunks == 0 && kRows % kRowsPerStep == 0 && kRows <= Shape::kThreads);
      const int32_t thread = ptx::thread();
      // Every row begins and ends with a chunk, or all chunks of the block lie in their rows.
      const bool is_aligned = ((source_.keys | first_key_) & (kElements - 1)) == 0;
      if (is_aligned || (first_key_ >= 0 && first_key_ + kKeys + kElements <= source_.keys)) {
        const auto copy = [&](int32_t index, int32_t chunk, bool inside) {
          const BiasRowIndex row = row_of(index);
          const uint64_t element = static_cast<uint64_t>(row) * static_cast<uint32_t>(source_.keys) + first_key_;
          const uint64_t from = (element & ~static_cast<uint64_t>(kElements - 1)) * sizeof(E) + chunk * 16;
          ptx::cp_async_16(ptx::shared_address(memory<E>(index) + 16 * chunk),
                           reinterpret_cast<const void*>(reinterpret_cast<uint64_t>(source_.data) + from),
                           inside && row != kNoBiasRow);
        };
        // The last chunks first: otherwise ptxas spills in dQ at 128 columns.
        if (!is_aligned && thread < kRows) copy(thread, kChunks, true);
        const int32_t chunk = thread % kChunks;
        const bool inside =
            !is_aligned || static_cast<uint32_t>(first_key_ + chunk * kElements) < static_cast<uint32_t>(source_.keys);
#pragma unroll 4
        for (int32_t index = thread / kChunks; index < kRows; index += kRowsPerStep) copy(index, chunk, inside);
        return;
      }
#pragma unroll 1
      for (int32_t item = thread; item < kRows * (kChunks + 1); item += Shape::kThreads) {
        const int32_t index = item / (kChunks + 1);
        stage_bias_chunk<E>(source_, memory<E>(index), bias_row(source_, row_of(index)), first_key_,
                            item - index * (kChunks + 1));
      }
    });
  }

  /// The bias of row `index` and key `column` of the stage; `rows` are what `fetch` got.
  template <typename E>
  __device__ __forceinline__ const E* at(const BiasRowIndex* rows, int32_t index, int32_t column) const {
    const uint32_t shift = (rows[index] * static_cast<uint32_t>(source_.keys) + first_key_) & (16 / sizeof(E) - 1);
    return reinterpret_cast<const E*>(memory<E>(index)) + (shift + column);
  }
  __device__ __forceinline__ const BiasSource& source() const { return source_; }

  /// Whether `store_gradient` may be called: rows of the gradient begin with a chunk, and it is of type T as the bias.
  __device__ __forceinline__ bool stores_chunks(const BiasBackwardParams& params) const {
    return ((source_.keys | first_key_) & (16 / static_cast<int>(sizeof(T)) - 1)) == 0 && params.dbias_is_f32 == 0;
  }
  /// dQ: stores dS of a warp's rows, from `row` on, and of the columns from `column` on as the gradient of the bias. It
  /// passes through the stage, whose bias the warp has read: rows leave in chunks of 16 bytes, where a lane has pairs.
  template <int kTiles, int kBlocks>
  __device__ __forceinline__ void store_gradient(const BiasBackwardParams& params, const BiasRowIndex* rows,
                                                 int32_t row, int32_t column,
                                                 const float (&ds)[kTiles][kBlocks][4]) const {
    const int32_t lane = ptx::thread() % 32;
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        T* const to = reinterpret_cast<T*>(memory<T>(row + 16 * tile + 8 * half + lane / 4)) + column + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const float (&x)[4] = ds[tile][block];
          store_columns(to + 8 * block, make_float2(x[2 * half], x[2 * half + 1]));
        }
      }
    }
    __syncwarp();
    constexpr int kChunks = 8 * kBlocks * static_cast<int>(sizeof(T)) / 16;
    column += lane % kChunks * (16 / static_cast<int>(sizeof(T)));
    const int32_t key = first_key_ + column;
    if (static_cast<uint32_t>(key) >= static_cast<uint32_t>(source_.keys)) return;
#pragma unroll
    for (int32_t i = 0; i < 16 * kTiles; i += 32 / kChunks) {
      const int32_t index = row + i + lane / kChunks;
      if (rows[index] == kNoBiasRow) continue;
      T* const to = dbias_row<T>(params, rows[index]);
      *reinterpret_cast<uint4*>(to + key) =
          *reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(memory<T>(index)) + column);
    }
  }

 private:
  template <typename E>
  __device__ __forceinline__ uint8_t* memory(int32_t index) const {
    return memory_ + (stage_ * kRows + index) * kPitch<E>;
  }

  const BiasSource& source_;
  uint8_t* const memory_;
  const int stage_;
  const int32_t first_key_;
};

/// The part of a stage that a warp's scores have: from query row `row` and key `column` of the stage on. `rows` are the
/// indices of the stage's query rows in the bias.
template <typename Shape, typename T>
class StagedScoreBias {
 public:
  static constexpr bool kExists = true, kIsLate = true;

  __device__ __forceinline__ StagedScoreBias(const StagedBias<Shape, T>& stage, const BiasRowIndex* rows, int32_t row,
                                             int32_t column)
      : stage_(stage), rows_(rows), row_(row), column_(column) {}

  /// Adds the bias in base 2 to logits.
  template <int kTiles, int kBlocks>
  __device__ __forceinline__ void add(float (&logits)[kTiles][kBlocks][4]) const {
    with_bias_type<T>(stage_.source(), [&](auto type) {
      using E = decltype(type);
      const int32_t lane = ptx::thread() % 32;
      if constexpr (Shape::kHoldsKeys) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const E* const from =
                stage_.template at<E>(rows_, row_ + 8 * block + lane % 4 * 2 + side, column_ + lane / 4);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              add_one(logits[tile][block][side], Element<E>::to_f32(from[16 * tile]));
              add_one(logits[tile][block][2 + side], Element<E>::to_f32(from[16 * tile + 8]));
            }
          }
        }
      } else {
        const bool has_pairs = stage_.source().keys % 2 == 0;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const E* const from =
                stage_.template at<E>(rows_, row_ + 16 * tile + 8 * half + lane / 4, column_ + lane % 4 * 2);
            const auto add_pairs = [&](auto aligned) {
#pragma unroll
              for (int block = 0; block < kBlocks; ++block) {
                const float2 pair = load_bias_pair<decltype(aligned)::value>(from + 8 * block);
                add_one(logits[tile][block][2 * half], pair.x);
                add_one(logits[tile][block][2 * half + 1], pair.y);
              }
            };
            if (has_pairs) {
              add_pairs(std::true_type{});
            } else {
              add_pairs(std::false_type{});
            }
          }
        }
      }
    });
  }

 private:
  static __device__ __forceinline__ void add_one(float& logit, float bias) { logit = __fmaf_rn(kLog2E, bias, logit); }

  const StagedBias<Shape, T>& stage_;
  const BiasRowIndex* const rows_;
  const int32_t row_;
  const int32_t column_;
};

}  // namespace xa
