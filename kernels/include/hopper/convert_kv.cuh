// 8-bit K and V in pages, converted to f16 in shared memory for wgmma. f16 represents every number of the 8-bit
// formats, and the portable kernels compute in f16 too (fp8.cuh).
//
// TMA loads a block in 8 bits, and the converter warps write it as f16 into the stage that the compute warps read, half
// of the warps that of K and half of them that of V.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fp8.cuh"
#include "hopper/load.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/ptx.cuh"
#include "hopper/swizzle_atom.cuh"
#include "params/hopper_prefill.cuh"
#include "ptx.cuh"

namespace xa::hopper {

/// Converts blocks of K or V. A lane converts a 16-byte chunk, whose columns become two chunks, at a time. Of eight
/// lanes, four have half of an atom's row r and four have that of row r ^ 5: rows that differ in their lowest bit have
/// their even chunks in different banks, and those that differ in bit 2 have the halves of their chunks in different
/// banks.
template <typename Shape, Operand kOperand>
class KvConverter {
  static constexpr bool kOfKeys = kOperand == Operand::keys;
  using From = std::conditional_t<kOfKeys, typename Shape::LoadedKeyBlock, typename Shape::LoadedValueBlock>;
  using To = std::conditional_t<kOfKeys, typename Shape::KeyBlock, typename Shape::ValueBlock>;
  using FromAtom = typename From::Atom;
  using ToAtom = typename Shape::Atom;
  static constexpr int kLoadedStages = kOfKeys ? Shape::kLoadedKeyStages : Shape::kLoadedValueStages;
  static constexpr int kStages = kOfKeys ? Shape::kStages : Shape::kValueStages;
  /// Halves of eight chunks (64 columns) in the rows of a row group of 8 keys: a step of the warp each.
  static constexpr int kSteps = From::kAtomColumns * FromAtom::kChunks / 4;
  /// Parts of a block, of adjacent rows: one per warp that converts the operand.
  static constexpr int kParts = Shape::kConverterWarps / 2, kRowGroups = Shape::kKeys / 8 / kParts;
  /// Row groups that are converted at a time.
  static constexpr int kGroups = kSteps > 1 ? 1 : 2;
  static_assert(ToAtom::kColumns == 64 && kRowGroups % kGroups == 0 && Shape::kKeys % (8 * kParts) == 0);

 public:
  __device__ __forceinline__ KvConverter(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                         int32_t part)
      : pipeline_(pipeline), part_(part), is_other_(is_other_format(params)) {
    const int32_t lane = threadIdx.x % 32, chunk = lane % 4, row = lane / 8 ^ (lane & 4) / 4 * 5;
    from_ = part * kRowGroups * From::kStrideByteOffset + FromAtom::offset(row, chunk);
    to_ = part * kRowGroups * To::kStrideByteOffset + ToAtom::offset(row, 2 * chunk);
  }

  /// Converts `block` of the tile, the CTA's block number `count`. Keys of V that no query of the sequence attends to
  /// become 0, because memory there may hold NaN.
  __device__ __forceinline__ void convert_block(int32_t block, int32_t count, const PrefillTile& tile) const {
    const PipelineState<kLoadedStages> loaded(count);
    const PipelineState<kStages> state(count);
    const Barrier full = kOfKeys ? pipeline_.keys_full(state) : pipeline_.values_full(state);
    const Barrier loaded_empty = kOfKeys ? pipeline_.loaded_keys_empty(loaded) : pipeline_.loaded_values_empty(loaded);
    (kOfKeys ? pipeline_.loaded_keys_full(loaded) : pipeline_.loaded_values_full(loaded)).wait();
    (kOfKeys ? pipeline_.keys_empty(state) : pipeline_.values_empty(state)).producer_wait();
    const uint32_t from = kOfKeys ? pipeline_.loaded_keys(loaded.stage) : pipeline_.loaded_values(loaded.stage);
    const uint32_t to = kOfKeys ? pipeline_.keys(state.stage) : pipeline_.values(state.stage);
    if (!is_other_) {
      convert_rows<Fp8<false>, false>(from, to);
    } else if (Shape::kHasTokenScales) {
      convert_rows<ScaledI8, false>(from, to);
    } else {
      convert_rows<Fp8<false>, true>(from, to);
    }
    const int32_t first_key = block * Shape::kKeys;
    if (!kOfKeys && (first_key < tile.visible_begin || first_key + Shape::kKeys > tile.visible_end)) {
      __syncwarp();
      const int32_t begin = part_ * 8 * kRowGroups, end = begin + 8 * kRowGroups;
      clear_whole_tile_rows<ToAtom, To, Shape::kKeys>(to, begin, min(tile.visible_begin - first_key, end));
      clear_whole_tile_rows<ToAtom, To, Shape::kKeys>(to, max(tile.visible_end - first_key, begin), end);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      loaded_empty.arrive();
      full.arrive();
    }
  }

 private:
  /// Whether the format is not e4m3fn, but int8 if rows have scales, else e5m2.
  static __device__ __forceinline__ bool is_other_format(const HopperPrefillParams& params) {
    if constexpr (Shape::kHasTokenScales) {
      return reinterpret_cast<const HopperTokenScaleParams&>(params).kv_is_i8 != 0;
    } else {
      return params.attention.kv_is_e5m2 != 0;
    }
  }
  /// Converts this warp's rows, few chunks at a time: more stores in a row are in the way of wgmma, which reads its
  /// operands from shared memory meanwhile.
  template <typename Stored, bool kIsE5m2>
  __device__ __forceinline__ void convert_rows(uint32_t from, uint32_t to) const {
    from += from_;
    to += to_;
#pragma unroll 1
    for (int32_t group = 0; group < kRowGroups; group += kGroups) {
      uint4 codes[kGroups][kSteps];
#pragma unroll
      for (int i = 0; i < kGroups * kSteps; ++i) {
        const int chunk = 4 * (i % kSteps), column = chunk / FromAtom::kChunks;
        codes[i / kSteps][i % kSteps] =
            xa::ptx::load_shared_16((from ^ chunk % FromAtom::kChunks * 16) + column * From::kLeadingByteOffset +
                                    i / kSteps * From::kStrideByteOffset);
      }
#pragma unroll
      for (int i = 0; i < kGroups * kSteps; ++i) {
        const uint4& own = codes[i / kSteps][i % kSteps];
        const uint32_t chunk = to + i % kSteps * To::kLeadingByteOffset + i / kSteps * To::kStrideByteOffset;
        xa::ptx::store_shared_16(chunk, decode<Stored, kIsE5m2>(own.x, own.y));
        xa::ptx::store_shared_16(chunk ^ 16, decode<Stored, kIsE5m2>(own.z, own.w));
      }
      from += kGroups * From::kStrideByteOffset;
      to += kGroups * To::kStrideByteOffset;
    }
  }
  /// Eight codes as f16.
  template <typename Stored, bool kIsE5m2>
  static __device__ __forceinline__ uint4 decode(uint32_t low, uint32_t high) {
    const TwoPairs first = decode_neighbours<Stored, kIsE5m2>(low);
    const TwoPairs second = decode_neighbours<Stored, kIsE5m2>(high);
    return make_uint4(first.first, first.second, second.first, second.second);
  }

  const Pipeline<Shape>& pipeline_;
  const int32_t part_;
  const bool is_other_;
  uint32_t from_, to_;  // of this lane's first chunk in a block
};

/// Converts the blocks of all tiles of the CTA: this warp's part of them, part `part` of kParts.
template <typename Shape, Operand kOperand>
__device__ __forceinline__ void convert_blocks(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                               int32_t part) {
  const KvConverter<Shape, kOperand> converter(params, pipeline, part);
  int32_t block_count = 0;
  bool has_tile = true;
  // `count` counts the scheduler's tiles, `tile_count` those that have keys.
#pragma unroll 1
  for (int32_t count = 0, tile_count = 0; has_tile; ++count) {
    const PipelineState<2> tile_state(count);
    pipeline.tile_full(tile_state).wait();
    const typename Shape::Tile& tile = pipeline.tile(tile_state);
    has_tile = tile.work.tile.num_rows > Shape::kNoRows;
    const int32_t first = tile.first_block, last = tile.end_block - 1;
    if (has_tile && last >= first) {
      // The stages of the tile's first blocks of V have O of the tile before.
      const bool waits_for_output =
          kOperand == Operand::values && stages_output_in_values<Shape>(params) && tile_count > 0;
#pragma unroll 1
      for (int32_t block = last; block >= first; --block, ++block_count) {
        if (waits_for_output && last - block < 2) pipeline.output_left(last - block, tile_count - 1).wait();
        converter.convert_block(block, block_count, tile);
      }
      // A tile of one block needs no second stage, but the warp must not fall two phases behind.
      if (waits_for_output && last == first) pipeline.output_left(1, tile_count - 1).wait();
      ++tile_count;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.tile_empty(tile_state).arrive();
  }
}

/// A warp behind the load warps, if the kernel converts K and V: half of these warps convert K, the others V.
template <typename Shape>
__device__ __forceinline__ void run_converter_warp(const HopperPrefillParams& params, const Pipeline<Shape>& pipeline,
                                                   int32_t warp) {
  if constexpr (Shape::kConvertsKv) {
    ptx::warpgroup_reg_dealloc<Shape::kConverterRegisters>();
    constexpr int kWarps = Shape::kConverterWarps / 2;
    const int32_t own = warp - Shape::kComputeWarps - 4;
    if (own < kWarps) {
      convert_blocks<Shape, Operand::keys>(params, pipeline, own);
    } else {
      convert_blocks<Shape, Operand::values>(params, pipeline, own - kWarps);
    }
  }
}

}  // namespace xa::hopper
