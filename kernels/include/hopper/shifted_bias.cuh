// A bias whose rows begin at any element, such as each pair's own of an odd number of keys, or whose elements are f32
// beside 16-bit operands; otherwise as bias.cuh. TMA does not load such rows, and a copy of them takes as long as it
// saves. The bias warp copies the chunks of 16 bytes in which a row's part of a block lies, one more than that has, and
// a lane of the compute warps reads single elements, from where the row begins in its first chunk.
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"
#include "hopper/bias.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/shape.cuh"
#include "params/bias.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// The elements of the bias of a kernel for q of type T.
template <typename Shape, typename T>
using BiasElement = std::conditional_t<Shape::kBiasElementBytes == 4, float, T>;

/// The rows of a tile in a bias of elements E.
template <typename E>
struct ShiftedBiasRows {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(E));  // of a chunk

  const BiasSource& bias;
  int64_t first;  // the first row, counted over all matrices
  int32_t count;  // rows of its matrix from that one on

  __device__ __forceinline__ ShiftedBiasRows(const BiasSource& bias, const BiasTile& tile)
      : bias(bias),
        first(static_cast<int64_t>(bias_matrix(bias, tile)) * bias.rows + tile.first_query),
        count(bias.rows - tile.first_query) {}

  /// Which element of its first chunk a block's part of row `row` begins with. It is the same for all blocks, whose
  /// keys are multiples of a chunk's, and for rows eight apart.
  __device__ __forceinline__ int32_t shift(int32_t row) const {
    const auto element = (static_cast<uint32_t>(first) + row) * static_cast<uint32_t>(bias.keys);
    return static_cast<int32_t>(element % kElements);
  }
  /// The element of row `row` and key `key`.
  __device__ __forceinline__ int64_t element(int32_t row, int32_t key) const { return (first + row) * bias.keys + key; }
};

/// Copies the bias of a tile and of a block of keys to `to`. Executed by a warp.
template <typename Shape, typename E>
class ShiftedBiasLoad {
  using Rows = ShiftedBiasRows<E>;
  static constexpr int kElements = Rows::kElements, kChunks = Shape::kKeys / kElements;
  /// Rows that a warp copies at a time, and lanes that share one. Rows eight apart begin at the same element of a
  /// chunk.
  static constexpr int kRowsAtOnce = 8, kLanes = 32 / kRowsAtOnce;
  static_assert(kChunks % kLanes == 0 && Shape::kRows % 32 == 0);

 public:
  __device__ __forceinline__ ShiftedBiasLoad(const Rows& rows, uint8_t* to, int32_t first_key)
      : rows_(rows), to_(to), first_key_(first_key) {}

  /// Starts to copy all chunks of the rows' parts that end before the rows do. The others become zeros, and so do rows
  /// past the last one. Returns whether that is all of the bias.
  __device__ __forceinline__ bool copy_chunks() const {
    const int32_t first = lane() / kLanes, first_chunk = lane() % kLanes, whole = whole_chunks(first) - first_chunk;
    const int64_t step = static_cast<int64_t>(rows_.bias.keys) * (kRowsAtOnce * sizeof(E));
    const int32_t count = rows_.count - first;
    const uint8_t* from = chunk_at(first, first_chunk);
    const uint32_t shared = xa::ptx::shared_address(to_), to = shared + first * Shape::kBiasPitch + first_chunk * 16;
#pragma unroll 8
    for (int row = 0; row < Shape::kRows; row += kRowsAtOnce, from += step) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += kLanes) {
        xa::ptx::cp_async_16(to + row * Shape::kBiasPitch + chunk * 16, from + chunk * 16,
                             row < count && chunk < whole);
      }
    }
    if (rows_.bias.keys % kElements != 0) {
#pragma unroll 1
      for (int row = 0; row < Shape::kRows; row += 32) {
        xa::ptx::cp_async_16(shared + (row + lane()) * Shape::kBiasPitch + kChunks * 16,
                             chunk_at(row + lane(), kChunks),
                             row + lane() < rows_.count && kChunks < whole_chunks(row + lane()));
      }
    }
    return rows_.bias.keys % kElements == 0 || first_key_ + Shape::kKeys + kElements <= rows_.bias.keys;
  }
  /// Copies the elements of chunks in which rows end, which have become zeros.
  __device__ __forceinline__ void copy_ends() const {
#pragma unroll 1
    for (int32_t row = lane(); row < min(Shape::kRows, rows_.count); row += 32) {
      const int32_t chunk = whole_chunks(row), count = elements(row) - chunk * kElements;
      const auto* const from = reinterpret_cast<const Bits*>(chunk_at(row, chunk));
      auto* const to = reinterpret_cast<Bits*>(to_ + row * Shape::kBiasPitch + chunk * 16);
#pragma unroll
      for (int i = 0; i < kElements - 1; ++i) {
        if (i < count) to[i] = __ldg(from + i);
      }
    }
  }

 private:
  using Bits = std::conditional_t<sizeof(E) == 2, uint16_t, uint32_t>;

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ const Bits* data() const { return static_cast<const Bits*>(rows_.bias.data); }
  /// Elements of a row's chunks up to its end, at most those of all chunks; none if the block is past its end.
  __device__ __forceinline__ int32_t elements(int32_t row) const {
    const int32_t left = rows_.bias.keys - first_key_;
    return left > 0 ? min(rows_.shift(row) + left, (kChunks + 1) * kElements) : 0;
  }
  __device__ __forceinline__ int32_t whole_chunks(int32_t row) const { return elements(row) / kElements; }
  /// Chunk `chunk` of row `row`.
  __device__ __forceinline__ const uint8_t* chunk_at(int32_t row, int32_t chunk) const {
    const int64_t first = rows_.element(row, first_key_) & ~static_cast<int64_t>(kElements - 1);
    return reinterpret_cast<const uint8_t*>(data() + first) + chunk * 16;
  }

  const Rows& rows_;
  uint8_t* const to_;
  const int32_t first_key_;
};

/// As `load_bias`.
template <typename Shape, typename E>
__device__ __forceinline__ void load_shifted_bias(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  const BiasSource& bias = reinterpret_cast<const HopperBiasParams&>(params).source;
  int32_t block_count = 0;
  for_bias_tiles(pipeline, [&](const BiasTile& tile) {
    const ShiftedBiasRows<E> rows(bias, tile);
#pragma unroll 1
    for (int32_t block = tile.end_block - 1; block >= tile.first_block; --block, ++block_count) {
      const PipelineState<Shape::kBiasStages> state(block_count);
      const Barrier full = pipeline.bias_full(state);
      const ShiftedBiasLoad<Shape, E> load(rows, pipeline.bias_pointer(state.stage), block * Shape::kKeys);
      pipeline.bias_empty(state).producer_wait();
      if (load.copy_chunks()) {
        ptx::cp_async_arrive(full.address);
      } else {
        xa::ptx::cp_async_commit();
        xa::ptx::cp_async_wait<0>();
        __syncwarp();
        load.copy_ends();
        full.arrive();
      }
    }
  });
}

/// As `add_bias`.
template <typename Shape, typename E, int kKeyTiles>
__device__ __forceinline__ void add_shifted_bias(const Pipeline<Shape>& pipeline, const HopperPrefillParams& params,
                                                 const BiasTile& tile, float (&scores)[kKeyTiles][4], float factor,
                                                 int32_t block_count) {
  constexpr int kPitch = Shape::kBiasPitch / static_cast<int>(sizeof(E));
  const PipelineState<Shape::kBiasStages> state(block_count);
  const ShiftedBiasRows<E> rows(reinterpret_cast<const HopperBiasParams&>(params).source, tile);
  const int32_t thread = xa::ptx::opaque(threadIdx.x), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  // The lane's second row is eight below and begins at the same element of a chunk.
  const E* const from =
      reinterpret_cast<const E*>(pipeline.bias_pointer(state.stage)) + row * kPitch + rows.shift(row) + lane % 4 * 2;
  pipeline.bias_full(state).wait();
#pragma unroll
  for (int keys = 0; keys < kKeyTiles; ++keys) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float bias = Element<E>::to_f32(from[i / 2 * (8 * kPitch) + 8 * keys + i % 2]);
      scores[keys][i] = __fmaf_rn(scores[keys][i], factor, bias);
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) pipeline.bias_empty(state).arrive();
}

}  // namespace xa::hopper
