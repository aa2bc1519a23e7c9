// dS in global memory (ScoreGradients), where attention_bwd_dkdv stores it and the kernels after it read it. Where a
// mask hides a pair, zeros are stored.
//
// Rows of query heads and tokens begin with chunks of 8 keys, of which a thread stores all elements. A chunk of which a
// row attends to no key may never have been stored. Rows that are those of the bias begin anywhere (up to 128 columns
// shifted_bias.cuh stores them unless they begin with chunks), and all their elements have been stored, because dS is
// its gradient.
#pragma once

#include <cstdint>

#include "bwd/row_blocks.cuh"
#include "bwd/sequence_segment.cuh"
#include "chunk_window.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"
#include "work_tile.cuh"

namespace xa {

/// The column of a sequence's key 0; its first key is row `start_k` of K.
__device__ __forceinline__ int32_t column_of_key_0(const BiasBackwardParams& params, int32_t start_k) {
  return params.ds.has_token_rows != 0 && key_period() == params.backward.forward.capacity ? start_k & 7 : 0;
}

/// dK/dV: the column of row 0 of the block.
__device__ __forceinline__ int32_t first_column(const BiasBackwardParams& params, const SequenceSegment& segment) {
  return segment.first_key + column_of_key_0(params, segment.tile.start_k);
}

/// The first element of the row of a query, of row `token` of q; kNoBias if it has none.
__device__ __forceinline__ int64_t score_gradient_row(const BiasBackwardParams& params, int32_t sequence, int32_t head,
                                                      int32_t query, int32_t token) {
  uint32_t row = static_cast<uint32_t>(head) * params.backward.forward.num_tokens + token;
  if (params.ds.has_token_rows == 0) row = bias_row_index(params.bias, sequence, head, query);
  return row != kNoBiasRow ? static_cast<int64_t>(row) * static_cast<uint32_t>(params.ds.pitch) : kNoBias;
}

/// Whether dS of all pairs of a sequence is stored. Rows and keys past those of the bias are not.
__device__ __forceinline__ bool has_all_score_gradients(const BiasBackwardParams& params, const QoTile& sequence) {
  return params.ds.data != nullptr && sequence.len_q <= params.bias.rows && sequence.len_k <= params.bias.keys;
}

/// Elements [begin, end) of a row of dS that belong to the keys that the row attends to.
struct ScoreGradientRow {
  int64_t element;  // of column 0
  int32_t begin;
  int32_t end;

  /// The row at `first_element` of a query that attends to keys [first_key, end_key); key 0 is in column `key_0`.
  static __device__ __forceinline__ ScoreGradientRow of(int64_t first_element, int32_t first_key, int32_t end_key,
                                                        int32_t key_0) {
    if (first_key >= end_key) return {0, 0, 0};
    return {first_element, first_key + key_0, end_key + key_0};
  }
  /// Whether the row attends to some key of the chunk of kElements from `column` on.
  template <int kElements = 8>
  __device__ __forceinline__ bool attends(int32_t column) const {
    // In one comparison: columns from begin - (kElements - 1) to end - 1.
    constexpr int32_t kBefore = kElements - 1;
    return static_cast<uint32_t>(column - begin + kBefore) < static_cast<uint32_t>(end - begin + kBefore);
  }
};

/// Stores the 32 elements of a row that adjacent lanes of four have, `pairs` 8 each, in columns `column`, any number,
/// to `column + 31` of the row from `element` on; those do not exist that `exists(column)` says so of, and none with
/// kNoBias. Lane t has elements 8t to 8t + 7. It stores the chunk of 16 bytes that begins among these, and gets the
/// rest of it from the next lane. That of the last lane is two parts of chunks, at both ends of the 32 elements.
template <typename T, typename Exists>
__device__ __forceinline__ void store_shifted_row(T* data, int64_t element, int32_t column, const uint32_t (&pairs)[4],
                                                  const Exists& exists) {
  const int32_t lane = ptx::thread() % 32, part = lane % 4, next = part == 3 ? lane - 3 : lane + 1;
  const int32_t shift = -static_cast<int32_t>(element + column) & 7;
  ChunkWindow window = {make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]), {}};
  window.second = make_uint4(__shfl_sync(~0u, pairs[0], next), __shfl_sync(~0u, pairs[1], next),
                             __shfl_sync(~0u, pairs[2], next), __shfl_sync(~0u, pairs[3], next));
  if (element == kNoBias) return;
  const uint4 chunk = window.from(shift);
  const int32_t first = column + 8 * part + shift;
  T* const to = data + element + first;
  // The last lane's elements from this one on precede those of the first lane's chunk.
  const int32_t end = part == 3 ? 8 - shift : 8;
  if (end == 8 && exists(first) && exists(first + 7)) {
    *reinterpret_cast<uint4*>(to) = chunk;
    return;
  }
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t offset = i < end ? i : i - 32;
    if (exists(first + offset)) to[offset] = T{static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)};
  }
}

/// Stores dS of 8 kBlocks query rows and 32 keys as 16 bytes per lane and 8 rows. It is in shared memory, a row for
/// each key, kPitch bytes apart from `from` on; `rows` are the first elements of the query rows. The keys are in
/// columns `column`, any number, to `column + 31`. Unless kIsShifted, query rows begin with chunks.
template <int kPitch, bool kIsSwizzled, bool kIsShifted, typename T, int kBlocks = 4>
__device__ __forceinline__ void store_score_gradients(const ScoreGradients& ds, uint32_t from, int32_t column,
                                                      const int64_t* rows) {
  // Lane t of four gets keys 8t to 8t + 7 of a query row: 2m and 2m + 1 of those 8 from matrix m.
  const int32_t lane = ptx::thread() % 32, row = lane % 8, key = row / 2 * 8 + lane / 8 * 2 + row % 2;
  const int32_t first = column + lane % 4 * 8;
  const auto exists = [&](int32_t column) { return static_cast<uint32_t>(column) < static_cast<uint32_t>(ds.pitch); };
  T* const data = static_cast<T*>(ds.data);
  const auto load = [&](uint32_t (&pairs)[4], int block) {
    ptx::ldmatrix_x4_trans(pairs, from + key * kPitch + (kIsSwizzled ? block ^ key / 8 : block) * 16);
  };
  if (column % 8 == 0 && (!kIsShifted || ds.pitch % 8 == 0)) {
    // All rows first: the stores wait for them once then.
    int64_t elements[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) elements[block] = rows[8 * block + lane / 4];
    const bool inside = exists(first);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t pairs[4];
      load(pairs, block);
      if (!inside || elements[block] == kNoBias) continue;
      *reinterpret_cast<uint4*>(data + elements[block] + first) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  } else {
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t pairs[4];
      load(pairs, block);
      const int64_t element = rows[8 * block + lane / 4];
      if constexpr (kIsShifted) {
        store_shifted_row(data, element, column, pairs, exists);
        continue;
      }
      if (element == kNoBias) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto bits = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
        if (exists(first + i)) data[element + first + i] = T{bits};
      }
    }
  }
}

/// Stores dS of a warp's 32 keys and 32 query rows to shared memory in the form that `store_score_gradients` takes,
/// swizzled: to `to`, in rows kPitch bytes apart.
template <typename T, int kPitch>
__device__ __forceinline__ void stage_score_gradients(uint8_t* to, const float (&ds)[2][4][4]) {
  const int32_t lane = ptx::thread() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int keys = 2 * tile + half;  // 8 of them
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const float (&x)[4] = ds[tile][block];
        T* const pair = reinterpret_cast<T*>(to + (8 * keys + g) * kPitch + (block ^ keys) * 16) + 2 * t;
        store_columns(pair, make_float2(x[2 * half], x[2 * half + 1]));
      }
    }
  }
}

}  // namespace xa
