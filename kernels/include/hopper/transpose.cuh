// The warps of an fp8 prefill CTA that transpose V in shared memory: from [key][column], as the copy engine fetches it,
// to [column][key], as wgmma wants 8-bit operands.
//
// Keys lie in the order in which an accumulator of scores has them, so that weights become an operand without a lane
// asking another one: of 16 neighbouring keys, byte 4t + i of a chunk belongs to key 2t + i for i < 2, else to key
// 8 + 2t + i - 2.
#pragma once

#include <cstdint>

#include "hopper/load.cuh"
#include "hopper/pipeline.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// Transposes blocks of V of one tile, or a part of each: chunks of 16 columns are dealt out among kTransposeWarps
/// warps.
template <typename Shape>
class Transposer {
  using Atom = typename Shape::Fp8Atom;
  using From = typename Shape::LoadedValueBlock;
  using To = typename Shape::ValueBlock;
  static constexpr int kChunks = From::kAtomColumns * Atom::kChunks / Shape::kTransposeWarps;  // of this warp

 public:
  __device__ __forceinline__ Transposer(const Pipeline<Shape>& pipeline, int32_t part)
      : pipeline_(pipeline), first_chunk_(part * kChunks) {
    const int32_t lane = threadIdx.x % 32, row = lane % 8;
    from_ = lane / 8 * From::kStrideByteOffset + row * Atom::kRowBytes;
    from_swizzle_ = row * 16;
    // Bytes of a pair of columns, one a row: where rows 2i come out of the lower half of the lanes, rows 2i + 1 come
    // out of the upper half, and the other way round, so that the eight rows of a matrix lie in different banks.
    select_[0] = lane < 16 ? 0x6420 : 0x7531;
    select_[1] = lane < 16 ? 0x7531 : 0x6420;
    const int32_t column = 2 * row + (row / 4 ^ (lane / 8 & 1));
    to_ = (first_chunk_ * 16 + column) * Atom::kRowBytes;
    to_swizzle_ = (lane / 16 ^ column % 8) * 16;
  }

  /// The turn-th block of the CTA, `block` of the tile. Keys that no row of the sequence sees become 0: what lies there
  /// may be NaN.
  __device__ __forceinline__ void run(int32_t block, int32_t turn_number, const PrefillTile& tile) const {
    const PipelineState<Shape::kStages> turn(turn_number);
    const int32_t first_key = block * Shape::kKeys;
    pipeline_.loaded_values_full(turn).wait();
    pipeline_.values_empty(turn).producer_wait();
    const uint32_t from = pipeline_.loaded_values(turn.stage), to = pipeline_.values(turn.stage);
    if (first_key >= tile.visible_begin && first_key + Shape::kKeys <= tile.visible_end) {
      move(from, to, [](int, uint32_t pairs) { return pairs; });
    } else {
      const int32_t first = first_key + threadIdx.x % 4 * 2, begin = tile.visible_begin, end = tile.visible_end;
      move(from, to, [=](int key_in_block, uint32_t pairs) {
        const int32_t key = first + key_in_block;
        const uint32_t low = key >= begin && key < end ? 0x0000ffffu : 0u;
        const uint32_t high = key + 1 >= begin && key + 1 < end ? 0xffff0000u : 0u;
        return pairs & (low | high);
      });
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      pipeline_.loaded_values_empty(turn).arrive();
      pipeline_.values_full(turn).arrive();
    }
  }

 private:
  /// `filter` gets the number in the block of the first of 8 keys, and of two of them a pair of columns each.
  template <typename Filter>
  __device__ __forceinline__ void move(uint32_t from, uint32_t to, const Filter& filter) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t column = from + from_ + (first_chunk_ + i) / Atom::kChunks * From::kLeadingByteOffset +
                              ((first_chunk_ + i) % Atom::kChunks * 16 ^ from_swizzle_);
#pragma unroll
      for (int keys = 0; keys < Shape::kKeys; keys += 32) {
        uint32_t pairs[4], quads[4];
        xa::ptx::ldmatrix_x4_trans(pairs, column + keys / 8 * From::kStrideByteOffset);
#pragma unroll
        for (int octet = 0; octet < 4; ++octet) pairs[octet] = filter(keys + 8 * octet, pairs[octet]);
#pragma unroll
        for (int j = 0; j < 4; ++j) quads[j] = __byte_perm(pairs[j / 2 * 2], pairs[j / 2 * 2 + 1], select_[j % 2]);
        ptx::stmatrix_x4(
            to + to_ + i * 16 * Atom::kRowBytes + keys / 128 * To::kLeadingByteOffset + (keys % 128 ^ to_swizzle_),
            quads);
      }
    }
  }

  const Pipeline<Shape>& pipeline_;
  const int32_t first_chunk_;
  // Of this lane: where its row of a matrix is, but for the chunk, and what is added to the chunk's place by xor.
  uint32_t from_;
  uint32_t from_swizzle_;
  uint32_t to_;
  uint32_t to_swizzle_;
  uint32_t select_[2];
};

/// Transposes its part of the blocks of all tiles of the CTA; part 0 fetches them too. The work of one warp.
template <typename Shape, int kPart>
__device__ __forceinline__ void transpose_blocks(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline) {
  TmaLoader<Shape, Operand::values> loader(params, pipeline);
  const Transposer<Shape> transposer(pipeline, kPart);
  int32_t turn = 0, rows = 1;
#pragma unroll 1
  for (int32_t count = 0; rows > 0; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const PrefillTile& tile = pipeline.tile(tile_state);
    rows = tile.work.tile.num_rows;
    const int32_t first = tile.first_block;
    int32_t block = tile.end_block - 1;
    if (rows > 0 && block >= first) {
      if (kPart == 0) {
        loader.begin(tile, block);
        loader.load(block, turn);
      }
#pragma unroll 1
      for (; block >= first; --block, ++turn) {
        // The next block is on its way while this one is transposed.
        if (kPart == 0 && block > first) loader.load(block - 1, turn + 1);
        transposer.run(block, turn, tile);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

}  // namespace xa::hopper
