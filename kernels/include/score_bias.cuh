// The bias of scores, a number for each pair of a row and a key (BiasSource): where a row of it is, and copies to
// shared memory. Prefill adds it in bias_tile.cuh.
//
// Rows of any length are copied 16 bytes at a time: a row of the bias may begin at any element, so what is copied is
// the aligned chunks that hold a row's part, and a row in shared memory begins up to 15 bytes after its chunks.
//
//     global   ... previous row | row: keys of the block  | ...        16-byte chunks, of which none is read outside
//              |-------|-------|-------|-------|-------|---            of the operand
//     shared            [       |       |       |       ]              a row's chunks; the row begins at its shift
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"

namespace xa {

/// A row of the bias, counted from its first one; kNoBiasRow stands for a row that has no bias.
using BiasRowIndex = uint32_t;
constexpr BiasRowIndex kNoBiasRow = ~0u;

/// The row of query `query` of a sequence, any number, and of query head `head`.
__device__ __forceinline__ BiasRowIndex bias_row_index(const BiasSource& bias, int32_t sequence, int32_t head,
                                                       int32_t query) {
  const uint32_t rows = bias.rows, matrix = sequence * bias.seq_matrices + head * bias.head_matrices;
  return static_cast<uint32_t>(query) < rows ? matrix * rows + query : kNoBiasRow;
}

/// The element of a row without a bias. A multiple of the elements of a chunk.
constexpr int64_t kNoBias = INT64_MIN;

/// The element of row `row` and its key 0.
__device__ __forceinline__ int64_t bias_row(const BiasSource& bias, BiasRowIndex row) {
  return row != kNoBiasRow ? static_cast<int64_t>(row) * static_cast<uint32_t>(bias.keys) : kNoBias;
}

/// Whether the row at element `row` has a bias of key `key`, any number. Where it has none, the bias is 0.
__device__ __forceinline__ bool has_bias(const BiasSource& bias, int64_t row, int32_t key) {
  return row != kNoBias && static_cast<uint32_t>(key) < static_cast<uint32_t>(bias.keys);
}
/// The bits of the bias of such a key.
template <typename E>
__device__ __forceinline__ uint32_t load_bias_bits(const BiasSource& bias, int64_t row, int32_t key) {
  using Bits = std::conditional_t<Element<E>::kIs16Bit, uint16_t, uint32_t>;
  return __ldg(static_cast<const Bits*>(bias.data) + row + key);
}
/// Their value.
template <typename E>
__device__ __forceinline__ float bias_of_bits(uint32_t bits) {
  if constexpr (Element<E>::kIs16Bit) {
    return Element<E>::to_f32(E{static_cast<uint16_t>(bits)});
  } else {
    return __uint_as_float(bits);
  }
}
template <typename E>
__device__ __forceinline__ float bias_at(const BiasSource& bias, int64_t row, int32_t key) {
  return has_bias(bias, row, key) ? bias_of_bits<E>(load_bias_bits<E>(bias, row, key)) : 0.0f;
}

/// Calls `function(E{})` with the element type of the bias or of its gradient: f32 with `is_f32`, else T.
template <typename T, typename Function>
__device__ __forceinline__ void with_bias_type(int32_t is_f32, const Function& function) {
  if constexpr (Element<T>::kIs16Bit) {
    if (is_f32 != 0) return function(float{});
  }
  function(T{});
}
template <typename T, typename Function>
__device__ __forceinline__ void with_bias_type(const BiasSource& bias, const Function& function) {
  with_bias_type<T>(bias.is_wide, function);
}

/// Starts to copy chunk `chunk` of a row's part that begins at key `first_key`, any number: to `to`, where the chunks
/// of the row are, from the row at element `row`. Keys from the end of the row on become zeros.
template <typename E>
__device__ __forceinline__ void stage_bias_chunk(const BiasSource& bias, uint8_t* to, int64_t row, int32_t first_key,
                                                 int32_t chunk) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(E));
  const int64_t end = row + bias.keys;
  const int64_t from = ((row + first_key) & ~static_cast<int64_t>(kElements - 1)) + chunk * kElements;
  const bool exists = row != kNoBias && from < end && from + kElements > row;
  const E* const data = static_cast<const E*>(bias.data);
  to += chunk * 16;
  if (!exists || from + kElements <= end) {
    ptx::cp_async_16(ptx::shared_address(to), data + (exists ? from : 0), exists);
  } else {
    for (int i = 0; i < kElements; ++i) reinterpret_cast<E*>(to)[i] = from + i < end ? data[from + i] : E{};
  }
}

/// Two adjacent elements in shared memory, aligned to both if `kIsAligned`.
template <bool kIsAligned, typename E>
__device__ __forceinline__ float2 load_bias_pair(const E* from) {
  if constexpr (!kIsAligned) {
    return make_float2(Element<E>::to_f32(from[0]), Element<E>::to_f32(from[1]));
  } else if constexpr (Element<E>::kIs16Bit) {
    return unpack<E>(*reinterpret_cast<const uint32_t*>(from));
  } else {
    return *reinterpret_cast<const float2*>(from);
  }
}

}  // namespace xa
