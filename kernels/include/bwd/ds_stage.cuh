// dS in shared memory for dQ = dS K: kHeld query rows of a CTA and a block of kKeys keys, copied from where
// attention_bwd_dkdv has stored it (ScoreGradientRow). Each warp copies rows of its own.
#pragma once

#include <cstdint>

#include "bwd/products.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/score_gradients.cuh"
#include "chunk_window.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"

namespace xa {

/// The chunks of 16 bytes of a block that a thread copies: chunk `chunk` of rows `row`, `row + kStep`, ... of its warp.
template <int kHeld, int kKeys, int kThreads>
struct WarpRows {
  static constexpr int kChunks = kKeys / 8, kRows = kHeld / (kThreads / 32), kStep = 32 / kChunks;
  static_assert(kRows % kStep == 0);

  const int32_t lane = ptx::thread() % 32, first = ptx::thread() / 32 * kRows;
  const int32_t row = first + lane / kChunks, chunk = lane % kChunks;
};

/// Where rows of dS begin with chunks.
template <int kHeld, int kKeys, int kThreads>
class AlignedDsStage {
  using Rows = SwizzledRows<2 * kKeys>;
  using Copies = WarpRows<kHeld, kKeys, kThreads>;

 public:
  static constexpr bool kIsShifted = false;
  static constexpr int kBytes = kHeld * Rows::kPitch;

  /// Operand A of `accumulate`: the rows from `first_row` on of the stage at shared address `stage`.
  struct Operand {
    static constexpr int kRows = kKeys;
    uint32_t address;

    __device__ __forceinline__ Operand(uint32_t stage, int32_t first_row)
        : address(stage + first_row * Rows::kPitch + Rows::offset(threadIdx.x % 16, threadIdx.x % 32 / 16)) {}
    __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
      ptx::ldmatrix_x4(fragment, Rows::moved(address, 16 * tile, 2 * step));
    }
  };

  /// Starts to copy the columns of `rows` from `column` on, a multiple of 8. Chunks of which a row attends to no key
  /// become zeros.
  template <typename T>
  static __device__ __forceinline__ void fetch(const T* ds, const ScoreGradientRow* rows, int32_t column,
                                               uint32_t stage) {
    const Copies own;
    column += 8 * own.chunk;
#pragma unroll
    for (int32_t i = 0; i < Copies::kRows; i += Copies::kStep) {
      const int32_t row = own.row + i;
      const ScoreGradientRow from = rows[row];
      const bool exists = from.attends(column);
      ptx::cp_async_16(stage + Rows::offset(row, own.chunk), exists ? ds + from.element + column : ds, exists);
    }
  }
  /// Completes the rows of the warp when its threads' copies have arrived.
  static __device__ __forceinline__ void settle(const ScoreGradientRow*, uint32_t) {}
};

/// Where they begin anywhere. The chunks in which the block's part of a row lies are copied, one more than that has,
/// and shifted in shared memory.
template <int kHeld, int kKeys, int kThreads>
class ShiftedDsStage {
  using Copies = WarpRows<kHeld, kKeys, kThreads>;
  static constexpr int kPitch = 2 * kKeys + 16;

 public:
  static constexpr bool kIsShifted = true;
  static constexpr int kBytes = kHeld * kPitch;

  struct Operand : SharedOperand<kKeys, kPitch> {
    __device__ __forceinline__ Operand(uint32_t stage, int32_t first_row)
        : SharedOperand<kKeys, kPitch>(stage + first_row * kPitch) {}
  };

  template <typename T>
  static __device__ __forceinline__ void fetch(const T* ds, const ScoreGradientRow* rows, int32_t column,
                                               uint32_t stage) {
    const Copies own;
    const auto copy = [&](int32_t row, int32_t chunk) {
      const ScoreGradientRow from = rows[row];
      const int32_t first = column + 8 * chunk - shift_of(from);
      const bool exists = from.attends(first);
      // Elements past the last key become zeros: they may be those of another row.
      ptx::cp_async_16_of(stage + row * kPitch + 16 * chunk, exists ? ds + from.element + first : ds,
                          exists ? min(from.end - first, 8) * 2 : 0);
    };
#pragma unroll
    for (int32_t i = 0; i < Copies::kRows; i += Copies::kStep) copy(own.row + i, own.chunk);
    if (own.lane < Copies::kRows) copy(own.first + own.lane, Copies::kChunks);
  }
  /// Shifts each row to the beginning of its part of the stage.
  static __device__ __forceinline__ void settle(const ScoreGradientRow* rows, uint32_t stage) {
    constexpr int kLanes = 32 / Copies::kRows, kChunks = Copies::kChunks / kLanes;
    // Chunks that a lane shifts before it stores them.
    constexpr int kAtOnce = kChunks < 4 ? kChunks : 4, kParts = kChunks / kAtOnce;
    static_assert(kLanes * kParts * kAtOnce == Copies::kChunks);
    const Copies own;
    const int32_t row = own.first + own.lane / kLanes, shift = shift_of(rows[row]);
    const uint32_t from = stage + row * kPitch + own.lane % kLanes * kChunks * 16;
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t chunks = from + part * kAtOnce * 16;
      uint4 shifted[kAtOnce];
      ChunkWindow window = {{}, ptx::load_shared_16(chunks)};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        window = {window.second, ptx::load_shared_16(chunks + (i + 1) * 16)};
        shifted[i] = window.from(shift);
      }
      // Another lane may need the first chunk.
      if (kLanes > 1) __syncwarp();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) ptx::store_shared_16(chunks + i * 16, shifted[i]);
    }
  }

 private:
  /// Which element of its chunk column 0 is.
  static __device__ __forceinline__ int32_t shift_of(const ScoreGradientRow& row) {
    return static_cast<int32_t>(row.element) & 7;
  }
};

}  // namespace xa
