// The bias in dK and dV where its rows do not begin with chunks of 16 bytes, or where it is of f32. Of each row the
// chunks are staged in which its part lies, one more than that has. A lane reads single elements, from where the row
// begins in its first chunk.
//
// Where dS of the block is the gradient of its bias (kReplacesBias), it takes the place of the bias element by element.
// Each element has one lane that reads the bias and writes dS, so warps need not wait for each other. The gradient has
// the same chunks as the bias. Those that the block has as a whole are stored at once:
//
//     chunk          |     0     |     1    |    2     | ... |     16      |
//     the block's    |     5 6 7 | 8 ... 15 | 16 .. 23 | ... | 128 ... 132 |      where the row's first key is element
//     5 are stored as    elements      chunk      chunk          elements
#pragma once

#include <cstdint>
#include <type_traits>

#include "bwd/bias_rows.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/sequence_segment.cuh"
#include "bwd/shifted_bias_place.cuh"
#include "element.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

/// `E` is the type of the bias, and of dS that takes its place.
template <typename Shape, typename E>
class ShiftedBiasStage {
  using Bits = std::conditional_t<sizeof(E) == 2, uint16_t, uint32_t>;
  using Mask = std::conditional_t<sizeof(E) == 2, uint32_t, uint64_t>;
  static constexpr int kElements = 16 / static_cast<int>(sizeof(E)), kChunks = Shape::kStagedKeys / kElements;
  static constexpr int kPitch = Shape::template kStagedPitch<E>;
  static_assert(kPitch >= (kChunks + 1) * 16 && kChunks <= 32);

 public:
  static constexpr int kBytes = Shape::kStagedRows * kPitch;

  __device__ __forceinline__ ShiftedBiasStage(uint8_t* memory) : memory_(ptx::shared_address(memory)) {}

  /// The place of the row from element `row` on, kNoBias if there is none, and the keys from `first_key` on, any
  /// number.
  static __device__ __forceinline__ ShiftedBiasPlace place_of(const BiasBackwardParams& params, int64_t row,
                                                              int32_t first_key) {
    const BiasSource& source = params.bias;
    ShiftedBiasPlace place = {source.data, 0, 0, 0, 0};
    if (row == kNoBias) return place;
    const uint32_t rows = params.seqs * params.heads * source.rows;
    const auto end = static_cast<int64_t>(static_cast<uint64_t>(rows) * static_cast<uint32_t>(source.keys));
    const int64_t first = row + first_key, chunk = first & -kElements;
    place.chunks = static_cast<const E*>(source.data) + chunk;
    place.shift = static_cast<uint16_t>(first - chunk);
    // Keys before the first one may lie before the bias.
    const auto before = static_cast<int32_t>(chunk < 0 ? min(-chunk / kElements, int64_t{kChunks + 1}) : 0);
    const auto left = static_cast<int32_t>(min(max(end - chunk, int64_t{0}), int64_t{(kChunks + 1) * kElements}));
    if (kChunks == 32 && before > kChunks) return place;
    place.partial = left / kElements;
    place.rest = left % kElements;
    place.exist = static_cast<uint32_t>((Mask{1} << place.partial) - (Mask{1} << before));
    return place;
  }
  /// The bytes from the stage's begin to the first key of a row.
  static __device__ __forceinline__ uint32_t begin(int32_t row, const ShiftedBiasPlace& place) {
    return row * kPitch + place.shift * sizeof(E);
  }

  /// Starts to copy the bias of the rows whose places are `place_of(row)`. All threads of the CTA call it.
  template <typename PlaceOf>
  __device__ __forceinline__ void fetch(const PlaceOf& place_of) const {
    const OwnChunks own;
    // All places first: the copies wait for them once then.
    ShiftedBiasPlace places[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) places[i] = place_of(own.row(i));
    uint32_t rests = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (!own.has(i)) break;
      const int32_t chunk = own.chunk(i);
      // There is no bit for chunk 32. It comes last, so it exists if those before do and end after it.
      const bool is_past_bits = kChunks == 32 && i == kCopies - 1;
      const bool exists = is_past_bits ? places[i].partial > kChunks : (places[i].exist & 1u << chunk) != 0;
      ptx::cp_async_16(address(own.row(i), chunk), static_cast<const uint4*>(places[i].chunks) + chunk, exists);
      rests |= places[i].rest;
    }
    // Few rows are at the end of the bias.
    if (__builtin_expect(rests != 0, false)) copy_rests(place_of);
  }
  /// Sets the bias of the block's keys from `key` on to 0, when this thread's copies are complete.
  template <typename PlaceOf>
  __device__ __forceinline__ void clear_from(int32_t key, const PlaceOf& place_of) const {
    const OwnChunks own;
#pragma unroll 1
    for (int i = 0; i < kCopies && own.has(i); ++i) {
      const int32_t row = own.row(i), chunk = own.chunk(i);
#pragma unroll 1
      for (int32_t j = max(key + place_of(row).shift - chunk * kElements, 0); j < kElements; ++j) {
        store_shared(address(row, chunk) + j * sizeof(E), Bits{0});
      }
    }
  }
  /// As AlignedBias::start, of the query rows that begin at `begins` and the keys from `column` on.
  template <int kBlocks>
  __device__ __forceinline__ void start(float (&scores)[2][kBlocks][4], const AttentionParams& params,
                                        const uint32_t* begins, int32_t column) const {
    const float factor = bias_factor(params);
    for_pairs<kBlocks>(begins, column, [&](int block, int keys, uint32_t first, uint32_t second) {
      float* const x = scores[keys / 2][block] + keys % 2 * 2;
      x[0] = bias_of_bits<E>(load_shared(first)) * factor;
      x[1] = bias_of_bits<E>(load_shared(second)) * factor;
    });
  }
  /// Stores dS of the scores that `start` had to where their bias was.
  template <int kBlocks>
  __device__ __forceinline__ void replace(const float (&ds)[2][kBlocks][4], const uint32_t* begins,
                                          int32_t column) const {
    for_pairs<kBlocks>(begins, column, [&](int block, int keys, uint32_t first, uint32_t second) {
      const float* const x = ds[keys / 2][block] + keys % 2 * 2;
      if constexpr (sizeof(E) == 2) {
        const uint32_t elements = Element<E>::pack(x[0], x[1]);
        store_shared(first, static_cast<uint16_t>(elements));
        store_shared(second, static_cast<uint16_t>(elements >> 16));
      } else {
        store_shared(first, __float_as_uint(x[0]));
        store_shared(second, __float_as_uint(x[1]));
      }
    });
  }
  /// The chunk that has column `column` of the row of dS from element `row` on; null for kNoBias. `ds` is its element
  /// 0.
  static __device__ __forceinline__ E* chunks_of(E* ds, int64_t row, int32_t column) {
    return row == kNoBias ? nullptr : ds + ((row + column) & -kElements);
  }
  /// Stores dS of all rows to global memory, when all warps have called `replace` and a barrier has passed. `rows` are
  /// the `chunks_of` the block's first key. Only `keys` of the block exist. All threads of the CTA call it.
  __device__ __forceinline__ void store(E* const* rows, const uint32_t* begins, ColumnRange keys) const {
    if (keys.end - keys.begin == Shape::kStagedKeys) {
      // Outside of whole chunks a row has as many elements as a chunk has: those of the first chunk, then those of the
      // last one. If the row begins with a chunk, that one is stored by elements too.
      store_chunks(rows, [](uint32_t, int32_t chunk) { return chunk != 0; });
      store_elements(rows, [&](uint32_t row, int32_t index) {
        const int32_t at = index + shift_of(row, begins);
        return at < kElements ? at : at + Shape::kStagedKeys - kElements;
      });
    } else if (keys.begin < keys.end) {
      const auto part_of = [&](uint32_t row) {
        return ColumnRange{shift_of(row, begins) + keys.begin, shift_of(row, begins) + keys.end};
      };
      store_chunks(rows, [&](uint32_t row, int32_t chunk) {
        const ColumnRange part = part_of(row);
        return chunk * kElements >= part.begin && (chunk + 1) * kElements <= part.end;
      });
      store_elements(rows, [&](uint32_t row, int32_t index) {
        const ColumnRange part = part_of(row);
        const int32_t at = (part.begin & -kElements) + index;
        return at >= part.begin && at < part.end ? at : -1;
      });
      store_elements(rows, [&](uint32_t row, int32_t index) {
        const ColumnRange part = part_of(row);
        const int32_t at = (part.end & -kElements) + index;
        return at >= part.begin && at < part.end ? at : -1;
      });
    }
  }

 private:
  /// Calls `visit(block, keys, first, second)` for each pair of the lane's scores, which are of two adjacent query rows
  /// of block `block` and a key of the `keys`-th 8, with the addresses of their elements.
  template <int kBlocks, typename Visit>
  __device__ __forceinline__ void for_pairs(const uint32_t* begins, int32_t column, const Visit& visit) const {
    const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
    const uint32_t from = memory_ + (column + g) * sizeof(E);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint2 pair = reinterpret_cast<const uint2*>(begins)[4 * block + t];
#pragma unroll
      for (int keys = 0; keys < 4; ++keys) {
        const uint32_t of_keys = from + keys * 8 * sizeof(E);
        visit(block, keys, of_keys + pair.x, of_keys + pair.y);
      }
    }
  }
  /// Which element of its first chunk a row begins with.
  static __device__ __forceinline__ int32_t shift_of(uint32_t row, const uint32_t* begins) {
    return (begins[row] - row * kPitch) / sizeof(E);
  }
  /// Stores those chunks that `selects(row, chunk)`.
  template <typename Selects>
  __device__ __forceinline__ void store_chunks(E* const* rows, const Selects& selects) const {
    constexpr int kStores = Shape::kStagedRows / kStep;
    const uint32_t thread = ptx::thread(), chunk = thread % kChunks, first_row = thread / kChunks;
    // All loads first: the stores wait for them once then.
    E* to[kStores];
    uint4 chunks[kStores];
    bool selected[kStores];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const uint32_t row = first_row + i * kStep;
      to[i] = rows[row];
      selected[i] = selects(row, chunk);
      chunks[i] = ptx::load_shared_16(address(row, chunk));
    }
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      if ((to[i] != nullptr) & selected[i]) ptx::store_global_16(to[i] + chunk * kElements, chunks[i]);
    }
  }
  /// Stores kElements elements per row, `element_of(row, index)` of its chunks; none if that is negative.
  template <typename ElementOf>
  __device__ __forceinline__ void store_elements(E* const* rows, const ElementOf& element_of) const {
    constexpr int kRows = Shape::kThreads / kElements, kStores = Shape::kStagedRows / kRows;
    static_assert(kStores * kRows == Shape::kStagedRows);
    const uint32_t thread = ptx::thread(), first_row = thread / kElements;
    E* to[kStores];
    int32_t at[kStores];
    Bits elements[kStores];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const uint32_t row = first_row + i * kRows;
      to[i] = rows[row];
      at[i] = element_of(row, thread % kElements);
      elements[i] = load_shared(address(row, 0) + max(at[i], 0) * sizeof(E));
    }
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      if ((to[i] != nullptr) & (at[i] >= 0)) store_global(to[i] + at[i], elements[i]);
    }
  }
  static __device__ __forceinline__ Bits load_shared(uint32_t from) {
    if constexpr (sizeof(E) == 2) {
      return ptx::load_shared_2(from);
    } else {
      return __float_as_uint(ptx::load_shared_f32(from));
    }
  }
  static __device__ __forceinline__ void store_shared(uint32_t to, Bits x) {
    if constexpr (sizeof(E) == 2) {
      ptx::store_shared_2(to, x);
    } else {
      ptx::store_shared_4(to, x);
    }
  }
  static __device__ __forceinline__ void store_global(E* to, Bits x) {
    if constexpr (sizeof(E) == 2) {
      ptx::store_global_2(to, x);
    } else {
      ptx::store_global_4(to, x);
    }
  }
  __device__ __forceinline__ uint32_t address(int32_t row, int32_t chunk) const {
    return memory_ + row * kPitch + chunk * 16;
  }
  /// The rows that all threads copy a chunk of at a time, except the last one, which few lanes copy.
  static constexpr int kStep = Shape::kThreads / kChunks, kLanes = 32 * Shape::kStagedRows / Shape::kThreads;
  static constexpr int kCopies = Shape::kStagedRows / kStep + 1;
  static_assert(Shape::kThreads % kChunks == 0 && Shape::kStagedRows % kStep == 0 && kLanes <= 32);
  /// Row and chunk of copy `i` of this thread, if it has such a copy.
  struct OwnChunks {
    const int32_t thread = ptx::thread();

    __device__ __forceinline__ bool has(int i) const { return i < kCopies - 1 || thread % 32 < kLanes; }
    __device__ __forceinline__ int32_t row(int i) const {
      return i < kCopies - 1 ? i * kStep + thread / kChunks : thread / 32 * kLanes + thread % kLanes;
    }
    __device__ __forceinline__ int32_t chunk(int i) const { return i < kCopies - 1 ? thread % kChunks : kChunks; }
  };

  /// Copies the elements of chunks that lie in the bias in part, which have become zeros.
  template <typename PlaceOf>
  __device__ __forceinline__ void copy_rests(const PlaceOf& place_of) const {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    const OwnChunks own;
#pragma unroll 1
    for (int i = 0; i < kCopies && own.has(i); ++i) {
      const int32_t row = own.row(i), chunk = own.chunk(i);
      const ShiftedBiasPlace place = place_of(row);
      if (chunk != place.partial) continue;
      const auto* const elements = reinterpret_cast<const Bits*>(static_cast<const uint4*>(place.chunks) + chunk);
#pragma unroll 1
      for (int32_t j = 0; j < place.rest; ++j) {
        store_shared(address(row, chunk) + j * sizeof(E), __ldg(elements + j));
      }
    }
  }

  const uint32_t memory_;
};

}  // namespace xa
