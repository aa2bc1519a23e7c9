// dS in shared memory for dQ = dS K: kHeld query rows of a CTA and a block of kKeys keys, copied from where
// attention_bwd_dkdv has stored it (ScoreGradientRow). Each warp copies rows of its own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/key_order.cuh"
#include "bwd/products.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/score_gradients.cuh"
#include "chunk_window.cuh"
#include "element.cuh"
#include "key_ranges.cuh"
#include "ptx.cuh"
#include "shared_rows.cuh"

namespace xa {

/// Copies rows of dS of a segment, of elements of kElementBytes. With kIsShifted they begin anywhere: the chunks in
/// which the block's part of a row lies are copied, one more than that has.
template <int kHeld, int kKeys, int kThreads, int kElementBytes, bool kIsShifted_>
class DsCopies {
 public:
  static constexpr bool kIsShifted = kIsShifted_;

 protected:
  static constexpr int kElements = 16 / kElementBytes, kChunks = kKeys / kElements;
  /// The rows of a warp, and those of which it copies a chunk at a time, kCopies times.
  static constexpr int kRows = kHeld / (kThreads / 32), kStep = 32 / kChunks, kCopies = kRows / kStep;
  static_assert(kRows % kStep == 0 && kRows <= 32);

  __device__ __forceinline__ DsCopies(const void* ds, const ScoreGradientRow* rows)
      : ds_(static_cast<const uint8_t*>(ds)), rows_(rows) {
    const ScoreGradientRow own = rows[own_row()];
    // Indices of chunks have 32 bits, which is 64 GiB of dS.
    const bool has_index = own.element / kElements <= UINT32_MAX;
    common_ = {warp_max(has_index ? own.begin : own.end), warp_min(own.end)};
#pragma unroll
    for (int i = 0; i < kCopies; ++i) indices_[i] = index_of(rows[row(i)]) + chunk();
    if constexpr (kIsShifted) last_index_ = index_of(own) + kChunks;
  }

  static __device__ __forceinline__ uint32_t lane() { return static_cast<uint32_t>(ptx::thread()) % 32; }
  static __device__ __forceinline__ uint32_t first_row() { return static_cast<uint32_t>(ptx::thread()) / 32 * kRows; }
  /// The row and the chunk of copy `i` of this thread.
  static __device__ __forceinline__ uint32_t row(int i) { return first_row() + lane() / kChunks + i * kStep; }
  static __device__ __forceinline__ uint32_t chunk() { return lane() % kChunks; }
  /// The row of the warp of which this thread copies the chunk past the block's keys.
  static __device__ __forceinline__ uint32_t own_row() { return first_row() + lane() % kRows; }
  /// Which element of its chunk column 0 is.
  static __device__ __forceinline__ int32_t shift_of(const ScoreGradientRow& row) {
    return static_cast<int32_t>(row.element) & (kElements - 1);
  }
  __device__ __forceinline__ const ScoreGradientRow* rows() const { return rows_; }

  /// Starts to copy the columns from `column` on, a multiple of 8: copy `i` to `place(i)`, and the last chunk of
  /// `own_row` to `last`.
  template <typename Place>
  __device__ __forceinline__ void copy(int32_t column, const Place& place, uint32_t last = 0) const {
    constexpr int32_t kCopied = kKeys + (kIsShifted ? kElements : 0);
    if (column >= common_.begin && column + kCopied <= common_.end) {
      // Opaque, so that each address is one sum with it, and not of three numbers.
      const uint4* const from = ptx::opaque(reinterpret_cast<const uint4*>(bytes_of(column)));
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if constexpr (kKeys * kElementBytes < 256) {  // of which the next block has the rest
          ptx::cp_async_16_of_256(place(i), from + indices_[i], true);
        } else {
          ptx::cp_async_16(place(i), from + indices_[i], true);
        }
      }
      if (has_last_chunk()) ptx::cp_async_16(last, from + last_index_, true);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) copy_part(column, row(i), chunk(), place(i));
    if (has_last_chunk()) copy_part(column, own_row(), kChunks, last);
  }

  /// The same to rows that are kPitch bytes apart from `stage` on.
  template <int kPitch>
  __device__ __forceinline__ void copy_to(int32_t column, uint32_t stage) const {
    const uint32_t first = stage + row(0) * kPitch + chunk() * 16;
    copy(column, [=](int i) { return first + i * kStep * kPitch; }, stage + own_row() * kPitch + kChunks * 16);
  }

 private:
  static __device__ __forceinline__ uint32_t index_of(const ScoreGradientRow& row) { return row.element / kElements; }
  static __device__ __forceinline__ bool has_last_chunk() { return kIsShifted && (kRows == 32 || lane() < kRows); }
  __device__ __forceinline__ const uint8_t* bytes_of(int64_t element) const { return ds_ + element * kElementBytes; }

  /// Starts to copy a chunk of a row; one of which the row attends to no key becomes zeros.
  __device__ __forceinline__ void copy_part(int32_t column, uint32_t row, int32_t chunk, uint32_t to) const {
    const ScoreGradientRow of = rows_[row];
    const int32_t first = column + kElements * chunk - (kIsShifted ? shift_of(of) : 0);
    const bool exists = of.template attends<kElements>(first);
    // Elements past the last key of a shifted row become zeros: they may be those of another row.
    const int32_t bytes = kIsShifted ? min(of.end - first, kElements) * kElementBytes : 16;
    ptx::cp_async_16_of(to, exists ? bytes_of(of.element + first) : ds_, exists ? bytes : 0);
  }

  const uint8_t* const ds_;
  const ScoreGradientRow* const rows_;
  /// The columns to which all rows of the warp attend.
  ColumnRange common_;
  /// The chunks of column 0 in dS, plus the chunk that the thread copies.
  uint32_t indices_[kCopies];
  uint32_t last_index_;
};

/// Where rows of dS begin with chunks.
template <typename T, int kHeld, int kKeys, int kThreads>
class AlignedDsStage : DsCopies<kHeld, kKeys, kThreads, 2, false> {
  using Rows = SwizzledRows<2 * kKeys>;
  using Base = DsCopies<kHeld, kKeys, kThreads, 2, false>;

 public:
  using Base::kIsShifted;
  using Ds = T;
  using Keys = KeysInOrder;
  static constexpr int kBytes = kHeld * Rows::kPitch;

  /// Operand A of `accumulate`: the warp's rows from `first_row` on of the stage at shared address `stage`.
  struct Operand {
    static constexpr int kRows = kKeys;
    uint32_t address;

    __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
      ptx::ldmatrix_x4(fragment, Rows::moved(address, 16 * tile, 2 * step));
    }
  };

  /// For the rows of dS that `rows` describes; the warp multiplies those from `first_row` on.
  __device__ __forceinline__ AlignedDsStage(const T* ds, const ScoreGradientRow* rows, int32_t first_row)
      : Base(ds, rows), from_(first_row * Rows::kPitch + Rows::offset(threadIdx.x % 16, threadIdx.x % 32 / 16)) {}

  /// Starts to copy the columns from `column` on, a multiple of 8. Chunks of which a row attends to no key become
  /// zeros.
  __device__ __forceinline__ void fetch(int32_t column, uint32_t stage) const {
    const uint32_t first = stage + Rows::offset(Base::row(0), Base::chunk());
    Base::copy(column, [=](int i) { return Rows::stepped(first, i * Base::kStep); });
  }
  /// Completes the rows of the warp when its threads' copies have arrived.
  __device__ __forceinline__ void settle(uint32_t) const {}
  __device__ __forceinline__ Operand operand(uint32_t stage) const { return {stage + from_}; }

 private:
  const uint32_t from_;
};

/// Where rows begin anywhere. The 16-bit elements of a row then begin where its chunks did.
template <typename T, typename Ds_, int kHeld, int kKeys, int kThreads>
class UnalignedDsStage : protected DsCopies<kHeld, kKeys, kThreads, static_cast<int>(sizeof(Ds_)), true> {
 protected:
  using Base = DsCopies<kHeld, kKeys, kThreads, static_cast<int>(sizeof(Ds_)), true>;
  static constexpr int kPitch = kKeys * static_cast<int>(sizeof(Ds_)) + 16;
  /// Lanes that shift a row, and the chunks that each of them shifts, kAtOnce before it stores them.
  static constexpr int kLanes = 32 / Base::kRows, kChunks = Base::kChunks / kLanes;
  static constexpr int kAtOnce = kChunks < 4 ? kChunks : 4, kParts = kChunks / kAtOnce;
  static_assert(kLanes * kParts * kAtOnce == Base::kChunks);

  /// The row that this lane shifts.
  static __device__ __forceinline__ int32_t shifted_row() { return Base::first_row() + Base::lane() / kLanes; }

 public:
  using Base::kIsShifted;
  using Ds = Ds_;
  using Keys = KeysInOrder;
  using Operand = SharedOperand<kKeys, kPitch>;
  static constexpr int kBytes = kHeld * kPitch;

  __device__ __forceinline__ UnalignedDsStage(const Ds* ds, const ScoreGradientRow* rows, int32_t first_row)
      : Base(ds, rows), first_row_(first_row) {}

  __device__ __forceinline__ void fetch(int32_t column, uint32_t stage) const {
    Base::template copy_to<kPitch>(column, stage);
  }
  __device__ __forceinline__ Operand operand(uint32_t stage) const { return Operand(stage + first_row_ * kPitch); }

 private:
  const int32_t first_row_;
};

/// The same of 16 bits.
template <typename T, int kHeld, int kKeys, int kThreads>
class ShiftedDsStage : public UnalignedDsStage<T, T, kHeld, kKeys, kThreads> {
  using Base = UnalignedDsStage<T, T, kHeld, kKeys, kThreads>;
  using Base::kAtOnce, Base::kChunks, Base::kLanes, Base::kParts, Base::kPitch;

 public:
  using Base::Base;

  __device__ __forceinline__ void settle(uint32_t stage) const {
    const int32_t row = Base::shifted_row(), shift = Base::shift_of(Base::rows()[row]);
    const uint32_t from = stage + row * kPitch + ptx::thread() % kLanes * kChunks * 16;
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

/// The same of f32. They are rounded when they are shifted.
template <typename T, int kHeld, int kKeys, int kThreads>
class F32DsStage : public UnalignedDsStage<T, float, kHeld, kKeys, kThreads> {
  using Base = UnalignedDsStage<T, float, kHeld, kKeys, kThreads>;
  using Base::kAtOnce, Base::kChunks, Base::kLanes, Base::kParts, Base::kPitch;
  static_assert(kAtOnce == 4 && (kLanes == 1 || kParts == 1));

 public:
  using Base::Base;

  __device__ __forceinline__ void settle(uint32_t stage) const {
    const int32_t row = Base::shifted_row(), shift = Base::shift_of(Base::rows()[row]);
    const int32_t first = ptx::thread() % kLanes * kChunks;
    const uint32_t from = stage + row * kPitch + first * 16, to = stage + row * kPitch + first * 8;
    __syncwarp();
    float4 next = ptx::load_shared_f32x4(from);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint2 rounded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float4 chunk = next;
        next = ptx::load_shared_f32x4(from + (part * kAtOnce + i + 1) * 16);
        const float4 x = shifted(chunk, next, shift);
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

/// Where rows of f32 begin with chunks. They are rounded when they are read: a lane has the eight keys of two chunks.
template <typename T, int kHeld, int kKeys, int kThreads>
class AlignedF32DsStage : DsCopies<kHeld, kKeys, kThreads, 4, false> {
  using Base = DsCopies<kHeld, kKeys, kThreads, 4, false>;
  /// Chunks of two adjacent rows, of every second column, are in different banks.
  static constexpr int kPitch = kKeys * 4 + 16;

 public:
  using Base::kIsShifted;
  using Ds = float;
  using Keys = KeysOfLanes;
  static constexpr int kBytes = kHeld * kPitch;

  struct Operand {
    static constexpr int kRows = kKeys;
    uint32_t address;

    __device__ __forceinline__ void get(uint32_t (&fragment)[4], int tile, int step) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t row = address + (16 * tile + 8 * half) * kPitch;
        const float4 keys = ptx::load_shared_f32x4(row + step / 2 * 128 + step % 2 * 16);
        fragment[half] = Element<T>::pack(keys.x, keys.y);
        fragment[half + 2] = Element<T>::pack(keys.z, keys.w);
      }
    }
  };

  __device__ __forceinline__ AlignedF32DsStage(const float* ds, const ScoreGradientRow* rows, int32_t first_row)
      : Base(ds, rows), from_((first_row + threadIdx.x % 32 / 4) * kPitch + threadIdx.x % 4 * 32) {}

  __device__ __forceinline__ void fetch(int32_t column, uint32_t stage) const {
    Base::template copy_to<kPitch>(column, stage);
  }
  __device__ __forceinline__ void settle(uint32_t) const {}
  __device__ __forceinline__ Operand operand(uint32_t stage) const { return {stage + from_}; }

 private:
  const uint32_t from_;
};

}  // namespace xa
