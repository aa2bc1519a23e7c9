// Scales of the rows of K and V, one per token and KV head: caches of int8 or e4m3fn that are quantized row by row.
//
// The scales of a block of keys come with its rows by cp.async: kKeys numbers of K, then as many of V. They follow the
// blocks of the ring. Scores are multiplied by K's scales before the logits transform.
// Probabilities are multiplied by V's once the row's sum has taken them; so the elements of V stay exact f16, and each
// score costs a product instead of each element. Keys past the sequence's end have the scale 0.
//
// P V has f16 operands, but V's scales may have any magnitude. Probabilities are therefore multiplied by a power of two
// as well, which brings the largest scale of V so far into [2^14, 2^15). What f16 then cannot hold is below 2^-38 of
// it.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "fp8.cuh"
#include "paged_rows.cuh"
#include "params/token_scales.cuh"
#include "ptx.cuh"
#include "scale_exponents.cuh"
#include "softmax.cuh"
#include "token_scales_ptx.cuh"
#include "whole_rows.cuh"
#include "work_tile.cuh"

namespace xa {

/// The scales of a warp's or CTA's ring.
template <typename Shape>
class TokenScales {
  static constexpr int kKeys = Shape::kKeys;

 public:
  /// `ring` is the shared address of the ring.
  __device__ __forceinline__ TokenScales(const TokenScaleParams& params, const WorkTile& work, uint32_t ring)
      : params_(params), work_(work), ring_(ring) {
    if constexpr (Shape::kHoldsAddresses) held_ = first_scale(threadIdx.x % 32);
  }

  /// The shared address of the scales of a stage: K's, and kKeys numbers later V's.
  __device__ __forceinline__ uint32_t keys(int32_t stage) const {
    return ring_ + 2 * Shape::kStages * Shape::kBlockBytes + stage * Shape::kScaleBytes;
  }
  __device__ __forceinline__ uint32_t values(int32_t stage) const { return keys(stage) + 4 * kKeys; }

  /// Decode: starts to copy the scales of K and V of a load of a usual block (whole_rows.cuh), whose tokens lie at
  /// `slot`, from key `offset` of the stage's block on. Half of the lanes have one of K, the others one of V.
  __device__ __forceinline__ void load_usual(int32_t stage, int32_t offset, const TokenSlot& slot) const {
    const int32_t lane = Shape::kHoldsAddresses ? threadIdx.x % 32 : ptx::opaque(threadIdx.x % 32);
    const float* const from = Shape::kHoldsAddresses ? held_ : first_scale(lane);
    const uint32_t page = clamp(slot.page, 0, params_.attention.num_pages - 1), token = slot.offset;
    // The host refuses strides of more than 32 bits.
    const uint32_t to = keys(stage) + 4 * (lane % kTokensPerLoad + lane / kTokensPerLoad * kKeys + offset);
    ptx::cp_async_4(to,
                    from + static_cast<uint64_t>(page) * low_half(params_.k_scales.page_stride) +
                        static_cast<uint64_t>(token) * low_half(params_.k_scales.token_stride),
                    true);
  }
  /// The same for a load of any block, from key `first` of the sequence on.
  __device__ __forceinline__ void load_other(int32_t stage, int32_t offset, int32_t first, const TokenSlot& slot,
                                             bool fits_pages) const {
    static_assert(2 * kTokensPerLoad == 32);
    const int32_t lane = ptx::opaque(threadIdx.x % 32), token = lane % kTokensPerLoad;
    const bool is_value = lane >= kTokensPerLoad;
    copy(is_value ? params_.v_scales : params_.k_scales,
         (is_value ? values(stage) : keys(stage)) + 4 * (offset + token), first + token,
         TokenSlot{slot.page, slot.offset + (fits_pages ? token : 0)});
  }

  /// Prefill: starts to copy the scales of the warp's part of a block of K or V, as RowLoader copies its rows.
  __device__ __forceinline__ void load_keys(int32_t stage, int32_t offset, int32_t first, const TokenSlot& slot) const {
    load_part(params_.k_scales, keys(stage) + 4 * offset, first, slot);
  }
  __device__ __forceinline__ void load_values(int32_t stage, int32_t offset, int32_t first,
                                              const TokenSlot& slot) const {
    load_part(params_.v_scales, values(stage) + 4 * offset, first, slot);
  }

  /// Multiplies the scores of all row tiles of a warp by the scales of the stage's keys.
  template <int kRowTiles>
  __device__ __forceinline__ void apply_to_scores(float (&scores)[kRowTiles][kKeys / 8][4], int32_t stage) const {
    const uint32_t address = keys(stage) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int block = 0; block < kKeys / 8; ++block) {
      const float2 scale = ptx::load_shared_f32x2(address + 32 * block);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][block][i] *= i % 2 == 0 ? scale.x : scale.y;
      }
    }
  }

 private:
  /// Of a lane of `load_usual`, in page 0.
  __device__ __forceinline__ const float* first_scale(int32_t lane) const {
    const KvSource& source = lane < kTokensPerLoad ? params_.k_scales : params_.v_scales;
    return static_cast<const float*>(source.base) + work_.kv_head * params_.k_scales.head_stride +
           lane % kTokensPerLoad * params_.k_scales.token_stride;
  }
  __device__ __forceinline__ void load_part(const KvSource& scales, uint32_t destination, int32_t first,
                                            const TokenSlot& slot) const {
    const int32_t lane = threadIdx.x % 32;
    const bool fits_one_page = params_.attention.page_size % Shape::kKeysPerLoad == 0;
    if (lane >= Shape::kKeysPerLoad) return;
    copy(scales, destination + 4 * lane, first + lane, TokenSlot{slot.page, slot.offset + (fits_one_page ? lane : 0)});
  }

  __device__ __forceinline__ void copy(const KvSource& scales, uint32_t destination, int32_t key,
                                       const TokenSlot& slot) const {
    const int32_t page = clamp(slot.page, 0, params_.attention.num_pages - 1);
    const float* const from = static_cast<const float*>(scales.base) + page * scales.page_stride +
                              slot.offset * scales.token_stride + work_.kv_head * scales.head_stride;
    const Interval visible = {work_.keys.begin, work_.keys.end - work_.keys.begin};
    ptx::cp_async_4(destination, from, visible.holds(key));
  }

  const TokenScaleParams& params_;
  const WorkTile& work_;
  uint32_t ring_;
  const float* held_;  // kHoldsAddresses: first_scale(lane)
};

/// A SoftmaxState whose probabilities and outputs are multiplied by 2^exponent.
template <int kRowTiles, int kColumnTiles, int kTileRows = 16>
struct TokenScaleState : SoftmaxState<kRowTiles, kColumnTiles, kTileRows> {
  using Base = SoftmaxState<kRowTiles, kColumnTiles, kTileRows>;
  static constexpr int kHalves = Base::kHalves;
  /// Of rows g and g + 8 of each tile, in 16 bits each.
  uint32_t exponents[kRowTiles];

  __device__ __forceinline__ TokenScaleState() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) exponents[tile] = packed(kLargestScaleExponent, kLargestScaleExponent);
  }

  /// Multiplies the probabilities of a row tile, which `update` has computed, by the scales of V at shared address
  /// `values`, and by the power of two. In a block without masked keys (`masked`) all rows have the same largest scale.
  /// In the others `visible` says which keys are not masked; whatever the scale of a masked key is has no effect.
  template <int kKeyTiles, typename Visible>
  __device__ __forceinline__ void apply(int tile, float (&p)[kKeyTiles][4], uint32_t values, bool masked,
                                        const Visible& visible, bool both_halves = true) {
    const uint32_t lane = threadIdx.x % 32, address = values + lane % 4 * 8;
    int32_t next[kHalves];
    if (!masked) {
      constexpr int kKeys = 8 * kKeyTiles;
      uint32_t largest = 0;
#pragma unroll
      for (int key = 0; key < kKeys; key += 32) {
        largest = max(largest, exponent_of_scale(ptx::load_shared_f32(values + (key + lane % min(kKeys, 32)) * 4)));
      }
      next[0] = next[kHalves - 1] = exponent_for_scales(__reduce_max_sync(~0u, static_cast<int32_t>(largest)));
    } else {
      uint32_t largest[kHalves] = {};
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        const float2 scale = ptx::load_shared_f32x2(address + 32 * block);
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) {
          const uint32_t own =
              visible.has(block, i, p[block][i]) ? exponent_of_scale(i % 2 == 0 ? scale.x : scale.y) : 0;
          largest[i / 2] = max(largest[i / 2], own);
        }
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        largest[half] = max(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
        next[half] = exponent_for_scales(max(largest[half], __shfl_xor_sync(~0u, largest[half], 2)));
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) next[half] = min(next[half], exponent(tile, half));
    if (__any_sync(~0u, packed(next[0], next[kHalves - 1]) != exponents[tile])) {
      float factors[2] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        factors[half] = exponent_change(next[half] - exponent(tile, half));
      }
      this->scale_output(tile, factors);
      exponents[tile] = packed(next[0], next[kHalves - 1]);
    }
    // Of a masked key the product is 0, also if its scale is a NaN or an infinity.
    constexpr bool kByProbability = std::is_same_v<Visible, ProbableKeys>;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half == 1 && !both_halves) break;
      const float power = power_of_two(next[half]);
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
        const float2 scale = ptx::load_shared_f32x2(address + 32 * block);
        float (&row)[4] = p[block];
        const float x = row[2 * half] * (scale.x * power), y = row[2 * half + 1] * (scale.y * power);
        row[2 * half] = kByProbability && masked && row[2 * half] == 0.0f ? 0.0f : x;
        row[2 * half + 1] = kByProbability && masked && row[2 * half + 1] == 0.0f ? 0.0f : y;
      }
    }
    if constexpr (!kByProbability) {
      if (!masked) return;
#pragma unroll
      for (int block = 0; block < kKeyTiles; ++block) {
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i) {
          if (!visible.has(block, i, p[block][i])) p[block][i] = 0.0f;
        }
      }
    }
  }

  /// Adds up the sums of a row's lanes and undoes the powers of two. Call it once, after the last block.
  __device__ __forceinline__ void finish() {
    Base::finish();
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float factors[2] = {};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) factors[half] = power_of_two(-exponent(tile, half));
      this->scale_output(tile, factors);
    }
  }

 private:
  static __device__ __forceinline__ uint32_t packed(int32_t first, int32_t second) {
    return __byte_perm(first, second, 0x5410);
  }
  __device__ __forceinline__ int32_t exponent(int tile, int half) const {
    return static_cast<int16_t>(exponents[tile] >> 16 * half);
  }
};

}  // namespace xa
