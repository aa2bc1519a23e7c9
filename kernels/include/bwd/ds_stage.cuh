// dS in shared memory for dQ = dS K: kHeld query rows of a CTA and a block of kKeys keys, copied from where
// attention_bwd_dkdv has stored it (ScoreGradientRow). Each warp copies rows of its own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/products.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/score_gradients.cuh"
#include "chunk_window.cuh"
#include "element.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"

namespace xa {

/// The chunks of 16 bytes of a block that a thread copies: chunk `chunk` of rows `row`, `row + kStep`, ... of its warp.
template <int kHeld, int kKeys, int kThreads, int kElements = 8>
struct WarpRows {
  static constexpr int kChunks = kKeys / kElements, kRows = kHeld / (kThreads / 32), kStep = 32 / kChunks;
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
  template <typename T>
  using Ds = T;
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
      ptx::cp_async_16_of_256(stage + Rows::offset(row, own.chunk), exists ? ds + from.element + column : ds, exists);
    }
  }
  /// Completes the rows of the warp when its threads' copies have arrived.
  template <typename T>
  static __device__ __forceinline__ void settle(const ScoreGradientRow*, uint32_t) {}
};

/// Where they begin anywhere, of elements of kElementBytes: the chunks in which the block's part of a row lies are
/// copied, one more than that has. The 16-bit elements of a row then begin where its chunks did.
template <int kHeld, int kKeys, int kThreads, int kElementBytes>
class UnalignedDsStage {
 protected:
  static constexpr int kElements = 16 / kElementBytes, kPitch = kKeys * kElementBytes + 16;
  using Copies = WarpRows<kHeld, kKeys, kThreads, kElements>;

  /// Which element of its chunk column 0 is.
  static __device__ __forceinline__ int32_t shift_of(const ScoreGradientRow& row) {
    return static_cast<int32_t>(row.element) & (kElements - 1);
  }
  /// Starts to copy chunk `chunk` of row `row` of the stage: columns of `from`, of which the stage has those from
  /// `column` on.
  template <typename Ds>
  static __device__ __forceinline__ void copy(const Ds* ds, const ScoreGradientRow& from, int32_t column,
                                              uint32_t stage, int32_t row, int32_t chunk) {
    static_assert(sizeof(Ds) == kElementBytes);
    const int32_t first = column + kElements * chunk - shift_of(from);
    const bool exists = from.template attends<kElements>(first);
    // Elements past the last key become zeros: they may be those of another row.
    ptx::cp_async_16_of(stage + row * kPitch + 16 * chunk, exists ? ds + from.element + first : ds,
                        exists ? min(from.end - first, kElements) * kElementBytes : 0);
  }

 public:
  static constexpr bool kIsShifted = true;
  static constexpr int kBytes = kHeld * kPitch;

  struct Operand : SharedOperand<kKeys, kPitch> {
    __device__ __forceinline__ Operand(uint32_t stage, int32_t first_row)
        : SharedOperand<kKeys, kPitch>(stage + first_row * kPitch) {}
  };
};

/// dS of 16 bits, which is shifted in shared memory.
template <int kHeld, int kKeys, int kThreads>
class ShiftedDsStage : public UnalignedDsStage<kHeld, kKeys, kThreads, 2> {
  using Base = UnalignedDsStage<kHeld, kKeys, kThreads, 2>;
  using Base::copy, Base::kPitch, Base::shift_of;
  using typename Base::Copies;

 public:
  template <typename T>
  using Ds = T;

  template <typename T>
  static __device__ __forceinline__ void fetch(const T* ds, const ScoreGradientRow* rows, int32_t column,
                                               uint32_t stage) {
    const Copies own;
    // Rows are copied from shared memory first, because members of a reference would be loaded again after each copy.
#pragma unroll
    for (int32_t i = 0; i < Copies::kRows; i += Copies::kStep) {
      const ScoreGradientRow from = rows[own.row + i];
      copy(ds, from, column, stage, own.row + i, own.chunk);
    }
    if (own.lane < Copies::kRows) {
      const int32_t row = own.first + own.lane;
      const ScoreGradientRow from = rows[row];
      copy(ds, from, column, stage, row, Copies::kChunks);
    }
  }
  /// Shifts each row to the beginning of its part of the stage.
  template <typename T>
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
};

/// dS of f32, which is rounded when it is shifted.
template <int kHeld, int kKeys, int kThreads>
class F32DsStage : public UnalignedDsStage<kHeld, kKeys, kThreads, 4> {
  using Base = UnalignedDsStage<kHeld, kKeys, kThreads, 4>;
  using Base::copy, Base::kPitch, Base::shift_of;
  using typename Base::Copies;

 public:
  template <typename T>
  using Ds = float;

  static __device__ __forceinline__ void fetch(const float* ds, const ScoreGradientRow* rows, int32_t column,
                                               uint32_t stage) {
    const Copies own;
    constexpr int kCopies = Copies::kRows / Copies::kStep, kAtOnce = 4;
    static_assert(kCopies % kAtOnce == 0);
#pragma unroll
    for (int32_t i = 0; i < kCopies; i += kAtOnce) {
      // Several rows first: the copies wait for them once then.
      ScoreGradientRow of[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) of[j] = rows[own.row + (i + j) * Copies::kStep];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        copy(ds, of[j], column, stage, own.row + (i + j) * Copies::kStep, own.chunk);
      }
    }
    if (own.lane < Copies::kRows) {
      const int32_t row = own.first + own.lane;
      copy(ds, rows[row], column, stage, row, Copies::kChunks);
    }
  }
  /// Rounds each row to the beginning of its part of the stage.
  template <typename T>
  static __device__ __forceinline__ void settle(const ScoreGradientRow* rows, uint32_t stage) {
    constexpr int kLanes = 32 / Copies::kRows, kChunks = Copies::kChunks / kLanes;
    // Chunks that a lane rounds before it stores them.
    constexpr int kAtOnce = 4, kParts = kChunks / kAtOnce;
    static_assert(kLanes * kParts * kAtOnce == Copies::kChunks && (kLanes == 1 || kParts == 1));
    const Copies own;
    const int32_t row = own.first + own.lane / kLanes, shift = shift_of(rows[row]);
    const int32_t first = own.lane % kLanes * kChunks;
    const uint32_t from = stage + row * kPitch + first * 16, to = stage + row * kPitch + first * 8;
    __syncwarp();
    const auto round = [&](auto shifts) {
      float4 next = ptx::load_shared_f32x4(from);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint2 rounded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          constexpr bool kShifts = decltype(shifts)::value;
          const int following = part * kAtOnce + i + 1;
          const float4 chunk = next;
          if (kShifts || following < kChunks) next = ptx::load_shared_f32x4(from + following * 16);
          const float4 x = kShifts ? shifted(chunk, next, shift) : chunk;
          rounded[i] = make_uint2(Element<T>::pack(x.x, x.y), Element<T>::pack(x.z, x.w));
        }
        // Another lane may need what is there.
        if (kLanes > 1) __syncwarp();
#pragma unroll
        for (int i = 0; i < kAtOnce; i += 2) {
          ptx::store_shared_16(to + (part * kAtOnce + i) * 8,
                               make_uint4(rounded[i].x, rounded[i].y, rounded[i + 1].x, rounded[i + 1].y));
        }
      }
    };
    // In most calls all rows begin with chunks, or none of them does.
    if (__any_sync(~0u, shift != 0)) {
      round(std::true_type{});
    } else {
      round(std::false_type{});
    }
  }

 private:
  /// The four elements of two chunks from element `shift`, 0 to 3, on.
  static __device__ __forceinline__ float4 shifted(const float4& first, const float4& second, int32_t shift) {
    const bool by_two = (shift & 2) != 0, by_one = (shift & 1) != 0;
    const float a = by_two ? first.z : first.x, b = by_two ? first.w : first.y, c = by_two ? second.x : first.z;
    const float d = by_two ? second.y : first.w, e = by_two ? second.z : second.x;
    return by_one ? make_float4(b, c, d, e) : make_float4(a, b, c, d);
  }
};

}  // namespace xa
