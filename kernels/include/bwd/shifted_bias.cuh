// The bias in dK and dV where its rows do not begin with chunks of 16 bytes. Of each row the chunks are staged in which
// its part lies, one more than that has. A lane reads single elements, from where the row begins in its first chunk.
#pragma once

#include <cstdint>

#include "bwd/bias_rows.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/shifted_bias_place.cuh"
#include "element.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

template <typename Shape, typename T>
class ShiftedBiasStage {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kChunks = Shape::kStagedKeys / kElements;
  static constexpr int kPitch = Shape::template kStagedPitch<T>;
  static_assert(kPitch >= (kChunks + 1) * 16 && kChunks < 32);

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
    place.chunks = static_cast<const T*>(source.data) + chunk;
    place.shift = static_cast<uint16_t>(first - chunk);
    // Keys before the first one may lie before the bias.
    const auto before = static_cast<int32_t>(chunk < 0 ? min(-chunk / kElements, int64_t{kChunks + 1}) : 0);
    const auto left = static_cast<int32_t>(min(max(end - chunk, int64_t{0}), int64_t{(kChunks + 1) * kElements}));
    place.partial = left / kElements;
    place.rest = left % kElements;
    place.exist = (1u << place.partial) - (1u << before);
    return place;
  }
  /// The bytes from the stage's begin to the first key of a row.
  static __device__ __forceinline__ uint32_t begin(int32_t row, const ShiftedBiasPlace& place) {
    return row * kPitch + place.shift * sizeof(T);
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
      const bool exists = (places[i].exist & 1u << chunk) != 0;
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
        ptx::store_shared_2(address(row, chunk) + j * sizeof(T), 0);
      }
    }
  }
  /// As AlignedBias::start, of the query rows that begin at `begins` and the keys from `column` on.
  template <int kBlocks>
  __device__ __forceinline__ void start(float (&scores)[2][kBlocks][4], const AttentionParams& params,
                                        const uint32_t* begins, int32_t column) const {
    const float factor = bias_factor(params);
    const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
    const uint32_t from = memory_ + (column + g) * sizeof(T);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint2 pair = reinterpret_cast<const uint2*>(begins)[4 * block + t];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t row = from + (i % 2 == 0 ? pair.x : pair.y);
        const T element = {ptx::load_shared_2(row + i / 2 * 8 * sizeof(T))};
        scores[i / 4][block][i % 4] = Element<T>::to_f32(element) * factor;
      }
    }
  }

 private:
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
      const auto* const elements = reinterpret_cast<const uint16_t*>(static_cast<const uint4*>(place.chunks) + chunk);
#pragma unroll 1
      for (int32_t j = 0; j < place.rest; ++j) {
        ptx::store_shared_2(address(row, chunk) + j * sizeof(T), __ldg(elements + j));
      }
    }
  }

  const uint32_t memory_;
};

}  // namespace xa
