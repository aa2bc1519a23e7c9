// A bias of f32 in dK and dV where its rows begin with chunks of 16 bytes. It is staged as one of 16 bits is. The rows
// of scores that a lane has are the four keys of a chunk (KeysOfRows), so it loads whole chunks.
//
// dS takes the place of the bias, each chunk from the lane that has read it, and is stored to global memory when all
// warps have done so: then an instruction of a warp stores all keys of a query row. From registers it would store a
// quarter of the keys of four rows, with which dK and dV take 4 % longer.
#pragma once

#include <cstdint>

#include "bwd/aligned_bias.cuh"
#include "bwd/ptx_extra.cuh"
#include "bwd/score_gradients.cuh"
#include "element.cuh"
#include "params/attention.cuh"
#include "params/bias.cuh"
#include "ptx.cuh"
#include "score_bias.cuh"

namespace xa {

/// dS is f32 as the gradient of the bias, and of type T in the workspace, where it takes the first half of each chunk.
template <typename Shape, typename T>
class AlignedF32BiasStage : public AlignedBiasStage<Shape, float> {
  using Base = AlignedBiasStage<Shape, float>;
  using Scores = float[2][4][4];
  static constexpr int kPitch = Shape::template kStagedPitch<float>;

 public:
  __device__ __forceinline__ AlignedF32BiasStage(uint8_t* memory) : Base(memory), memory_(memory) {}

  /// As AlignedBiasStage::start.
  __device__ __forceinline__ void start(Scores& scores, const AttentionParams& params, int32_t row,
                                        int32_t column) const {
    const float factor = bias_factor(params);
    for_chunks(row, column, [&](int block, int side, uint8_t* chunk) {
      const float4 keys = scaled(*reinterpret_cast<const float4*>(chunk), factor);
      scores[0][block][side] = keys.x;
      scores[0][block][side + 2] = keys.y;
      scores[1][block][side] = keys.z;
      scores[1][block][side + 2] = keys.w;
    });
  }
  /// Stores dS of the scores that `start` had to where their bias was.
  __device__ __forceinline__ void replace(const Scores& ds, const ScoreGradients& place, int32_t row,
                                          int32_t column) const {
    with_type(place, [&](auto type) {
      for_chunks(row, column, [&](int block, int side, uint8_t* chunk) {
        store_columns(
            reinterpret_cast<decltype(type)*>(chunk),
            make_float4(ds[0][block][side], ds[0][block][side + 2], ds[1][block][side], ds[1][block][side + 2]));
      });
    });
  }
  /// Where column `column` of the row of dS from element `row` on is; null for kNoBias.
  static __device__ __forceinline__ float* place_of(const ScoreGradients& ds, int64_t row, int32_t column) {
    if (row == kNoBias) return nullptr;
    uint8_t* const data = static_cast<uint8_t*>(ds.data);
    const int64_t bytes = is_f32(ds) ? sizeof(float) : sizeof(T);
    return reinterpret_cast<float*>(data + (row + column) * bytes);
  }
  /// Stores dS of all rows to global memory, when all warps have called `replace` and a barrier has passed. `rows` are
  /// the `place_of` the block's first key, whose column is `column`. All threads of the CTA call it.
  __device__ __forceinline__ void store(float* const* rows, const ScoreGradients& ds, int32_t column) const {
    with_type(ds, [&](auto type) {
      using Ds = decltype(type);
      const auto exists = [&](int32_t key) {
        return static_cast<uint32_t>(column + key) < static_cast<uint32_t>(ds.pitch);
      };
      constexpr int kElements = 16 / static_cast<int>(sizeof(Ds));
      if (column % kElements == 0) {
        store_chunks<Ds>(rows, exists);
      } else {
        store_elements<Ds>(rows, exists);
      }
    });
  }

 private:
  static __device__ __forceinline__ bool is_f32(const ScoreGradients& ds) { return ds.has_token_rows == 0; }
  /// Calls `function` with an element of the type of dS.
  template <typename Function>
  static __device__ __forceinline__ void with_type(const ScoreGradients& ds, const Function& function) {
    if (is_f32(ds)) {
      function(float{});
    } else {
      function(T{});
    }
  }
  /// Calls `visit(block, side, chunk)` for the lane's chunk of keys of each of its query rows, which are number `side`
  /// of two in block `block`. The warp has query rows from `row` on and keys from `column` on.
  template <typename Visit>
  __device__ __forceinline__ void for_chunks(int32_t row, int32_t column, const Visit& visit) const {
    const int32_t lane = ptx::thread() % 32;
    uint8_t* const first = memory_ + (row + lane % 4 * 2) * kPitch + column * sizeof(float) + lane / 4 * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) visit(i / 2, i % 2, first + (i / 2 * 8 + i % 2) * kPitch);
  }
  template <typename Ds, typename Exists>
  __device__ __forceinline__ void store_chunks(float* const* rows, const Exists& exists) const {
    constexpr int kElements = 16 / static_cast<int>(sizeof(Ds)), kChunks = Shape::kStagedKeys / kElements;
    constexpr int kStep = Shape::kThreads / kChunks, kStores = Shape::kStagedRows / kStep;
    static_assert(Shape::kThreads % kChunks == 0 && Shape::kStagedRows % kStep == 0);
    const uint32_t thread = ptx::thread(), chunk = thread % kChunks, first_row = thread / kChunks;
    if (!exists(chunk * kElements)) return;
    const uint8_t* const from = memory_ + first_row * kPitch + chunk * (kElements * sizeof(float));
    // All loads first: the stores wait for them once then.
    float* to[kStores];
    uint4 elements[kStores];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      to[i] = rows[first_row + i * kStep];
      const uint8_t* const staged = from + i * kStep * kPitch;
      if constexpr (sizeof(Ds) == 4) {
        elements[i] = *reinterpret_cast<const uint4*>(staged);
      } else {
        const auto first = *reinterpret_cast<const uint2*>(staged),
                   second = *reinterpret_cast<const uint2*>(staged + 16);
        elements[i] = make_uint4(first.x, first.y, second.x, second.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      if (to[i] != nullptr) ptx::store_global_16(reinterpret_cast<uint4*>(to[i]) + chunk, elements[i]);
    }
  }
  template <typename Ds, typename Exists>
  __device__ __forceinline__ void store_elements(float* const* rows, const Exists& exists) const {
#pragma unroll 1
    for (int32_t item = ptx::thread(); item < Shape::kStagedRows * Shape::kStagedKeys; item += Shape::kThreads) {
      const int32_t row = item / Shape::kStagedKeys, key = item % Shape::kStagedKeys;
      const auto* const staged = reinterpret_cast<const Ds*>(memory_ + row * kPitch + key / 4 * 16) + key % 4;
      if (rows[row] != nullptr && exists(key)) reinterpret_cast<Ds*>(rows[row])[key] = *staged;
    }
  }

  uint8_t* const memory_;
};

}  // namespace xa
