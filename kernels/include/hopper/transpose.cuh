// The transpose warps of an fp8 prefill CTA: V in shared memory from [key][column], as TMA loads it, to [column][key],
// because wgmma takes 8-bit operands K-major only.
//
// Keys are in the order of the score accumulators, so that a lane packs its own weights into the A operand without
// shuffles: of 16 adjacent keys, byte 4t + i of a chunk belongs to key 2t + i for i < 2, else to key 8 + 2t + i - 2.
#pragma once

#include <cstdint>

#include "hopper/load.cuh"
#include "hopper/pipeline.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// Transposes one warp's part of blocks of V. The kTransposeWarps warps divide the chunks of 16 columns evenly.
template <typename Shape>
class Transposer {
  using Atom = typename Shape::Fp8Atom;
  using ToAtom = typename Shape::TransposedAtom;
  using From = typename Shape::LoadedValueBlock;
  using To = typename Shape::ValueBlock;
  static constexpr int kChunks = From::kAtomColumns * Atom::kChunks / Shape::kTransposeWarps;  // of this warp
  static constexpr int kKeySteps = Shape::kKeys / 32, kMatrices = kChunks * kKeySteps;
  /// Loads in flight: a store waits for its load, so one at a time would take longer than the products at D 256.
  static constexpr int kInFlight = 4;
  static_assert(kInFlight <= kMatrices);

 public:
  __device__ __forceinline__ Transposer(const Pipeline<Shape>& pipeline, int32_t warp)
      : pipeline_(pipeline), first_chunk_(warp * kChunks) {
    const int32_t lane = threadIdx.x % 32, row = lane % 8;
    from_ = lane / 8 * From::kStrideByteOffset + row * Atom::kRowBytes;
    from_swizzle_ = Atom::offset(row, 0) - row * Atom::kRowBytes;
    // Of a pair of columns, a lane of the lower half first selects the even column and a lane of the upper half the odd
    // one, then the other way round: the eight rows of each matrix that stmatrix stores are in different banks.
    selectors_[0] = lane < 16 ? 0x6420 : 0x7531;
    selectors_[1] = lane < 16 ? 0x7531 : 0x6420;
    const int32_t column = 2 * row + (row / 4 ^ (lane / 8 & 1));
    to_ = (first_chunk_ * 16 + column) * ToAtom::kRowBytes;
    to_swizzle_ = (lane / 16 ^ column % 8) * 16;
  }

  /// Transposes `block` of the tile, the CTA's block number `count`. Keys that no query of the sequence attends to
  /// become 0, because memory there may hold NaN.
  __device__ __forceinline__ void transpose_block(int32_t block, int32_t count, const PrefillTile& tile) const {
    const PipelineState<Shape::kStages> state(count);
    const int32_t first_key = block * Shape::kKeys;
    pipeline_.loaded_values_full(state).wait();
    pipeline_.values_empty(state).producer_wait();
    const uint32_t from = pipeline_.loaded_values(state.stage), to = pipeline_.values(state.stage);
    clear_rows(from, 0, tile.visible_begin - first_key);
    clear_rows(from, tile.visible_end - first_key, Shape::kKeys);
    transpose_chunks(from, to);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      pipeline_.loaded_values_empty(state).arrive();
      pipeline_.values_full(state).arrive();
    }
  }

 private:
  /// Clears this warp's chunks of rows [first, end) of V as loaded.
  __device__ __forceinline__ void clear_rows(uint32_t from, int32_t first, int32_t end) const {
    if (first >= end) return;
    clear_tile_rows<Atom, From, Shape::kKeys, kChunks>(from, first_chunk_, first, end);
    __syncwarp();
  }
  /// Transposes this warp's chunks, 32 keys of a chunk at a time. As soon as one is stored, another one is loaded.
  __device__ __forceinline__ void transpose_chunks(uint32_t from, uint32_t to) const {
    // Two columns of two keys each, from four matrices of 8 keys.
    uint32_t pairs[kInFlight][4];
    const auto load = [&](int i) {
      const int chunk = first_chunk_ + i / kKeySteps, row_group = i % kKeySteps * 4;
      const uint32_t column = from + from_ + chunk / Atom::kChunks * From::kLeadingByteOffset +
                              (chunk % Atom::kChunks * 16 ^ from_swizzle_);
      xa::ptx::ldmatrix_x4_trans(pairs[i % kInFlight], column + row_group * From::kStrideByteOffset);
    };
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      const int chunk = i / kKeySteps, keys = i % kKeySteps * 32;
      // One column of four keys each.
      uint32_t quads[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        quads[j] = __byte_perm(pairs[i % kInFlight][j / 2 * 2], pairs[i % kInFlight][j / 2 * 2 + 1], selectors_[j % 2]);
      }
      ptx::stmatrix_x4(
          to + to_ + chunk * 16 * ToAtom::kRowBytes + keys / 128 * To::kLeadingByteOffset + (keys % 128 ^ to_swizzle_),
          quads);
      if (i + kInFlight < kMatrices) load(i + kInFlight);
    }
  }

  const Pipeline<Shape>& pipeline_;
  const int32_t first_chunk_;
  // This lane's row address in a matrix without the chunk, and the swizzle that is XORed to the chunk's offset.
  uint32_t from_;
  uint32_t from_swizzle_;
  uint32_t to_;
  uint32_t to_swizzle_;
  uint32_t selectors_[2];
};

/// A transpose warp: transposes its part of the blocks of all tiles of the CTA. Warp 0 issues their TMA loads too.
template <typename Shape, int kWarp>
__device__ __forceinline__ void transpose_blocks(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  TmaLoader<Shape, Operand::values, Shape::kStorage == Storage::paged> loader(params, pipeline);
  const Transposer<Shape> transposer(pipeline, kWarp);
  int32_t block_count = 0, rows = 1;
#pragma unroll 1
  for (int32_t count = 0; rows > 0; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const typename Shape::Tile& tile = pipeline.tile(tile_state);
    rows = tile.work.tile.num_rows;
    const int32_t first = tile.first_block;
    int32_t block = tile.end_block - 1;
    if (rows > 0 && block >= first) {
      if (kWarp == 0) {
        loader.begin(tile, block);
        loader.load(block, block_count);
      }
#pragma unroll 1
      for (; block >= first; --block, ++block_count) {
        // The next block loads while this one is transposed.
        if (kWarp == 0 && block > first) loader.load(block - 1, block_count + 1);
        transposer.transpose_block(block, block_count, tile);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

}  // namespace xa::hopper
